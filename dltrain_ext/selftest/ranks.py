"""Starts the ranks of the selftest, or joins those of torchrun, and lets several of them share a GPU."""

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

PATIENCE = timedelta(minutes=5)  # of ranks for each other between two checks
TIMEOUT = timedelta(seconds=60)  # of what they do together in one


def launch(ranks: int, run: Callable[..., int], *args: Any) -> int:
    """Calls ``run(*args)`` on so many ranks of a group on this machine, and returns what rank 0 returns.

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
    """In the default group, which is Gloo's whatever the devices are: torchrun's where nothing else is said."""
    dist.init_process_group("gloo", timeout=TIMEOUT, **where)
    try:
        yield
    finally:
        dist.destroy_process_group()


def meet(about: str, value: Any) -> list[Any]:
    """The values of all ranks, which JSON can hold, on every rank.

    They go through the group's store under a name of their own, so that a rank that left a check early, with an error,
    is not taken at its next word for what another check waits for.
    """
    group = dist.group.WORLD
    assert group is not None
    members = dist.get_process_group_ranks(group)
    text = json.dumps(value)
    answers = rendezvous.exchange_texts(
        group.get_group_store(), f"selftest {about}", members, dist.get_rank(), text, PATIENCE
    )
    return [json.loads(answer) for answer in answers]


def agree(wrong: str) -> None:
    """Raises AssertionError on all ranks where one of them has found something wrong, so that none goes on alone."""
    several = torch.tensor(float(bool(wrong)))
    dist.all_reduce(several)
    if several:
        found: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(found, wrong)
        rank, text = next((rank, text) for rank, text in enumerate(found) if text)
        raise AssertionError(f"rank {rank}: {text}")


def wait_for_all(device: torch.device) -> None:
    """Until all ranks have done what they have enqueued: who leaves before may take what a peer still waits for."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


@contextmanager
def communicator(device: torch.device, **options: Any) -> Iterator[comm.Communicator]:
    """One that is closed when all ranks are done with it."""
    made = comm.Communicator(group_for(device.type), timeout=TIMEOUT, **options)
    yield made
    wait_for_all(device)
    made.close()


@functools.cache
def group_for(device: str) -> dist.ProcessGroup | None:
    """A group of all ranks over NCCL for CUDA tensors, the default group for others. Collective when first called."""
    return dist.new_group(backend="nccl", timeout=TIMEOUT) if device == "cuda" else None


def take_gpu() -> None:
    """Gives this process the GPU of its place on its host; several ranks may have to share one."""
    local = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    torch.cuda.set_device(local % torch.cuda.device_count())
    gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    hosts, gpus = zip(*meet("gpus", [os.uname().nodename, gpu]), strict=True)
    for name, value in nccl_variables(dist.get_rank(), gpus, one_host=len(set(hosts)) == 1).items():
        os.environ.setdefault(name, value)


def nccl_variables(rank: int, gpus: Sequence[str], one_host: bool = True) -> dict[str, str]:
    """What lets ranks share a GPU: to NCCL each is a host of its own. Nothing where every rank has its own GPU."""
    if len(set(gpus)) == len(gpus):
        return {}
    variables = {"NCCL_HOSTID": f"rank{rank}", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return variables | ({"NCCL_SOCKET_IFNAME": "lo"} if one_host else {})
