"""What every rank of the case allreduce runs: its data, the check of each side, the timing."""

import hashlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import Failure, Progress, interleave
from benchmarks.ranks import over_ranks
from dltrain_ext import codecs, comm

DEADLINE = 60.0
SMALL = 64 << 10  # bytes; calls so short that what comes before them, like a barrier, tells in their time
BURST = 10  # of them back to back are one sample
PEERS = {"cpu": "gloo", "cuda": "nccl"}  # torch.distributed's own backends
NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Side(NamedTuple):
    """An algorithm of ours, or the peer; what its messages are in, what carries them, and in how many levels."""

    algorithm: str
    codec: str = "raw"
    transport: str = "auto"
    levels: int = 1

    @property
    def name(self) -> str:
        codec = "" if self.codec == "raw" else f" {self.codec}"
        transport = "" if self.transport == "auto" else f" over {self.transport}"
        return f"{self.algorithm}{codec}{transport}{'' if self.levels == 1 else f', {self.levels} levels'}"

    @property
    def ours(self) -> bool:
        return self.algorithm not in PEERS.values()


class Job(NamedTuple):
    sizes: list[int]
    sides: list[Side]
    op: str
    rounds: int
    warmup: int
    segments: int | None
    device: str
    ranks_per_host: int | None
    needs_hosts: bool  # else sides in two levels are left out where there are none
    tuned: bool = False


class Result(NamedTuple):
    """One side at one size. Counts are over all ranks; `samples` is empty where a result was wrong."""

    nbytes: int
    side: Side
    wrong: int
    error: float | None
    wire_bytes: int | None
    samples: list[float]


class Data(NamedTuple):
    """A rank's contribution, the sum over all ranks, and the sum of their largest magnitudes."""

    own: Tensor
    total: Tensor
    magnitudes: float

    @classmethod
    def of(cls, part: Callable[[int], Tensor], rank: int, ranks: int, device: str = "cpu") -> "Data":
        total, magnitudes = torch.zeros_like(part(0), dtype=torch.float64), 0.0
        for contributor in range(ranks):
            values = part(contributor)
            total += values
            magnitudes += values.abs().max().item()
        return cls(part(rank).to(device), total.float().to(device), magnitudes)


def whole_numbers(n: int) -> Callable[[int], Tensor]:
    """Their sum is exact in any order."""
    return lambda rank: ((torch.arange(n) * 7 + 13 * rank) % 251 - 125).float()


def normal(n: int) -> Callable[[int], Tensor]:
    return lambda rank: torch.randn(n, generator=torch.Generator().manual_seed(rank))


def tolerance(codec: str, ranks: int, magnitudes: float) -> float:
    """How far an element may be from the sum: each of p contributions, and the result, is encoded once."""
    if codec == "raw":
        return 0.0
    return (codecs.error_bound(codec).max * (ranks + 1) + 1e-5) * magnitudes


def count_wrong(result: Tensor, exact: Tensor, tolerance: float, first: Tensor | None = None) -> int:
    """Elements beyond the tolerance, not a number, or of other bits than rank 0's result `first` (None: the same)."""
    right = (result - exact).abs_() <= tolerance
    if first is not None:
        right &= result.view(torch.int32) == first.view(torch.int32)
    return result.numel() - int(torch.count_nonzero(right))


def first_if_unlike(result: Tensor) -> Tensor | None:
    """Rank 0's result where those of the ranks differ in a bit; None where they do not."""
    own = torch.tensor(list(hashlib.sha256(result.cpu().numpy().data).digest()), dtype=torch.uint8)
    digests = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, own)
    if all(torch.equal(digests[0], other) for other in digests):
        return None
    first = result.cpu().clone()
    dist.broadcast(first, 0)
    return first.to(result.device)


class Connections(NamedTuple):
    """What calls go over: the peer's group (None: the default one), and ours by levels and transport."""

    peer: dist.ProcessGroup | None
    ours: dict[tuple[int, str], comm.Communicator]

    def wire_bytes(self) -> int:
        return sum(communicator.stats()["wire_bytes"] for communicator in self.ours.values())


