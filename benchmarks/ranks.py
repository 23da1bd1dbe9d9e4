"""Runs a function on a Gloo group: of p processes over loopback, none of which outlives the call, or of torchrun's."""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.harness import Failure, Progress


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


def join_ranks(work: Callable[..., Any], given: GivenRank, *args: Any, progress: Progress, deadline: float) -> Any:
    """Call work(rank, ranks, progress, *args) as the one rank that this process is, and return what that returned."""
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=deadline))
        result = work(given.rank, given.ranks, _seldom(progress if given.rank == 0 else lambda text, done: None), *args)
        dist.barrier()
    except (RuntimeError, ValueError) as error:
        raise Failure(f"rank {given.rank}: {str(error).strip().splitlines()[0]}") from error
    finally:
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
    return result


def run_ranks(work: Callable[..., Any], ranks: int, *args: Any, progress: Progress, deadline: float) -> Any:
    """Call work(rank, ranks, progress, *args) on every rank and return what rank 0 returned.

    Raises Failure if a rank fails, or if rank 0 reports nothing for `deadline` seconds. However this ends (Ctrl-C
    too), all ranks are gone when it does.
    """
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # the Failure says it
    receiver, sender = mp.get_context("spawn").Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (work, ranks, f"file://{folder}/store", sender, deadline, args)
        context = mp.spawn(_enter, arguments, nprocs=ranks, join=False)
        try:
            return _listen(context, receiver, progress, deadline)
        finally:
            for process in context.processes:
                process.kill()
            for process in context.processes:
                process.join()


def _listen(context: mp.ProcessContext, receiver: Connection, progress: Progress, deadline: float) -> Any:
    heard = time.monotonic()
    result = None
    while True:
        if receiver.poll(0.2):
            kind, *message = receiver.recv()
            heard = time.monotonic()
            if kind == "progress":
                progress(*message)
            else:
                (result,) = message
            continue
        try:
            if context.join(timeout=0, grace_period=1):
                return result
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            last_line = str(error).strip().splitlines()[-1].removeprefix(f"{Failure.__module__}.{Failure.__name__}: ")
            raise Failure(f"rank {error.error_index} failed, all ranks were ended: {last_line}") from None
        if time.monotonic() - heard > deadline:
            raise Failure(f"rank 0 reported nothing for {deadline:.0f} s, all ranks were ended")


def _enter(
    rank: int, work: Callable[..., Any], ranks: int, store: str, sender: Connection, deadline: float, args: tuple
) -> None:
    # The parent answers Ctrl-C; a child, even one that waits inside Gloo, simply ends (also when the parent is killed).
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Shorter than the parent's patience: a rank that waits in vain can still say for what.
    dist.init_process_group("gloo", store, timedelta(seconds=deadline / 2), world_size=ranks, rank=rank)

    def progress(text: str, done: float) -> None:
        if rank == 0:
            sender.send(("progress", text, done))

    result = work(rank, ranks, _seldom(progress), *args)
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
