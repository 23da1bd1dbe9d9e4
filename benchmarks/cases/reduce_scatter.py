"""comm.reduce_scatter, in any codec, against Gloo's or NCCL's own: over loopback, or torchrun's ranks."""

import argparse
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.allreduce_ranks import DEADLINE, PEERS, nccl_group
from benchmarks.cases.allreduce import RANKS, size
from benchmarks.harness import Failure, Keep, Progress, Row, Table, at_least, choices, interleave
from benchmarks.machine import line
from benchmarks.machine.ranks import count_ranks, on_ranks, over_ranks
from dltrain_ext import codecs, comm
from dltrain_ext.selftest.sums import Data, count_wrong, normal, relative_error, tolerance, whole_numbers

OVERVIEW = ["-b", "1M", "-f", "16", "-n", "10", "--codecs", "raw,int8"]
torchs_own = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name before torch 2.13


class Job(NamedTuple):
    sizes: list[int]
    sides: list[str]  # codecs, and the peer
    rounds: int
    warmup: int
    device: str


class Result(NamedTuple):
    """One side at one size; counts are over all ranks. `line`: bytes per second that the line carried meanwhile."""

    nbytes: int
    side: str
    wrong: int
    error: float
    wire_bytes: int | None
    samples: list[float]
    line: float | None = None


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Under torchrun's variables (RANK, WORLD_SIZE, ...) it runs as that rank; rank 0 reports."
    parser.add_argument("-b", "--begin", type=size, default="1M", help="smallest input (default %(default)s)")
    parser.add_argument("-e", "--end", type=size, default="16M", help="largest input (default %(default)s)")
    parser.add_argument("-f", "--factor", type=at_least(2), default=16, help="from one size to the next (%(default)s)")
    parser.add_argument("-n", "--iters", type=at_least(1), help="timed calls per size (default 20, --quick: 5)")
    parser.add_argument("-w", "--warmup", type=at_least(0), default=2, help="calls before them (default %(default)s)")
    parser.add_argument(
        "--codecs",
        type=choices(codecs.CODECS),
        help=f"out of {', '.join(codecs.CODECS)}; default raw, bf16, int8 and int4 (--quick: raw and int8)",
    )


def run(options: argparse.Namespace, progress: Progress, keep: Keep) -> None:
    if options.begin > options.end:
        raise Failure(f"-b {options.begin} is above -e {options.end}")
    sizes = [options.begin]
    while not options.quick and (following := sizes[-1] * options.factor) <= options.end:
        sizes.append(following)
    ranks = count_ranks(options.ranks, RANKS)
    names = options.codecs or (["raw", "int8"] if options.quick else ["raw", "bf16", "int8", "int4"])
    peer = PEERS[options.device]
    job = Job(sizes, [peer, *names], options.iters or (5 if options.quick else 20), options.warmup, options.device)
    notes = [
        "a barrier, then one call; the slowest rank counts; the sides take turns",
        "#wrong: elements of a share beyond what encoding each contribution once may lose; raw has to be exact",
        "error: its rms over that of the exact sum; wire bytes: sent by one rank in a call",
    ]
    title = f"reduce_scatter sum, {ranks} ranks, fp32"
    table = Table(title, [], notes, check_heading="#wrong", x_label="input, bytes")
    keep(table)
    lines: list[float | None] = []

    def take(of_a_size: list[Result]) -> None:
        lines.append(of_a_size[0].line)
        first, *ours = (make_row(result, peer) for result in of_a_size)
        for row in ours:
            row.hold_against(first)
        table.rows += [first, *ours]

    try:
        on_ranks(work, ranks, job, take=take, progress=progress, deadline=DEADLINE)
    finally:  # also where that was interrupted
        if options.device == "cpu":
            table.rows.append(Row.missing(PEERS["cuda"], "needs --device cuda"))
        table.notes += line.note(lines)


def make_row(result: Result, peer: str) -> Row:
    name = f"{result.nbytes / 2**20:g} MiB"
    ours = result.side != peer
    row = Row(name, result.side, ours, result.wrong == 0, str(result.wrong), result.samples, x=result.nbytes)
    row.figures = {"wire bytes": result.wire_bytes, "error": result.error}
    if row.time:
        row.figures |= line.share(result.wire_bytes, row.time.median, result.line)
    return row


def work(rank: int, ranks: int, progress: Progress, job: Job) -> Iterator[list[Result]]:
    """The results of one size after the other, the same on all ranks."""
    peer = nccl_group() if job.device == "cuda" else None
    communicator = comm.Communicator(timeout=timedelta(seconds=DEADLINE / 2), ranks_per_host=1)
    for index, nbytes in enumerate(job.sizes):

        def advance(done: float, index: int = index, nbytes: int = nbytes) -> None:
            progress(f"{nbytes} bytes on {ranks} ranks", (index + done) / len(job.sizes))

        yield measure(rank, ranks, nbytes // 4 // ranks, peer, communicator, job, advance)
    communicator.close()


def measure(
    rank: int,
    ranks: int,
    n: int,
    peer: dist.ProcessGroup | None,
    communicator: comm.Communicator,
    job: Job,
    advance: Callable[[float], None],
) -> list[Result]:
    """With shares of n elements."""
    share = torch.empty(n, device=job.device)
    exact = Data.of(whole_numbers(n * ranks), rank, ranks, job.device)
    rounded = Data.of(normal(n * ranks), rank, ranks, job.device)
    data = {side: rounded if side in codecs.CODECS and side != "raw" else exact for side in job.sides}
    wrong = dict.fromkeys(job.sides, 0)

    def call(side: str) -> None:
        if side in codecs.CODECS:
            communicator.reduce_scatter(share, data[side].own, codec=side)
        else:
            torchs_own(share, data[side].own, group=peer)

    def total(side: str) -> torch.Tensor:
        return data[side].total[rank * n : (rank + 1) * n]

    def before(side: str) -> None:
        share.fill_(torch.nan)
        dist.barrier()

    def after(side: str) -> None:
        if side == line.SIDE:
            return
        bound = tolerance(side, ranks, data[side].magnitudes) if side in codecs.CODECS else 0.0
        wrong[side] += count_wrong(share, total(side), bound)

    sent, errors = [], []
    for side in job.sides:
        before(side)
        already = communicator.stats()["wire_bytes"]
        call(side)
        after(side)
        sent.append(communicator.stats()["wire_bytes"] - already)
        errors.append(relative_error(share, total(side)))
    right = [side for side, count in zip(job.sides, over_ranks(list(wrong.values()), "sum"), strict=True) if not count]
    timed = interleave(
        {side: lambda side=side: call(side) for side in right} | line.sides(rank, ranks, job.device),
        rounds=(job.rounds, job.rounds),
        warmup=job.warmup,
        before=before,
        after=after,
        device=job.device,
        progress=advance,
    )
    slowest = {side: over_ranks(samples, "max") for side, samples in timed.items()}
    carried = line.rate(slowest.get(line.SIDE, []))
    over_all = over_ranks(list(wrong.values()), "sum"), over_ranks(sent, "max"), over_ranks(errors, "max")
    return [
        Result(4 * n * ranks, side, int(count), error, int(bytes_) or None, [] if count else slowest[side], carried)
        for side, count, bytes_, error in zip(job.sides, *over_all, strict=True)
    ]
