"""Runs a function on a Gloo group: of p processes over loopback, none of which outlives the call, or of torchrun's."""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.harness import Failure, Progress
from benchmarks.signals import listening

Work = Callable[..., Iterator[Any]]
Take = Callable[[Any], object]


class GivenRank(NamedTuple):
    rank: int
    ranks: int


def given_rank() -> GivenRank | None:
    """What this process is under torchrun's variables; None without them."""
    try:
        return GivenRank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    except KeyError:
        return None
    except ValueError as error:
        raise Failure(f"RANK and WORLD_SIZE: {error}") from None


def count_ranks(asked: int | None, default: int) -> int:
    """torchrun's, or those asked for."""
    given = given_rank()
    if given and asked not in (None, given.ranks):
        raise Failure(f"--ranks {asked} contradicts WORLD_SIZE={given.ranks}")
    return given.ranks if given else asked or default


def on_ranks(work: Work, ranks: int, *args: Any, take: Take, progress: Progress, deadline: float) -> None:
    """Call work(rank, ranks, progress, *args) on every rank, and take() with each result that rank 0 yields, at once.

    Under torchrun's variables this process is one of the ranks, and takes what it yields itself.
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
    """Raises Failure if a rank fails, or if rank 0 reports nothing for `deadline` seconds.

    However this ends, all ranks are gone when it does. So Ctrl-C is only noted here, however often it comes, and has
    its effect once they are: an exception could break into the starting or the ending of them.
    """
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # the Failure says it
    receiver, sender = mp.get_context("spawn").Pipe(duplex=False)
    with listening() as heard, tempfile.TemporaryDirectory() as folder:
        arguments = (work, ranks, f"file://{folder}/store", sender, deadline, args)
        # Blocked, Ctrl-C does not break into a rank's start either.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            context = mp.spawn(_enter, arguments, nprocs=ranks, join=False)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            _listen(context, receiver, heard, take, progress, deadline)
        finally:
            for process in context.processes:
                process.kill()
            for process in context.processes:
                process.join()
    if heard:
        signal.raise_signal(heard[0])


def _listen(
    context: mp.ProcessContext,
    receiver: Connection,
    heard: list[int],
    take: Take,
    progress: Progress,
    deadline: float,
) -> None:
    """Until all ranks have ended, or a signal is heard."""
    told, ended = time.monotonic(), False
    while not heard:
        if receiver.poll(0 if ended else 0.2):
            kind, *message = receiver.recv()
            told = time.monotonic()
            {"progress": progress, "result": take}[kind](*message)
            continue
        if ended:
            return
        try:
            ended = context.join(timeout=0, grace_period=1)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            if getattr(error, "signal_name", None) == "SIGINT":  # Ctrl-C reached the rank before us
                heard.append(signal.SIGINT)
                return
            last_line = str(error).strip().splitlines()[-1].removeprefix(f"{Failure.__module__}.{Failure.__name__}: ")
            raise Failure(f"rank {error.error_index} failed, all ranks were ended: {last_line}") from None
        if time.monotonic() - told > deadline:
            raise Failure(f"rank 0 reported nothing for {deadline:.0f} s, all ranks were ended")


def _enter(
    rank: int, work: Work, ranks: int, store: str, sender: Connection, deadline: float, args: tuple[Any, ...]
) -> None:
    # The parent answers Ctrl-C; a child, even one that waits inside Gloo, simply ends (also when the parent is killed).
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Shorter than the parent's patience: a rank that waits in vain can still say for what.
    dist.init_process_group("gloo", store, timedelta(seconds=deadline / 2), world_size=ranks, rank=rank)

    def progress(text: str, done: float) -> None:
        if rank == 0:
            sender.send(("progress", text, done))

    for result in work(rank, ranks, _seldom(progress), *args):
        if rank == 0:
            sender.send(("result", result))
    dist.barrier()
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


def over_ranks(values: Sequence[float], how: str) -> list[float]:
    """Element by element over the ranks, by Gloo itself."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}[how])
    return tensor.tolist()


def _seldom(progress: Progress) -> Progress:
    """At most once a second: whoever draws it takes a core from what is timed."""
    shown, told = "", 0.0

    def throttled(text: str, done: float) -> None:
        nonlocal shown, told
        if text != shown or time.monotonic() > told + 1:
            shown, told = text, time.monotonic()
            progress(text, done)

    return throttled
