"""Starts the ranks of the selftest, or joins those of torchrun, and makes several of them share a GPU."""

import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dltrain_ext import comm
from dltrain_ext.comm import rendezvous

WAIT_TIMEOUT = timedelta(minutes=5)  # between two checks
TIMEOUT = timedelta(seconds=60)  # of a collective in a check


def launch(ranks: int, run: Callable[..., int], *args: Any) -> int:
    """Calls ``run(*args)`` on that number of ranks of a group on this machine, and returns what rank 0 returns.

    Raises ``torch.multiprocessing.ProcessRaisedException`` or ``ProcessExitedException`` when a rank crashes.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = mp.get_context("spawn").Value("i", 1)
        mp.spawn(_enter, (ranks, str(Path(folder, "store")), answer, run, args), nprocs=ranks)  # type: ignore[no-untyped-call]
        return int(answer.value)


def _enter(rank: int, ranks: int, store: str, answer: Any, run: Callable[..., int], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with joined(store=dist.FileStore(store, ranks), rank=rank, world_size=ranks):
        status = run(*args)
    if rank == 0:
        answer.value = status


@contextmanager
def joined(**where: Any) -> Iterator[None]:
    """Enters the default group, whose backend is Gloo for all devices: torchrun's group if no arguments are given."""
    dist.init_process_group("gloo", timeout=TIMEOUT, **where)
    try:
        yield
    finally:
        dist.destroy_process_group()


def exchange(about: str, value: Any) -> list[Any]:
    """Returns the values of all ranks, on every rank. JSON must be able to represent them.

    They are stored in the group's store under a name of their own, so that the next value of a rank that left a check
    early, with an error, is not taken for what another check waits for.
    """
    group = dist.group.WORLD
    assert group is not None
    members = dist.get_process_group_ranks(group)
    text = json.dumps(value)
    answers = rendezvous.exchange_texts(
        group.get_group_store(), f"selftest {about}", members, dist.get_rank(), text, WAIT_TIMEOUT
    )
    return [json.loads(answer) for answer in answers]


def agree(wrong: str) -> None:
    """Raises AssertionError on all ranks if one of them has found something wrong, so that none continues alone."""
    several = torch.tensor(float(bool(wrong)))
    dist.all_reduce(several)
    if several:
        found: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(found, wrong)
        rank, text = next((rank, text) for rank, text in enumerate(found) if text)
        raise AssertionError(f"rank {rank}: {text}")


def wait_for_all(device: torch.device) -> None:
    """Waits until all ranks have completed what they enqueued: a rank that leaves earlier may break what a peer waits
    for."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


@contextmanager
def communicator(device: torch.device, **options: Any) -> Iterator[comm.Communicator]:
    """Makes a communicator that is closed when all ranks have finished with it."""
    made = comm.Communicator(group_for(device.type), timeout=TIMEOUT, **options)
    yield made
    wait_for_all(device)
    made.close()


@functools.cache
def group_for(device: str) -> dist.ProcessGroup | None:
    """Returns a group of all ranks over NCCL for CUDA tensors, else the default group. The first call is collective."""
    return dist.new_group(backend="nccl", timeout=TIMEOUT) if device == "cuda" else None


def take_gpu() -> None:
    """Selects the GPU of this process by its local rank; several ranks may have to share one."""
    local = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    torch.cuda.set_device(local % torch.cuda.device_count())
    gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    hosts, gpus = zip(*exchange("gpus", [os.uname().nodename, gpu]), strict=True)
    for name, value in nccl_variables(dist.get_rank(), gpus, one_host=len(set(hosts)) == 1).items():
        os.environ.setdefault(name, value)


def nccl_variables(rank: int, gpus: Sequence[str], one_host: bool = True) -> dict[str, str]:
    """Returns the variables that let ranks share a GPU: for NCCL each rank is then a separate host. It is empty if
    every rank has its own GPU."""
    if len(set(gpus)) == len(gpus):
        return {}
    variables = {"NCCL_HOSTID": f"rank{rank}", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return variables | ({"NCCL_SOCKET_IFNAME": "lo"} if one_host else {})
