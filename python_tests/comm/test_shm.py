"""Messages between the processes of a host go through memory that they share, where they can share any."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import ROOT, SLACK, finish_before, ready, run_ranks

from dltrain_ext import _ops, comm
from dltrain_ext.comm import transports

MEMORY = "memfd:dltrain_ext"


def memories_of(process="self"):
    """Return the inodes of the memories that a process has mapped and shares with others."""
    try:
        lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    except (OSError, ProcessLookupError):  # it has ended
        return set()
    return {line.split()[4] for line in lines if MEMORY in line}


def shared_by(process="self"):
    return bool(memories_of(process))


def sum_of_ranks(communicator, rank, world_size, **options):
    for numel in (1, 1000, 300_000):
        tensor = torch.full((numel,), rank + 1.0)
        communicator.all_reduce(tensor, **options)
        assert torch.equal(tensor, torch.full((numel,), world_size * (world_size + 1) / 2))


def share(rank, world_size):
    shares = [shared_by()]
    for transport in ("auto", "gloo", "shm"):
        communicator = comm.Communicator(transport=transport, ranks_per_host=1)
        shares.append(shared_by())
        sum_of_ranks(communicator, rank, world_size)
        sum_of_ranks(communicator, rank, world_size, algorithm="native")
        communicator.close()
        del communicator
        gc.collect()
        shares.append(shared_by())
    return shares


def test_ranks_of_a_host_share_memory_until_they_close():
    assert run_ranks(3, share) == [[False, True, False, False, False, True, False]] * 3


def obey(rank, world_size):
    communicator = comm.Communicator()
    return shared_by(), communicator.all_reduce(torch.ones(1))


def test_the_environment_selects_the_transport(monkeypatch):
    monkeypatch.setenv("DLTRAIN_TRANSPORT", "gloo")
    assert [shares for shares, _ in run_ranks(2, obey)] == [False, False]
    monkeypatch.setenv("DLTRAIN_TRANSPORT", "mpi")
    with pytest.raises(
        AssertionError, match="DLTRAIN_TRANSPORT: expected one of auto, shm, gloo, nccl, c10d, got 'mpi'"
    ):
        run_ranks(2, obey)


def differ(rank, world_size):
    with pytest.raises(ValueError, match="DLTRAIN_SEGMENTS: expected the same on all ranks"):
        comm.Communicator(transport=("shm", "gloo")[rank])


def test_ranks_with_different_transports_raise():
    run_ranks(2, differ)


def fail_to_share(rank, world_size, failing, **options):
    def fail(*args):
        raise RuntimeError("no memory today")

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        if rank == failing:
            patch.setattr(_ops, "SharedMemory", SimpleNamespace(make=fail, open=fail))
        warnings.simplefilter("always")
        for _ in range(2):
            communicator = comm.Communicator(**options)
            assert not shared_by()
            sum_of_ranks(communicator, rank, world_size)
        with pytest.raises(
            dist.DistBackendError, match=f"transport: shm cannot be used: .*rank {failing}: .*no memory today"
        ):
            comm.Communicator(transport="shm", **options)
    return [str(each.message) for each in caught if "dltrain_ext" in str(each.message)]


@pytest.mark.parametrize("failing", [0, 1])
def test_ranks_that_cannot_share_memory_use_gloo_and_say_why_once(failing):
    expected = "dltrain_ext: messages between the processes of a host are sent over Gloo, not through memory that they"
    for told in run_ranks(3, fail_to_share, failing, fresh=True):
        assert len(told) == 1 and told[0].startswith(expected) and "no memory today" in told[0]


@pytest.mark.parametrize("failing", [0, 3])
def test_no_host_waits_for_one_whose_ranks_cannot_share_memory(failing):
    run_ranks(4, partial(fail_to_share, ranks_per_host=2), failing, fresh=True, timeout=60)


def fail_without_gloo(rank, world_size, failing):
    def fail():
        raise RuntimeError("no such interface")

    with pytest.MonkeyPatch.context() as patch:
        if rank == failing:
            patch.setattr(transports, "gloo_devices", fail)
        with pytest.raises(dist.DistBackendError, match=f"rank {failing} has no Gloo: no such interface"):
            comm.Communicator()
    sum_of_ranks(comm.Communicator(), rank, world_size)


def test_no_rank_waits_for_one_without_gloo():
    run_ranks(3, fail_without_gloo, 1, timeout=60)


def fail_after_gloo(rank, world_size, failing):
    """Gloo may be connected on some ranks and fail on another, as when one dies meanwhile."""
    connect = transports.Site.gloo

    def fail(site, part, threads):
        connected = connect(site, part, threads)
        if part.name.startswith("shm"):
            raise RuntimeError("no Gloo today")
        return connected

    with pytest.MonkeyPatch.context() as patch:
        if rank == failing:
            patch.setattr(transports.Site, "gloo", fail)
        with pytest.raises(
            dist.DistBackendError, match=f"transport: shm cannot be used: .*rank {failing}: .*no Gloo today"
        ):
            comm.Communicator(transport="shm")
        sum_of_ranks(comm.Communicator(), rank, world_size)


@pytest.mark.parametrize("failing", [0, 1])
def test_no_rank_waits_for_one_whose_gloo_has_failed(failing):
    run_ranks(3, fail_after_gloo, failing, timeout=60)


def work_until_killed(rank, world_size):
    *some, last = range(world_size)
    store = dist.group.WORLD.get_group_store()
    if rank == last:
        processes = [int(store.get(f"process {each}")) for each in some]
        ready()
        while any(map(shared_by, processes)):
            time.sleep(0.01)
        return
    communicator = comm.Communicator(timeout=timedelta(minutes=5), ranks=some)
    sum_of_ranks(communicator, rank, last)
    store.set(f"process {rank}", str(os.getpid()))
    ready()
    while True:
        sum_of_ranks(communicator, rank, last)


def test_nothing_is_left_of_the_memory_when_all_are_killed():
    shared = []

    def kill(pids):
        shared.extend(map(memories_of, pids))
        for pid in pids[:3]:
            os.kill(pid, signal.SIGKILL)

    run_ranks(4, work_until_killed, dying=(0, 1, 2), when_ready=kill)
    (memory,) = shared[0]
    assert shared == [{memory}, {memory}, {memory}, set()]
    assert not [process for process in Path("/proc").glob("[0-9]*") if memory in memories_of(process.name)]


def work_without_cores(rank, world_size):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    communicator = comm.Communicator()
    for algorithm in comm.ALGORITHMS:
        sum_of_ranks(communicator, rank, world_size, algorithm=algorithm)


def test_ranks_that_share_one_core():
    run_ranks(6, work_without_cores, fresh=True)


def wait_long(rank, world_size):
    communicator = comm.Communicator(timeout=timedelta(minutes=5))
    sum_of_ranks(communicator, rank, world_size)
    finish_before(1, *range(world_size))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError, match=r"the culprit is rank 1: it has left"):
        communicator.all_reduce(torch.ones(1_000_000))
    return True


def test_the_others_see_that_a_process_has_ended():
    assert run_ranks(3, wait_long, dying=(1,), timeout=10 * SLACK) == [True, None, True]


CONTAINER = """
import sys, warnings
import torch, torch.distributed as dist
from dltrain_ext import comm

store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), is_master=False)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[1]), world_size=2)
warnings.simplefilter("always")
tensor = torch.ones(1000)
comm.Communicator().all_reduce(tensor)
assert torch.equal(tensor, torch.full((1000,), 2.0))
dist.barrier()
"""


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("unshare"), reason="needs root, and unshare")
@pytest.mark.parametrize("contained", [0, 1])
def test_a_process_in_a_container_cannot_share(contained):
    """The processes have one network and hostname, but the numbers of processes mean others in the container."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    container = ["unshare", "--pid", "--fork", "--mount-proc"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    processes = [
        subprocess.Popen(
            [*(container if rank == contained else []), sys.executable, "-c", CONTAINER, str(rank), str(store.port)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert "messages between the processes of a host are sent over Gloo" in errors
