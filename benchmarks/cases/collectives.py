"""A case for each collective except all_reduce: ours, with any algorithm and codec, against Gloo's or NCCL's."""

import argparse
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.allreduce_ranks import DEADLINE, PEERS, Result, Side, nccl_group
from benchmarks.cases.allreduce import RANKS, label, size
from benchmarks.harness import Failure, Keep, Progress, Row, Table, at_least, choices, interleave
from benchmarks.machine import link_probe
from benchmarks.machine.ranks import count_ranks, on_ranks, over_ranks
from dltrain_ext import codecs, comm
from dltrain_ext.selftest.sums import (
    Data,
    count_wrong,
    first_if_unlike,
    normal,
    relative_error,
    tolerance,
    whole_numbers,
)

ROOT = 0
torchs_reduce_scatter, torchs_all_gather = (  # torch before 2.13 has other names for them
    getattr(dist, name, None) or getattr(dist, before)
    for name, before in (
        ("reduce_scatter_single", "reduce_scatter_tensor"),
        ("all_gather_single", "all_gather_into_tensor"),
    )
)
Part = Callable[[int], Callable[[int], Tensor]]
"""Maps n to a function that returns the n elements of a given rank."""


# Each returns what a rank passes in, and the elements with which its result has to begin; a shard has n elements.


def shard_of_sum(part: Part, n: int, rank: int, ranks: int) -> Data:
    data = Data.of(part(n * ranks), rank, ranks)
    return data._replace(total=data.total[rank * n : (rank + 1) * n])


def all_shards(part: Part, n: int, rank: int, ranks: int) -> Data:
    shards = [part(n)(each) for each in range(ranks)]
    whole = torch.cat(shards)
    return Data(shards[rank], whole, whole.abs().max().item())


def roots_own(part: Part, n: int, rank: int, ranks: int) -> Data:
    root = part(n * ranks)(ROOT)
    return Data(part(n * ranks)(rank), root, root.abs().max().item())


def sum_at_root(part: Part, n: int, rank: int, ranks: int) -> Data:
    data = Data.of(part(n * ranks), rank, ranks)
    return data if rank == ROOT else data._replace(total=data.total[:0])


class Collective(NamedTuple):
    """`ours` and `torchs` take the result and the input of the rank; if `in_place`, the result already holds the input.

    If it `adds`, each contribution and the sum may be encoded. Otherwise data is encoded once, and all ranks end with
    the same bits.
    """

    data: Callable[[Part, int, int, int], Data]
    ours: Callable[..., object]
    torchs: Callable[..., object]
    adds: bool
    in_place: bool


COLLECTIVES = {
    "reduce_scatter": Collective(
        shard_of_sum, comm.Communicator.reduce_scatter, torchs_reduce_scatter, adds=True, in_place=False
    ),
    "all_gather": Collective(all_shards, comm.Communicator.all_gather, torchs_all_gather, adds=False, in_place=False),
    "broadcast": Collective(
        roots_own,
        lambda communicator, result, given, **options: communicator.broadcast(result, ROOT, **options),
        lambda result, given, group: dist.broadcast(result, ROOT, group=group),
        adds=False,
        in_place=True,
    ),
    "reduce": Collective(
        sum_at_root,
        lambda communicator, result, given, **options: communicator.reduce(result, ROOT, **options),
        lambda result, given, group: dist.reduce(result, ROOT, group=group),
        adds=True,
        in_place=True,
    ),
}


class Job(NamedTuple):
    collective: str
    sizes: list[int]
    sides: list[Side]
    rounds: int
    warmup: int
    device: str


class Case:
    """The case of one collective; benchmarks.cases says what a case has to have."""

    OVERVIEW = ["-b", "1M", "-f", "16", "-n", "5", "-w", "1", "--codecs", "raw,int8"]

    def __init__(self, name: str):
        self.name = name
        self.algorithms = ["auto", *comm.COLLECTIVES[name]]
        self.__doc__ = f"comm.{name} with any plan and codec, against Gloo's or NCCL's; over loopback or by torchrun."

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = "If torchrun's variables (RANK, WORLD_SIZE, ...) are set, it runs as that rank; rank 0 reports."
        parser.add_argument(
            "-b", "--begin", type=size, default="1M", help="smallest message, of all shards (default: %(default)s)"
        )
        parser.add_argument("-e", "--end", type=size, default="16M", help="largest message (default: %(default)s)")
        parser.add_argument(
            "-f", "--factor", type=at_least(2), default=16, help="ratio of two sizes (default: %(default)s)"
        )
        parser.add_argument("-n", "--iters", type=at_least(1), help="timed calls per size (default: 20, --quick: 5)")
        parser.add_argument(
            "-w", "--warmup", type=at_least(0), default=2, help="calls before the timed ones (default: %(default)s)"
        )
        parser.add_argument(
            "--algorithms",
            type=choices(self.algorithms),
            default="auto",
            help=f"names out of {', '.join(self.algorithms)} (default: %(default)s)",
        )
        parser.add_argument(
            "--codecs",
            type=choices(codecs.CODECS),
            help=f"names out of {', '.join(codecs.CODECS)} (default: raw,bf16,int8,int4; --quick: raw,int8)",
        )

    def run(self, options: argparse.Namespace, progress: Progress, keep: Keep) -> None:
        if options.begin > options.end:
            raise Failure(f"-b {options.begin} is above -e {options.end}")
        sizes = [options.begin]
        while not options.quick and (following := sizes[-1] * options.factor) <= options.end:
            sizes.append(following)
        ranks = count_ranks(options.ranks, RANKS)
        names = options.codecs or (["raw", "int8"] if options.quick else ["raw", "bf16", "int8", "int4"])
        sides = [Side(PEERS[options.device])]
        sides += [Side(algorithm, codec) for codec in names for algorithm in options.algorithms]
        job = Job(
            self.name, sizes, sides, options.iters or (5 if options.quick else 20), options.warmup, options.device
        )
        table = Table(
            f"{self.name}{' sum' if COLLECTIVES[self.name].adds else ''}, {ranks} ranks, fp32",
            notes=[
                "a sample is one call after a barrier, on the slowest rank; the sides are timed alternately",
                "#wrong: number of elements whose error exceeds that of the encodings, or that differ in a bit between "
                "ranks that receive the same; raw has to be exact",
                "error: rms error over the rms of the exact result; wire bytes: bytes that one rank sends in one call, "
                "the largest over the ranks",
            ],
            check_heading="#wrong",
            x_label="message, bytes",
        )
        keep(table)
        lines: list[float | None] = []

        def take(of_a_size: list[Result]) -> None:
            lines.append(of_a_size[0].line)
            first, *others = (make_row(result) for result in of_a_size)
            for row in others:
                row.compare_with(first)
            table.rows += [first, *others]

        try:
            on_ranks(work, ranks, job, take=take, progress=progress, deadline=DEADLINE)
        finally:  # also if the run was interrupted
            if options.device == "cpu":
                table.rows.append(Row.missing(PEERS["cuda"], "needs --device cuda"))
            table.notes += link_probe.note(lines)


