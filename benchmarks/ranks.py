"""Runs a function on p processes of this machine, a Gloo group over loopback; none of them outlives the call."""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.harness import Failure, Progress


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
            last_line = str(error).strip().splitlines()[-1]
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

    shown, sent = "", 0.0

    def progress(text: str, done: float) -> None:
        nonlocal shown, sent
        # At most once a second: whoever draws it takes a core from what is timed.
        if rank == 0 and (text != shown or time.monotonic() > sent + 1):
            shown, sent = text, time.monotonic()
            sender.send(("progress", text, done))

    result = work(rank, ranks, progress, *args)
    if rank == 0:
        sender.send(("result", result))
    dist.barrier()
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
