"""The parameter server: steps, exchanges, updates and stragglers, against an all-reduce, torch RPC and AdamW alone."""

import argparse

from benchmarks.cases.allreduce import label, size
from benchmarks.cases.optim import resnet50
from benchmarks.harness import Keep, Progress, Row, Table, at_least, choices
from benchmarks.machine import link_probe
from benchmarks.machine.ranks import count_ranks, given_rank, on_ranks
from benchmarks.store_ranks import (
    DEADLINE,
    KINDS,
    LONGER,
    STRAGGLERS,
    TORCHFT,
    Job,
    Result,
    Workload,
    why_not_torchft,
    work,
)
from dltrain_ext import codecs

OVERVIEW = ["-b", "1M", "--steps", "40", "-n", "3"]
RANKS = {"step": [4, 2], "exchange": [2, 3], "update": [1], "stragglers": [4]}
SIZES = {"step": ["1M", "16M"], "exchange": ["1M"], "update": ["16M"]}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "If torchrun's variables (RANK, WORLD_SIZE, ...) are set, it runs as that rank; rank 0 reports. Links: `hosts "
        "--hosts 3 --rate 1gbit -- python -m benchmarks store --workloads exchange -b 16M`."
    )
    parser.add_argument(
        "--workloads",
        type=choices(list(KINDS)),
        default=list(KINDS),
        help="step (all ranks serve), exchange (one rank serves, the others push and pull), update (the server's own "
        "work), stragglers (some steps take longer) (default: all)",
    )
    parser.add_argument("-b", "--bytes", type=size, help="bytes of the values (default: 1M and 16M, 1M for exchange)")
    parser.add_argument(
        "--codecs",
        type=choices(codecs.CODECS),
        default="raw,int8",
        help=f"names out of {', '.join(codecs.CODECS)} (default: %(default)s)",
    )
    parser.add_argument("-n", "--iters", type=at_least(1), help="timed calls (default: 20, --quick: 3)")
    parser.add_argument("-w", "--warmup", type=at_least(0), default=2, help="calls before these (default: %(default)s)")
    parser.add_argument("--steps", type=at_least(4), help="steps of a call, with stragglers (default: 100, --quick: 8)")
    parser.add_argument("--milliseconds", type=at_least(1), help="time of such a step (default: 20, --quick: 1)")


def run(options: argparse.Namespace, progress: Progress, keep: Keep) -> None:
    table = Table(
        "parameter server, fp32",
        notes=[
            "a sample is one call after a barrier, on the slowest rank; the sides are timed alternately, torch RPC "
            "and the others of an exchange in turns, because RPC keeps a core of each rank busy",
            "#wrong: elements that differ from what torch's AdamW or whole numbers give by more than the codec loses, "
            "that differ in a bit between ranks or, for ps.Optimizer, raw, from the all-reduce",
            "step: all ranks serve and work; the all-reduce has the algorithm direct. exchange: rank 0 serves, the "
            "others push and pull. update: a push is in the server's mailbox, in one process. stragglers: a sample is "
            f"the mean time of a step, {100 * STRAGGLERS:g} % of which take {LONGER} times as long",
        ],
        check_heading="#wrong",
    )
    keep(table)
    lines: list[float | None] = []

    def take(of_a_workload: list[Result]) -> None:
        lines.append(of_a_workload[0].line if of_a_workload[0].wire_bytes or of_a_workload[-1].wire_bytes else None)
        rows = {result.side: make_row(result, ranks) for result in of_a_workload}
        for result in of_a_workload:
            if result.against in rows:
                rows[result.side].compare_with(rows[result.against])
        table.rows += rows.values()

    by_ranks = plan(options)
    for index, (ranks, workloads) in enumerate(by_ranks.items()):
        job = Job(
            workloads,
            options.codecs,
            rounds=options.iters or (3 if options.quick else 20),
            warmup=options.warmup,
            steps=options.steps or (8 if options.quick else 100),
            seconds=1e-3 * (options.milliseconds or (1 if options.quick else 20)),
        )
        on_ranks(work, ranks, job, take=take, progress=part_of(progress, index, len(by_ranks)), deadline=DEADLINE)
    if "exchange" in options.workloads and (why := why_not_torchft()):
        table.rows.append(Row.missing(TORCHFT, why, "exchange"))
    table.notes += link_probe.note(lines)


def plan(options: argparse.Namespace) -> dict[int, list[Workload]]:
    """Return the workloads by the number of their ranks."""
    found: dict[int, list[Workload]] = {}
    for kind in options.workloads:
        given = options.ranks or given_rank()
        counts = [count_ranks(options.ranks, 0)] if given else RANKS[kind]
        for ranks in counts[: 1 if options.quick else None]:
            found.setdefault(ranks, []).extend(workloads_of(kind, options))
    return found


def workloads_of(kind: str, options: argparse.Namespace) -> list[Workload]:
    if kind not in SIZES:
        return [Workload(kind)]
    sizes = [options.bytes] if options.bytes else [size(text) for text in SIZES[kind]][: 1 if options.quick else None]
    found = [Workload(kind, [(nbytes // 4,)]) for nbytes in sizes]
    if kind == "step" and not options.quick:
        found.append(Workload(kind, first_of_resnet50(max(sizes) // 4)))
    return found


def first_of_resnet50(numel: int) -> list[tuple[int, ...]]:
    """Return the shapes of its first parameters, up to a number of elements."""
    shapes: list[tuple[int, ...]] = []
    for shape in resnet50(quick=False):
        if Workload("step", [*shapes, shape]).numel > numel:
            break
        shapes.append(shape)
    return shapes


def part_of(progress: Progress, index: int, parts: int) -> Progress:
    return lambda text, done: progress(text, (index + done) / parts)


def make_row(result: Result, ranks: int) -> Row:
    kind, shapes, numel = result.workload.kind, result.workload.shapes, result.workload.numel
    tensors = f" in {len(shapes)} tensors" if len(shapes) > 1 else ""
    name = f"{kind}, {ranks} ranks, {label(4 * numel)}{tensors}"
    row = Row(name, result.side, result.ours, result.wrong == 0, str(result.wrong), result.samples)
    if row.time and result.wire_bytes:
        row.figures = link_probe.share(result.wire_bytes, row.time.median, result.line)
    return row
