"""Steps of DistributedDataParallel with our hook and any codec, against plain DDP and torch's own hooks."""

import argparse

from benchmarks.ddp_ranks import (
    BACKWARD,
    BF16,
    DEADLINE,
    FP16,
    PEERS,
    PLAIN,
    POWER_SGD,
    STEP,
    UNCOMPRESSED,
    Job,
    Result,
    Side,
    work,
)
from benchmarks.harness import Failure, Keep, Progress, Row, Table, at_least, choices
from benchmarks.machine import link_probe
from benchmarks.machine.ranks import count_ranks, on_ranks
from dltrain_ext import codecs, comm

OVERVIEW = ["--codecs", "raw,fp16,int8", "--layers", "8", "-n", "10"]
EQUALS = {FP16: "fp16", BF16: "bf16"}  # the codecs that send the same elements as torch's hooks
WORKLOADS = {"backward": BACKWARD, "step": STEP}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "If torchrun's variables (RANK, WORLD_SIZE, ...) are set, it runs as that rank; rank 0 reports."
    parser.add_argument(
        "--codecs",
        type=choices([*codecs.CODECS, "auto"]),
        help=f"names out of {', '.join(codecs.CODECS)}, auto (default: raw,fp16,bf16,int8,int4,sign; "
        "--quick: raw,fp16,int8)",
    )
    parser.add_argument(
        "--algorithms",
        type=choices([*comm.ALGORITHMS, "native", "auto"]),
        default="auto",
        help=f"names out of {', '.join(comm.ALGORITHMS)}, native, auto (default: %(default)s)",
    )
    parser.add_argument(
        "--workloads",
        type=choices(list(WORKLOADS)),
        default=list(WORKLOADS),
        help="backward (forward and backward), step (a whole step), or both (default: both)",
    )
    parser.add_argument("--layers", type=at_least(1), help="number of Linear(width, width) (default: 12, --quick: 2)")
    parser.add_argument(
        "--max-error",
        type=fractions,
        default=[],
        help='also the codec "auto" with these error budgets, such as 0.2,0.02',
    )
    add_sizes(parser)
    parser.add_argument("-w", "--warmup", type=at_least(2), help="steps before the timed ones (default: 3, --quick: 2)")


def add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=at_least(1), help="width of a layer (default: 1024, --quick: 256)")
    parser.add_argument("--batch", type=at_least(1), default=16, help="batch size of each rank (default: %(default)s)")
    parser.add_argument("-n", "--iters", type=at_least(1), help="timed steps (default: 20, --quick: 5)")


def run(options: argparse.Namespace, progress: Progress, keep: Keep) -> None:
    ranks = count_ranks(options.ranks, 2)
    several = ["raw", "fp16", "int8"] if options.quick else ["raw", "fp16", "bf16", "int8", "int4", "sign"]
    names = options.codecs or several
    sides = make_sides(PEERS[options.device], names, options.algorithms)
    sides[BACKWARD] += [Side("auto", max_error=budget) for budget in options.max_error]
    job = Job(
        {WORKLOADS[name]: sides[WORKLOADS[name]] for name in options.workloads},
        layers=options.layers or (2 if options.quick else 12),
        width=options.width or (256 if options.quick else 1024),
        batch=options.batch,
        rounds=options.iters or (5 if options.quick else 20),
        warmup=options.warmup or (2 if options.quick else 3),
        device=options.device,
    )
    notes = [
        "a sample is one step after a barrier, on the slowest rank; the sides, each with its own model, are timed "
        "alternately",
        "#wrong: number of elements whose error exceeds that of (p + 1) encodings of the average; all elements if "
        "ranks differ in a bit; checked in the first step, before the timing",
        f"{POWER_SGD}: it projects the average to rank 4, so the check is that its error is smaller than the average, "
        f"after {UNCOMPRESSED} steps that it sends in full; it is compared with our codec that sends the least",
        "error: rms error over the rms of the exact average, in the first step; later steps have error feedback",
        "auto, error <= E: with max_error=E; its first 7 steps, in which codecs are tried, are not timed; the 11th, "
        "19th, 35th, ... are, which try them again; its wire bytes are the mean of all steps",
        "hidden %: the fraction of the communication time during which backward still runs, from state.stats()",
        "metrics %: the time of state.metrics(errors=False) relative to a step; with errors %: of state.metrics()",
        "wire bytes: bytes that one rank sends in one step",
    ]
    if STEP in job.sides:
        notes.append(
            f"{STEP}: ours calls LossScaler.step(optimizer, max_norm=1.0); told the norm: also with grad_stats="
            "state.grad_stats; torch calls GradScaler.unscale_, clip_grad_norm_ and its fused AdamW"
        )
    title = f"DDP, {ranks} ranks, {job.layers} x Linear({job.width}, {job.width}), batches of {job.batch}, fp32"
    table = Table(title, [], notes, "#wrong")
    keep(table)
    lines: list[float | None] = []

    def take(of_a_workload: list[Result]) -> None:
        lines.append(of_a_workload[0].line)
        rows = [make_row(result) for result in of_a_workload]
        pair(rows, of_a_workload)
        table.rows += rows

    try:
        on_ranks(work, ranks, job, take=take, progress=progress, deadline=DEADLINE)
    finally:  # also if the run was interrupted
        if options.device == "cpu" and BACKWARD in job.sides:
            table.rows.append(Row.missing(BF16, "DDP accepts it only with NCCL", BACKWARD))
        table.notes += link_probe.note(lines)


