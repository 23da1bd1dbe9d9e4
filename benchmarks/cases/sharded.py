"""Sharded training: FSDP2's gathers and steps, and a DDP step with a sharded AdamW (ZeRO), against torch's own."""

import argparse

from benchmarks.cases.ddp import add_sizes
from benchmarks.harness import Keep, Progress, Row, Table, at_least, choices
from benchmarks.machine import link_probe
from benchmarks.machine.ranks import count_ranks, on_ranks
from benchmarks.sharded_ranks import (
    BF16,
    CHECKED,
    DEADLINE,
    FSDP,
    GATHER,
    SIDES,
    ZERO,
    ZERO_REDUNDANCY,
    Job,
    Result,
    work,
)

OVERVIEW = ["--layers", "2", "--width", "512", "-n", "5"]
EQUALS = {(GATHER, BF16): "int8", (FSDP, BF16): "int8, gather int8", (ZERO, ZERO_REDUNDANCY): "shard, raw"}
NOTES = {
    GATHER: "gather: unshard() of all modules, one after another, and reshard(); ours with fsdp.register's gather",
    FSDP: "fsdp: forward, backward and AdamW, which gathers twice; int8: of gradients, with torch's all-gather; torch "
    "bf16 also computes in bf16",
    ZERO: "zero: forward, backward and AdamW with DDP; the last layer has two thirds of the parameters, of which "
    "ZeroRedundancyOptimizer gives each rank whole ones",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "If torchrun's variables (RANK, WORLD_SIZE, ...) are set, it runs as that rank; rank 0 reports."
    parser.add_argument(
        "--workloads",
        type=choices(list(SIDES)),
        default=list(SIDES),
        help=f"names out of {', '.join(SIDES)} (default: all)",
    )
    parser.add_argument(
        "--layers",
        type=at_least(1),
        help="number of Linear(width, width); zero: and a Linear of twice their size (default: 6, --quick: 2)",
    )
    add_sizes(parser)
    parser.add_argument("-w", "--warmup", type=at_least(1), help="calls before the timed ones (default: 3, --quick: 1)")


def run(options: argparse.Namespace, progress: Progress, keep: Keep) -> None:
    ranks = count_ranks(options.ranks, 2)
    job = Job(
        {workload: SIDES[workload] for workload in options.workloads},
        layers=options.layers or (2 if options.quick else 6),
        width=options.width or (256 if options.quick else 1024),
        batch=options.batch,
        rounds=options.iters or (5 if options.quick else 20),
        warmup=options.warmup or (1 if options.quick else 3),
    )
    notes = [
        "a sample is one call after a barrier, on the slowest rank; the sides, each with its own model, are timed "
        "alternately",
        *(NOTES[workload] for workload in options.workloads),
        "AdamW: ours, or torch's fused one",
        "#wrong: elements beyond the error of one encoding (gather) or of p + 1 encodings (gradients), elements of "
        "parameters that are not what torch's AdamW makes of these gradients, and those with other bits than on rank "
        f"0; over all ranks and {CHECKED} steps, before the timing",
        "error: rms error over the rms of the exact parameters (gather) or of the average gradient in the first step",
        "wire bytes: of one call, the mean over the ranks; ours counts them, torch's are by formula: (p-1)/p of the "
        "parameters for an all-gather, or for the broadcasts, and twice that for an all-reduce, which Gloo also makes "
        "for a reduce-scatter",
        "state MB: the optimizer's state on the rank that keeps most; min MB: on the one that keeps least",
    ]
    title = f"Sharded, {ranks} ranks, {job.layers} x Linear({job.width}, {job.width}), batches of {job.batch}, fp32"
    table = Table(title, [], notes, "#wrong")
    keep(table)
    lines: list[float | None] = []

    def take(of_a_workload: list[Result]) -> None:
        lines.append(of_a_workload[0].line)
        rows = [make_row(result) for result in of_a_workload]
        pair(rows)
        table.rows += rows

    try:
        on_ranks(work, ranks, job, take=take, progress=progress, deadline=DEADLINE)
    finally:  # also if the run was interrupted
        table.notes += link_probe.note(lines)


def make_row(result: Result) -> Row:
    row = Row(result.workload, result.side.name, result.side.ours, result.wrong == 0, str(result.wrong), result.samples)
    row.figures = {"wire bytes": result.wire_bytes, "error": result.error}
    if result.state:
        row.figures |= {"state MB": 1e-6 * result.state[0], "min MB": 1e-6 * result.state[1]}
    if row.time:
        row.figures |= link_probe.share(result.wire_bytes, row.time.median, result.line)
    return row


def pair(rows: list[Row]) -> None:
    """Compare ours with the first peer, and the other peer with the one of ours that replaces it."""
    ours = {row.side: row for row in rows if row.ours}
    for row in rows:
        if row.ours:
            row.compare_with(rows[0])
        elif found := ours.get(EQUALS.get((row.workload, row.side), "")):
            row.compare_with(found)
