"""The code that every rank of the case allreduce runs: its data, the check of each side, and the timing."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import cupy_peers, deepspeed_peer
from benchmarks.harness import Failure, Progress, interleave
from benchmarks.machine import link_probe
from benchmarks.machine.ranks import over_ranks
from dltrain_ext import comm
from dltrain_ext.selftest.ranks import take_gpu
from dltrain_ext.selftest.sums import (
    Data,
    count_wrong,
    first_if_unlike,
    normal,
    relative_error,
    tolerance,
    whole_numbers,
)

DEADLINE = 60.0
SMALL = 64 << 10  # bytes; up to here the rounds of a plan take the time, and not its bytes
BURST_BYTES = 8 << 20  # at most as much is one sample; several calls, because ranks do not begin at the same time
PEERS = {"cpu": "gloo", "cuda": "nccl"}  # torch.distributed's own backends
CUPY = "cupy nccl"
DEEPSPEED = "deepspeed shm"
NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Side(NamedTuple):
    """One of our algorithms, or a peer, with the codec, the transport and the number of levels."""

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
        return self.algorithm not in (*PEERS.values(), CUPY, DEEPSPEED)


class Job(NamedTuple):
    sizes: list[int]
    sides: list[Side]
    op: str
    rounds: int
    warmup: int
    segments: int | None
    device: str
    ranks_per_host: int | None
    needs_hosts: bool  # False: without several hosts the sides with two levels are left out
    burst: int  # the most calls that are one sample
    tuned: bool = False


class Result(NamedTuple):
    """One side at one size. `wrong` is summed over all ranks; `samples` is empty if a result was wrong.

    `line`: bytes per second of the link, measured in the same run. `chosen`: the plan that a tuned auto selected.
    """

    nbytes: int
    side: Side
    wrong: int
    error: float | None
    wire_bytes: int | None
    samples: list[float]
    line: float | None = None
    chosen: str = ""


class Connections(NamedTuple):
    """The peer's process group (None: the default group), our communicators by levels and transport, other peers."""

    peer: dist.ProcessGroup | None
    ours: dict[tuple[int, str], comm.Communicator]
    others: dict[str, "cupy_peers.Nccl | deepspeed_peer.SharedMemory"]

    def plan_for(self, side: Side, nbytes: int) -> str:
        return self.ours[side.levels, side.transport].plan_for(side.codec, nbytes)[0]

    def wire_bytes(self) -> int:
        return sum(communicator.stats()["wire_bytes"] for communicator in self.ours.values())

    def meet(self) -> None:
        """Let the ranks begin at about the same time. Within a host an all-reduce of ours is the better barrier: with
        more ranks than cores they leave Gloo's up to 2 ms after one another, longer than many calls take."""
        if self.peer is None and self.ours:
            next(iter(self.ours.values())).all_reduce(torch.zeros(1), algorithm="direct")
        else:
            dist.barrier()


def work(rank: int, ranks: int, progress: Progress, job: Job) -> Iterator[list[Result]]:
    """Yield the results of one size after the other, the same on all ranks."""
    peer = nccl_group() if job.device == "cuda" else None
    ours = connect(job)
    sides = [side for side in job.sides if not side.ours or (side.levels, side.transport) in ours]
    makers = {CUPY: cupy_peers.Nccl, DEEPSPEED: deepspeed_peer.SharedMemory}
    others = {name: make(rank, ranks) for name, make in makers.items() if Side(name) in sides}
    job, connections = job._replace(sides=sides), Connections(peer, ours, others)
    for communicator in ours.values() if job.tuned else ():
        progress(f"tuning on {ranks} ranks", 0.0)
        communicator.tune(codecs=sorted({side.codec for side in sides}))
    for index, nbytes in enumerate(job.sizes):

        def advance(done: float, index: int = index, nbytes: int = nbytes) -> None:
            progress(f"{nbytes} bytes on {ranks} ranks", (index + done) / len(job.sizes))

        yield measure(rank, ranks, nbytes // 4, connections, job, advance)
    for communicator in ours.values():
        communicator.close()


def nccl_group() -> dist.ProcessGroup:
    """Return a group of NCCL's own, and make the GPU of this rank the current device."""
    take_gpu()
    return dist.new_group(backend="nccl", timeout=timedelta(seconds=DEADLINE))


def connect(job: Job) -> dict[tuple[int, str], comm.Communicator]:
    """Make a communicator for each pair of levels and transport; with two levels only if the hosts allow it."""
    made: dict[tuple[int, str], comm.Communicator] = {}
    for levels, transport in dict.fromkeys((side.levels, side.transport) for side in job.sides if side.ours):
        communicator = comm.Communicator(
            timeout=timedelta(seconds=DEADLINE / 2),
            transport=transport,
            ranks_per_host=1 if levels == 1 else job.ranks_per_host,
        )
        if levels == 1 or has_two_levels(communicator, job.device):
            made[levels, transport] = communicator
        elif job.needs_hosts:
            raise Failure(
                "two levels are not possible: they need several hosts with the same number of ranks, at least two; "
                "--ranks-per-host K treats K neighbouring ranks as a host"
            )
        else:
            communicator.close()
    return made


def has_two_levels(communicator: comm.Communicator, device: str) -> bool:
    """Return the same on all ranks, also if some rank sends nothing within its host."""
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
        # For an average the elements are multiplied by the number of ranks, so that the mean equals the sum.
        if name in sides:
            torch.mul(data[name].own, ranks if average else 1, out=message)

    def before(name: str) -> None:
        write(name)
        connections.meet()

    def burst(name: str) -> None:
        calls[name]()
        for _ in range(length - 1):
            write(name)
            calls[name]()

    def after(name: str) -> None:
        if name in sides:
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
    length = max(1, min(job.burst, BURST_BYTES // (4 * n)))
    beside = link_probe.sides(rank, ranks, job.device) if 4 * n > SMALL else {}
    timed = interleave(
        {name: partial(burst, name) for name in right} | beside,
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
            4 * n,
            side,
            int(count),
            None if side.codec == "raw" else error,
            int(wire_bytes) if side.ours and side.algorithm != "native" else None,
            [] if count else [seconds / length for seconds in slowest[side.name]],
            carried,
            connections.plan_for(side, 4 * n) if job.tuned and side.algorithm == "auto" else "",
        )
        for side, count, wire_bytes, error in zip(job.sides, *over_all, strict=True)
    ]


def make_call(side: Side, message: Tensor, connections: Connections, job: Job) -> Callable[[], object]:
    """Return a call that all-reduces the message in place."""
    average = job.op == "avg"

    def peer() -> None:
        dist.all_reduce(message, group=connections.peer)
        if average:
            message.div_(dist.get_world_size())

    def peer_narrow() -> None:  # does what torch's fp16_compress_hook does
        narrow = message.to(NARROW[side.codec])
        if average:
            narrow.div_(dist.get_world_size())
        dist.all_reduce(narrow, group=connections.peer)
        message.copy_(narrow)

    def by_other() -> None:
        connections.others[side.algorithm].all_reduce(message)
        if average:
            message.div_(dist.get_world_size())

    def ours() -> None:
        connections.ours[side.levels, side.transport].all_reduce(
            message, job.op, algorithm=side.algorithm, codec=side.codec, segments=job.segments
        )

    if side.ours:
        return ours
    if side.algorithm in connections.others:
        return by_other
    return peer if side.codec == "raw" else peer_narrow
