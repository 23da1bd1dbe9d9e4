"""Runs a function on a Gloo group: of processes over loopback, which all end with the call, or of torchrun's ranks."""

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.harness import Failure, Progress
from benchmarks.machine import processes
from benchmarks.machine.signals import catch_signals

Work = Callable[..., Iterator[Any]]
Take = Callable[[Any], object]


class GivenRank(NamedTuple):
    rank: int
    ranks: int


def given_rank() -> GivenRank | None:
    """Return the rank of this process and the number of ranks by torchrun's variables; None without them."""
    try:
        return GivenRank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    except KeyError:
        return None
    except ValueError as error:
        raise Failure(f"RANK and WORLD_SIZE: {error}") from None


def count_ranks(asked: int | None, default: int) -> int:
    """Return torchrun's number of ranks, or else the number that was asked for."""
    given = given_rank()
    if given and asked not in (None, given.ranks):
        raise Failure(f"--ranks {asked} contradicts WORLD_SIZE={given.ranks}")
    return given.ranks if given else asked or default


def on_ranks(work: Work, ranks: int, *args: Any, take: Take, progress: Progress, deadline: float) -> None:
    """Call work(rank, ranks, progress, *args) on every rank, and take() with each result as soon as rank 0 yields it.

    If torchrun's variables are set, this process is one of the ranks, and takes the results that it yields itself.
    """
    if given := given_rank():
        join_ranks(work, given, *args, take=take, progress=progress, deadline=deadline)
    else:
        run_ranks(work, ranks, *args, take=take, progress=progress, deadline=deadline)


def join_ranks(work: Work, given: GivenRank, *args: Any, take: Take, progress: Progress, deadline: float) -> None:
    shown = _seldom(progress if given.rank == 0 else lambda text, done: None)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=deadline))
        for result in work(given.rank, given.ranks, shown, *args):
            take(result)
        dist.barrier()
    except (RuntimeError, ValueError) as error:
        raise Failure(f"rank {given.rank}: {str(error).strip().splitlines()[0]}") from error
    finally:
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()


def run_ranks(work: Work, ranks: int, *args: Any, take: Take, progress: Progress, deadline: float) -> None:
    """Run the ranks. Raises Failure if a rank fails, or if rank 0 reports nothing for `deadline` seconds.

    All ranks have ended when this returns or raises. For this reason Ctrl-C is only recorded while ranks run, and takes
    effect afterwards: an exception could interrupt their start or their end.
    """
    with catch_signals() as caught, tempfile.TemporaryDirectory() as folder:
        enter = partial(_enter, work, ranks, f"file://{folder}/store", deadline, args)
        with processes.calling([partial(enter, rank) for rank in range(ranks)], fresh=True) as team:
            _listen(team, caught, take, progress, deadline)
    if caught:
        signal.raise_signal(caught[0])


def _listen(team: processes.Team, caught: list[int], take: Take, progress: Progress, deadline: float) -> None:
    """Process the events of the ranks until all ranks have ended, or a signal is caught."""
    latest = time.monotonic()
    while team.busy and not caught:
        if event := team.next(timeout=0.2):
            if event.kind == "reported":
                latest = time.monotonic()
                kind, *message = event.value
                {"progress": progress, "result": take}[kind](*message)
            elif event.kind == "ended" and event.value == -signal.SIGINT:  # Ctrl-C reached the rank first
                caught.append(signal.SIGINT)
            elif event.kind == "raised" or (event.kind == "ended" and event.value):
                why = f"exit status {event.value}" if event.kind == "ended" else event.value.strip().splitlines()[-1]
                why = why.removeprefix(f"{Failure.__module__}.{Failure.__name__}: ")
                raise Failure(f"rank {event.index} failed, all ranks were ended: {why}")
        elif time.monotonic() - latest > deadline:
            raise Failure(f"rank 0 reported nothing for {deadline:.0f} s, all ranks were ended")


def _enter(work: Work, ranks: int, store: str, deadline: float, args: tuple[Any, ...], rank: int) -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Shorter than the parent's deadline, so that a rank whose wait times out can still report it.
    dist.init_process_group("gloo", store, timedelta(seconds=deadline / 2), world_size=ranks, rank=rank)

    def progress(text: str, done: float) -> None:
        if rank == 0:
            processes.report(("progress", text, done))

    for result in work(rank, ranks, _seldom(progress), *args):
        if rank == 0:
            processes.report(("result", result))
    dist.barrier()


def over_ranks(values: Sequence[float], how: str) -> list[float]:
    """Reduce the values element by element over the ranks, with Gloo's own all-reduce."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}[how])
    return tensor.tolist()


def _seldom(progress: Progress) -> Progress:
    """Report progress at most once a second, because drawing it takes time from a core that the ranks need."""
    shown, latest = "", 0.0

    def throttled(text: str, done: float) -> None:
        nonlocal shown, latest
        if text != shown or time.monotonic() > latest + 1:
            shown, latest = text, time.monotonic()
            progress(text, done)

    return throttled