CASES = {name: Case(name) for name in COLLECTIVES}


def make_row(result: Result) -> Row:
    side, right = result.side, result.wrong == 0
    row = Row(label(result.nbytes), side.name, side.ours, right, str(result.wrong), result.samples, x=result.nbytes)
    row.figures = {"wire bytes": result.wire_bytes, "error": result.error}
    if row.time:
        row.figures |= link_probe.share(result.wire_bytes, row.time.median, result.line)
    return row


def work(rank: int, ranks: int, progress: Progress, job: Job) -> Iterator[list[Result]]:
    """Yield the results of one size after the other, the same on all ranks."""
    peer = nccl_group() if job.device == "cuda" else None
    communicator = comm.Communicator(timeout=timedelta(seconds=DEADLINE / 2), ranks_per_host=1)
    for index, nbytes in enumerate(job.sizes):

        def advance(done: float, index: int = index, nbytes: int = nbytes) -> None:
            progress(f"{nbytes} bytes on {ranks} ranks", (index + done) / len(job.sizes))

        yield measure(rank, ranks, max(1, nbytes // 4 // ranks), peer, communicator, job, advance)
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
    """Check and time all sides, with shards of n elements."""
    collective = COLLECTIVES[job.collective]
    exact, rounded = (
        Data(data.own.to(job.device), data.total.to(job.device), data.magnitudes)
        for data in (collective.data(part, n, rank, ranks) for part in (whole_numbers, normal))
    )
    result = torch.empty_like(exact.own if collective.in_place else exact.total)
    sides = {side.name: side for side in job.sides}
    data = {name: exact if side.codec == "raw" else rounded for name, side in sides.items()}
    added = ranks if collective.adds else 0
    bounds = {name: tolerance(side.codec, added, data[name].magnitudes) for name, side in sides.items()}
    wrong = dict.fromkeys(sides, 0)

    def call(name: str) -> None:
        side = sides[name]
        if side.ours:
            collective.ours(communicator, result, data[name].own, algorithm=side.algorithm, codec=side.codec)
        else:
            collective.torchs(result, data[name].own, group=peer)

    def before(name: str) -> None:
        if collective.in_place and name in sides:
            result.copy_(data[name].own)
        else:
            result.fill_(torch.nan)
        dist.barrier()

    def found(name: str) -> Tensor:
        return result[: data[name].total.numel()]

    def after(name: str) -> None:
        if name in sides:
            first = None if collective.adds else first_if_unlike(result)
            wrong[name] += count_wrong(found(name), data[name].total, bounds[name], first)

    sent, errors = [], []
    for name in sides:
        before(name)
        already = communicator.stats()["wire_bytes"]
        call(name)
        after(name)
        sent.append(communicator.stats()["wire_bytes"] - already)
        errors.append(relative_error(found(name), data[name].total) if found(name).numel() else 0.0)
    right = [name for name, count in zip(sides, over_ranks(list(wrong.values()), "sum"), strict=True) if not count]
    timed = interleave(
        {name: partial(call, name) for name in right} | link_probe.sides(rank, ranks, job.device),
        rounds=(job.rounds, job.rounds),
        warmup=job.warmup,
        before=before,
        after=after,
        device=job.device,
        progress=advance,
    )
    slowest = {name: over_ranks(samples, "max") for name, samples in timed.items()}
    carried = link_probe.rate(slowest.get(link_probe.SIDE, []))
    over_all = over_ranks(list(wrong.values()), "sum"), over_ranks(sent, "max"), over_ranks(errors, "max")
    return [
        Result(
            4 * n * ranks,
            side,
            int(count),
            error,
            int(nbytes) if side.ours else None,
            [] if count else slowest[side.name],
            carried,
        )
        for side, count, nbytes, error in zip(job.sides, *over_all, strict=True)
    ]