def work(rank: int, ranks: int, progress: Progress, job: Job) -> list[Result]:
    """The results are the same on all ranks."""
    peer = nccl_group(rank, ranks) if job.device == "cuda" else None
    ours = connect(job)
    sides = [side for side in job.sides if not side.ours or (side.levels, side.transport) in ours]
    job, connections = job._replace(sides=sides), Connections(peer, ours)
    for communicator in ours.values() if job.tuned else ():
        progress(f"tuning on {ranks} ranks", 0.0)
        communicator.tune(codecs=sorted({side.codec for side in sides}))
    results: list[Result] = []
    for index, nbytes in enumerate(job.sizes):

        def advance(done: float, index: int = index, nbytes: int = nbytes) -> None:
            progress(f"{nbytes} bytes on {ranks} ranks", (index + done) / len(job.sizes))

        results += measure(rank, ranks, nbytes // 4, connections, job, advance)
    for communicator in ours.values():
        communicator.close()
    return results


def nccl_group(rank: int, ranks: int) -> dist.ProcessGroup:
    """NCCL's own all-reduce, on the GPU of this rank, which becomes the current one."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    gpus = [""] * ranks
    dist.all_gather_object(gpus, str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
    for name, value in nccl_variables(rank, gpus).items():
        os.environ.setdefault(name, value)
    return dist.new_group(backend="nccl", timeout=timedelta(seconds=DEADLINE))


def nccl_variables(rank: int, gpus: Sequence[str]) -> dict[str, str]:
    """What lets ranks share a GPU: to NCCL each is a host of its own. Nothing where every rank has its own GPU."""
    if len(set(gpus)) == len(gpus):
        return {}
    return {"NCCL_HOSTID": f"rank{rank}", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}


def connect(job: Job) -> dict[tuple[int, str], comm.Communicator]:
    """A communicator for each pair of levels and transport, but none in two levels where there are no such hosts."""
    made: dict[tuple[int, str], comm.Communicator] = {}
    for levels, transport in dict.fromkeys((side.levels, side.transport) for side in job.sides if side.ours):
        communicator = comm.Communicator(
            timeout=timedelta(seconds=DEADLINE / 2),
            transport=transport,
            ranks_per_host=1 if levels == 1 else job.ranks_per_host,
        )
        if levels == 1 or goes_in_two_levels(communicator, job.device):
            made[levels, transport] = communicator
        elif job.needs_hosts:
            raise Failure(
                "there are no two levels: they need several hosts of as many ranks each, more than one; "
                "--ranks-per-host K makes hosts of K neighbouring ranks"
            )
        else:
            communicator.close()
    return made


def goes_in_two_levels(communicator: comm.Communicator, device: str) -> bool:
    """The same on all ranks, also if one has nothing to send."""
    communicator.all_reduce(torch.zeros(SMALL // 4, device=device))
    return over_ranks([communicator.stats()["inside_bytes"]], "max")[0] > 0


def measure(
    rank: int, ranks: int, n: int, connections: Connections, job: Job, advance: Callable[[float], None]
) -> list[Result]:
    advance(0.0)
    average = job.op == "avg"
    message = torch.empty(n, device=job.device)
    sides = {side.name: side for side in job.sides}
    exact = Data.of(whole_numbers(n), rank, ranks, job.device)
    lossy = any(side.codec != "raw" for side in job.sides)
    rounded = Data.of(normal(n), rank, ranks, job.device) if lossy else exact
    data = {name: exact if side.codec == "raw" else rounded for name, side in sides.items()}
    bounds = {name: tolerance(side.codec, ranks, data[name].magnitudes) for name, side in sides.items()}
    wrong = dict.fromkeys(sides, 0)

    def write(name: str) -> None:
        # Times the ranks for an average, so that the mean is what the sum would be.
        torch.mul(data[name].own, ranks if average else 1, out=message)

    def before(name: str) -> None:
        write(name)
        dist.barrier()

    def burst(name: str) -> None:
        calls[name]()
        for _ in range(length - 1):
            write(name)
            calls[name]()

    def after(name: str) -> None:
        wrong[name] += count_wrong(message, data[name].total, bounds[name], first_if_unlike(message))

    calls = {name: make_call(side, message, connections, job) for name, side in sides.items()}
    sent, errors = [], []
    for name, call in calls.items():
        advance(0.0)
        before(name)
        already = connections.wire_bytes()
        call()
        after(name)
        sent.append(connections.wire_bytes() - already)
        errors.append(relative_error(message, data[name].total))
    right = [name for name, count in zip(sides, over_ranks(list(wrong.values()), "sum"), strict=True) if not count]
    length = BURST if 4 * n <= SMALL else 1
    timed = interleave(
        {name: partial(burst, name) for name in right},
        rounds=(job.rounds, job.rounds),
        warmup=job.warmup,
        before=before,
        after=after,
        device=job.device,
        progress=advance,
    )
    slowest = {name: [time / length for time in over_ranks(samples, "max")] for name, samples in timed.items()}
    over_all = over_ranks(list(wrong.values()), "sum"), over_ranks(sent, "max"), over_ranks(errors, "max")
    return [
        Result(
            4 * n,
            side,
            int(count),
            None if side.codec == "raw" else error,
            int(wire_bytes) if side.ours and side.algorithm != "native" else None,
            [] if count else slowest[side.name],
        )
        for side, count, wire_bytes, error in zip(job.sides, *over_all, strict=True)
    ]


def make_call(side: Side, message: Tensor, connections: Connections, job: Job) -> Callable[[], object]:
    """All-reduces the message in place."""
    average = job.op == "avg"

    def peer() -> None:
        dist.all_reduce(message, group=connections.peer)
        if average:
            message.div_(dist.get_world_size())

    def peer_narrow() -> None:  # as torch's fp16_compress_hook does it
        narrow = message.to(NARROW[side.codec])
        if average:
            narrow.div_(dist.get_world_size())
        dist.all_reduce(narrow, group=connections.peer)
        message.copy_(narrow)

    def ours() -> None:
        connections.ours[side.levels, side.transport].all_reduce(
            message, job.op, algorithm=side.algorithm, codec=side.codec, segments=job.segments
        )

    if side.ours:
        return ours
    return peer if side.codec == "raw" else peer_narrow


def relative_error(result: Tensor, exact: Tensor) -> float:
    """The rms of the error over that of what is exact."""
    norm = torch.linalg.vector_norm
    return (norm(result - exact, dtype=torch.float64) / norm(exact, dtype=torch.float64)).item()
