"""Checks the errors of the other ranks when a rank is killed, in a separate process for each rank of the selftest."""

import os
import signal
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dltrain_ext import comm
from dltrain_ext.selftest import ranks
from dltrain_ext.selftest.report import Check, Found, Site, Skip

DEADLINES = {"cpu": 5.0, "cuda": 30.0}  # timeouts of the calls in seconds; on CUDA also for NCCL's connections
GRACE = 10.0  # seconds after the timeout within which the survivors must raise
STARTING = 300.0


def killed_rank(site: Site) -> Found:
    """The last rank is killed between two all-reduces. Each other one must raise an error that names it, and end."""
    if site.world_size == 1:
        raise Skip("needs two ranks: --ranks 2")
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    store = None
    if site.rank == 0:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    port = ranks.exchange(f"port on {site.device.type}", store.port if store else 0)[0]
    context = mp.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run_rank, args=(site, host, port, sender), daemon=True)
    child.start()
    sender.close()
    deadline = DEADLINES[site.device.type]
    child.join(STARTING + deadline + GRACE)
    status = child.exitcode
    child.kill()
    child.join()
    words, seconds = _received(receiver)
    # No rank destroys the store before all ranks have got here.
    reports = ranks.exchange(f"survivors on {site.device.type}", [words, seconds])
    victim = site.world_size - 1
    if site.rank == victim:
        assert status == -signal.SIGKILL, f"the rank that was to be killed ended with {status}, and said: {words}"
        words = next((text for text, _ in reports if text), "")
    else:
        assert status == 0, f"the process ended with {status} (None: it hung) after it said: {words or 'nothing'}"
        assert f"rank {victim}" in words, f"the error does not name rank {victim}: {words}"
        assert seconds < deadline + GRACE, f"the error came after {seconds:.1f} s, the deadline is {deadline:g} s"
    slowest = max(seconds for _, seconds in reports)
    return Found(f"named by all others within {slowest:.2f} s", {"seconds": slowest, "words": words})


def _received(receiver: Connection) -> tuple[str, float]:
    try:
        return receiver.recv() if receiver.poll() else ("", 0.0)
    except EOFError:  # the rank was killed
        return "", 0.0


def _run_rank(site: Site, host: str, port: int, sender: Connection) -> None:
    torch.set_num_threads(1)
    if site.device.type == "cuda":
        torch.cuda.set_device(site.device)
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=STARTING))
    dist.init_process_group("gloo", store=store, rank=site.rank, world_size=site.world_size)
    deadline = DEADLINES[site.device.type]
    communicator = comm.Communicator(timeout=timedelta(seconds=deadline))
    tensor = torch.ones(300_000, device=site.device)
    for _ in range(2):
        communicator.all_reduce(tensor, "avg")
    _wait(site)
    dist.barrier()
    if site.rank == site.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        # On CUDA a call only enqueues: the next one raises.
        while time.monotonic() < start + deadline + GRACE:
            communicator.all_reduce(tensor, "avg")
            _wait(site)
    except dist.DistBackendError as error:
        sender.send((str(error), time.monotonic() - start))
    # The default group may have a peer that is gone, so it is not destroyed.
    sender.close()
    os._exit(0)


def _wait(site: Site) -> None:
    if site.device.type == "cuda":
        torch.cuda.synchronize()


CHECKS = [Check("a killed rank", killed_rank)]
