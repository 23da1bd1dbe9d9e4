"""What the others say when a rank is killed: in processes of their own, one for each rank of the selftest."""

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

DEADLINES = {"cpu": 5.0, "cuda": 30.0}  # seconds of the calls; on CUDA also to make NCCL's connections
GRACE = 10.0  # more, in which the survivors have to know
STARTING = 300.0


def killed_rank(site: Site) -> Found:
    """The last rank is killed between two all-reduces; each other has to raise, name it, and leave."""
    if site.world_size == 1:
        raise Skip("needs two ranks: --ranks 2")
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    store = None
    if site.rank == 0:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    port = ranks.meet(f"port on {site.device.type}", store.port if store else 0)[0]
    context = mp.get_context("spawn")
    said, says = context.Pipe(duplex=False)
    child = context.Process(target=_live, args=(site, host, port, says), daemon=True)
    child.start()
    says.close()
    deadline = DEADLINES[site.device.type]
    child.join(STARTING + deadline + GRACE)
    status = child.exitcode
    child.kill()
    child.join()
    words, seconds = _heard(said)
    # Nobody lets go of the store before all have come.
    reports = ranks.meet(f"survivors on {site.device.type}", [words, seconds])
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


def _heard(said: Connection) -> tuple[str, float]:
    try:
        return said.recv() if said.poll() else ("", 0.0)
    except EOFError:  # it was killed
        return "", 0.0


def _live(site: Site, host: str, port: int, says: Connection) -> None:
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
        says.send((str(error), time.monotonic() - start))
    # The default group may have a peer that is gone: nothing is left to be said there.
    says.close()
    os._exit(0)


def _wait(site: Site) -> None:
    if site.device.type == "cuda":
        torch.cuda.synchronize()


CHECKS = [Check("a killed rank", killed_rank)]
