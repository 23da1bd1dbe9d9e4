"""A step of DistributedDataParallel with our hook, in any codec, against plain DDP and torch's own hooks."""

import argparse

from benchmarks.ddp_ranks import BACKWARD, DEADLINE, PEERS, PLAIN, STEP, Job, Result, Side, work
from benchmarks.harness import Failure, Progress, Row, Spread, Table, at_least, choices
from benchmarks.ranks import given_rank, join_ranks, run_ranks
from dltrain_ext import codecs, comm


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Under torchrun's variables (RANK, WORLD_SIZE, ...) it runs as that rank; rank 0 reports."
    parser.add_argument("--ranks", type=at_least(1), help="processes (default 2; under torchrun WORLD_SIZE)")
    parser.add_argument(
        "--codecs",
        type=choices([*codecs.CODECS, "auto"]),
        help=f"out of {', '.join(codecs.CODECS)}, auto; default raw, bf16, int8, int4 and sign (--quick: raw and int8)",
    )
    parser.add_argument(
        "--algorithms",
        type=choices([*comm.ALGORITHMS, "auto"]),
        default="auto",
        help=f"out of {', '.join(comm.ALGORITHMS)}, auto (default %(default)s)",
    )
    parser.add_argument("--layers", type=at_least(1), help="of Linear(width, width) (default 12, --quick: 2)")
    parser.add_argument("--width", type=at_least(1), help="of a layer (default 1024, --quick: 256)")
    parser.add_argument("--batch", type=at_least(1), default=16, help="of each rank (default %(default)s)")
    parser.add_argument("-n", "--iters", type=at_least(1), help="timed steps (default 20, --quick: 5)")
    parser.add_argument("-w", "--warmup", type=at_least(2), help="steps before them (default 3, --quick: 2)")


def run(options: argparse.Namespace, progress: Progress) -> Table:
    given = given_rank()
    if given and options.ranks not in (None, given.ranks):
        raise Failure(f"--ranks {options.ranks} contradicts WORLD_SIZE={given.ranks}")
    ranks = given.ranks if given else options.ranks or 2
    names = options.codecs or (["raw", "int8"] if options.quick else ["raw", "bf16", "int8", "int4", "sign"])
    job = Job(
        make_sides(PEERS[options.device], names, options.algorithms),
        layers=options.layers or (2 if options.quick else 12),
        width=options.width or (256 if options.quick else 1024),
        batch=options.batch,
        rounds=options.iters or (5 if options.quick else 20),
        warmup=options.warmup or (2 if options.quick else 3),
        device=options.device,
    )
    if given:
        results = join_ranks(work, given, job, progress=progress, deadline=DEADLINE)
    else:
        results = run_ranks(work, ranks, job, progress=progress, deadline=DEADLINE)
    first = {workload: next(r.samples for r in results if r.workload == workload) for workload in job.sides}
    title = f"DDP, {ranks} ranks, {job.layers} x Linear({job.width}, {job.width}), batches of {job.batch}, fp32"
    notes = [
        "a barrier, then one step; the slowest rank counts; the sides take turns, each with a model of its own",
        "#wrong: elements beyond what encoding (p + 1) times may lose of the exact average, or all where ranks differ "
        "in a bit; in the first step, before the timing",
        "error: its rms over that of the exact average, in the first step; later ones feed back what was lost",
        "hidden %: the share of the time of communication that backward goes on beside it; state.stats() defines it",
        "wire bytes: sent by one rank in a step",
        f"{STEP}: ours by LossScaler.step(optimizer, max_norm=1.0), told the norm: with grad_stats=state.grad_stats; "
        "torch's by GradScaler.unscale_, clip_grad_norm_ and its fused AdamW",
    ]
    return Table(title, [make_row(result, first[result.workload]) for result in results], notes, "#wrong")


def make_sides(peers: list[str], names: list[str], algorithms: list[str]) -> dict[str, list[Side]]:
    """A lossy codec goes with every algorithm but those that encode more than once."""
    pairs = [(name, a) for name in names for a in algorithms if a in ("auto", *comm.algorithms_for(name))]
    if not pairs:
        raise Failure(f"no codec but raw: {', '.join(algorithms)}")
    name, algorithm = pairs[-1] if len(pairs) < 3 else pairs[len(pairs) // 2]
    finishes = [Side(name, algorithm, "reads it"), Side(name, algorithm, "told the norm")]
    return {
        BACKWARD: [*map(Side, peers), *(Side(*pair) for pair in pairs)],
        STEP: [Side(PLAIN, finish="torch"), *finishes],
    }


def make_row(result: Result, plain: list[float]) -> Row:
    side = result.side
    name = side.name + (f": {result.chosen}" if result.chosen else "")
    row = Row(result.workload, name, side.ours, result.wrong == 0, str(result.wrong), result.samples)
    if row.time and plain and side.way != PLAIN:
        row.ratio = Spread.of(plain).median / row.time.median
    row.figures = {"wire bytes": result.wire_bytes, "error": result.error}
    if result.hidden is not None:
        row.figures["hidden %"] = 100 * result.hidden
    return row