def fractions(text: str) -> list[float]:
    found = [float(part) for part in text.split(",")]
    if not all(0 < number < 1 for number in found):
        raise ValueError(text)
    return found


def make_sides(peers: list[str], names: list[str], algorithms: list[str]) -> dict[str, list[Side]]:
    """Combine each codec with the algorithms that accept it: a lossy codec not with those that encode repeatedly."""
    accepted = {name: ["auto", *comm.algorithms_for("int8" if name == "auto" else name)] for name in names}
    accepted |= {"raw": [*comm.algorithms_for("raw"), "native", "auto"]}
    pairs = [(name, a) for name in names for a in algorithms if a in accepted[name]]
    if not pairs:
        raise Failure(f"these algorithms only take the codec raw: {', '.join(algorithms)}")
    name, algorithm = pairs[-1] if len(pairs) < 3 else pairs[len(pairs) // 2]
    finishes = [Side(name, algorithm, "reads it"), Side(name, algorithm, "told the norm")]
    return {
        BACKWARD: [*map(Side, peers), *(Side(*pair) for pair in pairs)],
        STEP: [Side(PLAIN, finish="torch"), *finishes],
    }


def pair(rows: list[Row], results: list[Result]) -> None:
    """Compare ours with plain DDP, torch's hooks with our codec that sends the same, PowerSGD with the smallest one."""
    ours = {result.side.way: (row, result) for row, result in zip(rows, results, strict=True) if row.ours and row.time}
    least = min(ours.values(), key=lambda pair: pair[1].wire_bytes or 0, default=None)
    for row, result in zip(rows, results, strict=True):
        if row.ours:
            row.compare_with(rows[0])
        elif result.side.way == POWER_SGD and least:
            row.compare_with(least[0])
        elif found := ours.get(EQUALS.get(result.side.way, "")):
            row.compare_with(found[0])


def make_row(result: Result) -> Row:
    side = result.side
    name = side.name + (f": {result.chosen}" if result.chosen else "")
    row = Row(result.workload, name, side.ours, result.wrong == 0, str(result.wrong), result.samples)
    row.figures = {"wire bytes": result.wire_bytes, "error": result.error}
    if row.time:
        row.figures |= link_probe.share(result.wire_bytes, row.time.median, result.line)
    if result.hidden is not None:
        row.figures["hidden %"] = 100 * result.hidden
    if result.metrics is not None and row.time:
        without, complete = (100 * seconds / row.time.median for seconds in result.metrics)
        row.figures |= {"metrics %": without, "with errors %": complete}
    return row
