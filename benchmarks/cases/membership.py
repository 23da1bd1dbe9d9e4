"""Jobs whose members come and go: the time after a kill and until another one joins, of DiLoCo and of a store."""

import argparse
import math
import statistics

from benchmarks.harness import Failure, Keep, Progress, Row, Table, at_least, choices
from benchmarks.local_sgd_sides import LAYERS
from benchmarks.machine.ranks import count_ranks, given_rank, on_ranks
from benchmarks.membership_processes import BATCH, CHECKPOINT_EVERY, SYNC_EVERY
from benchmarks.membership_ranks import PARTS, Change, Job, measure

OVERVIEW = ["--elements", "40000", "--kills", "1"]
DEADLINE = 900.0
NOTES = [
    "killed: by SIGKILL at a random moment; a sample is the time until the last survivor has completed the first "
    "outer step or version that the killed one has no part in; of a server: until all workers have completed a step "
    "in the next epoch, where the new server was started before, and calls serve() at the moment of the kill",
    "joins: another process, which has imported all it needs; a sample is the time from the call of its first "
    "inner.step() until it is a member, or from the call of ps.Optimizer() until its first step is complete",
    "gap s: the longest time between two (outer) steps of any other member meanwhile; usual s: before the change; "
    "lost: the most that was lost at one time, of inner steps of a site, or of versions of a shard of the store",
    f"batches of {BATCH}; DiLoCo: an outer step every {SYNC_EVERY} steps; store: AdamW, synchronous, raw, with a "
    f"checkpoint every {CHECKPOINT_EVERY:g} s",
    "#wrong: members that differ at one version, or a newcomer that begins with a version that no other has had",
]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "If torchrun's variables (RANK, WORLD_SIZE, ...) are set, it runs as that rank, with one member."
    parser.add_argument(
        "--only", type=choices(PARTS), default=PARTS, help=f"names out of {', '.join(PARTS)} (default: all)"
    )
    parser.add_argument(
        "--elements",
        type=at_least(1000),
        help=f"parameters of the model, in {LAYERS} equal layers (default: 10 million, --quick: 40,000)",
    )
    parser.add_argument("--kills", type=at_least(1), help="times that each is killed (default: 8, --quick: 1)")


def run(options: argparse.Namespace, progress: Progress, keep: Keep) -> None:
    members = count_ranks(options.ranks, 4)
    if members < 2:
        raise Failure(f"ranks: expected at least 2, since one is killed, got {members}")
    width = math.isqrt((options.elements or (40_000 if options.quick else 10_000_000)) // LAYERS)
    times = options.kills or (1 if options.quick else 8)
    jobs = [Job(part, members, width, times) for part in options.only]
    title = f"Jobs whose members come and go: {members} that train, {LAYERS * width**2:,} parameters"
    table = Table(title, [], NOTES, "#wrong")
    keep(table)

    def take(change: Change) -> None:
        table.rows.append(make_row(change))

    if given_rank():
        on_ranks(measure, members, jobs, take=take, progress=progress, deadline=DEADLINE)
    else:
        for change in measure(0, 1, progress, jobs):
            take(change)


def make_row(change: Change) -> Row:
    check = str(len(change.wrong)) + (f": {change.wrong[0]}" if change.wrong else "")
    row = Row(change.what, change.side, True, not change.wrong, check, change.seconds)
    if change.seconds:
        row.figures = {
            "worst s": max(change.seconds),
            "gap s": statistics.median(change.gaps),
            "worst gap s": max(change.gaps),
            "usual s": statistics.median(change.usual),
            "lost": max(change.lost),
        }
    return row
