"""A dead or stopped rank becomes an error on the others within the deadline, and they can exit cleanly."""

import contextlib
import os
import re
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import DEADLINE, FAR, SILENCE, SLACK, finish_before, ready, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import comm, ddp

LIVING = {"answer_timeout": timedelta(seconds=30)}  # long enough under any load
# The call had begun when the diagnosis arrived; if it arrives before the call, the call has a shorter error.
IN_A_CALL = (
    r"all_reduce with {algorithm} on rank {rank} in a group of {world_size}: waiting for rank \d+ "
    r"in round \d+ of \d+ failed after \S+ s \(deadline {deadline} s\): .+; "
)
BEFORE_IT = r"all_reduce on rank {rank} in a group of {world_size}: "
CULPRIT = r"the culprit is rank 1: {manner} \(found by rank \d in round \d+ of call {call}\)"
SAID = {signal.SIGKILL: "it has left", signal.SIGSTOP: "it does not answer"}


def message(manner, call, **at):
    return f"({IN_A_CALL}|{BEFORE_IT})".format(**at) + CULPRIT.format(manner=manner, call=call) + "$"


def deadline_for(how):
    return DEADLINE if how == signal.SIGSTOP else FAR


def survive(rank, world_size, algorithm, how, async_op):
    """Return the error and the seconds it took; rank 1 dies after two all-reduces."""
    communicator = comm.Communicator(timeout=deadline_for(how), answer_timeout=SILENCE)
    tensor = torch.ones(300_000)
    for _ in range(2):
        communicator.all_reduce(tensor, "avg", algorithm=algorithm)
    assert torch.equal(tensor, torch.ones(300_000))
    finish_before(1, *range(world_size))
    if rank == 1:
        os.kill(os.getpid(), how)
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as error:
        work = communicator.all_reduce(tensor, "avg", algorithm=algorithm, async_op=async_op)
        if async_op:
            work.wait()
    took = time.monotonic() - start
    with pytest.raises(dist.DistBackendError):  # further calls fail at once
        communicator.all_reduce(tensor)
    return str(error.value), took


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("algorithm", comm.ALGORITHMS)
@pytest.mark.parametrize("async_op", [False, True])
def test_a_dead_rank_is_an_error_on_the_others(algorithm, how, async_op):
    world_size = 4
    results = run_ranks(world_size, survive, algorithm, how, async_op, dying=(1,))
    for rank in (0, 2, 3):
        text, took = results[rank]
        assert took < (DEADLINE.total_seconds() if how == signal.SIGSTOP else 0) + SLACK
        at = {"algorithm": algorithm, "rank": rank, "world_size": world_size}
        deadline = int(deadline_for(how).total_seconds())
        assert re.match(message(SAID[how], 3, deadline=deadline, **at), text), text


def send_without_end(rank, world_size, algorithm):
    """Rank 1 continues until it is killed. Return the error, and the seconds from then on."""
    communicator = comm.Communicator(timeout=FAR, answer_timeout=SILENCE)
    tensor = torch.zeros(16 << 20)
    communicator.all_reduce(tensor, algorithm=algorithm)
    ready()
    with pytest.raises(dist.DistBackendError) as error:
        while True:
            start = time.monotonic()
            communicator.all_reduce(tensor, algorithm=algorithm)
    return str(error.value), time.monotonic() - start


@pytest.mark.parametrize("algorithm", [*comm.ALGORITHMS, "native"])
def test_a_rank_that_dies_in_the_middle_of_a_message_is_named(algorithm):
    """Gloo does not wake a thread that waits for the rest of a message."""

    def kill(pids):
        time.sleep(0.2)  # likely during a call, most of whose time is spent on messages
        os.kill(pids[1], signal.SIGKILL)

    results = run_ranks(3, send_without_end, algorithm, dying=(1,), when_ready=kill)
    for rank in (0, 2):
        text, took = results[rank]
        assert took < SLACK and re.search(r"the culprit is rank 1: it has left", text), text


def come_late(rank, world_size, algorithm):
    communicator = comm.Communicator(timeout=DEADLINE, **LIVING)
    communicator.all_reduce(torch.ones(100), algorithm=algorithm)
    store = dist.group.WORLD.get_group_store()
    if rank == 1:
        store.wait(["failed"])
    with pytest.raises(dist.DistBackendError) as error:
        communicator.all_reduce(torch.ones(100), algorithm=algorithm)
    store.set("failed", "")
    return str(error.value)


@pytest.mark.parametrize("algorithm", [*comm.ALGORITHMS, "native"])
def test_a_late_rank_is_told_from_a_dead_one(algorithm):
    for text in run_ranks(4, come_late, algorithm):
        assert re.search(CULPRIT.format(manner="it is alive, but has not made call 2", call=2), text), text


def see_one_close(rank, world_size):
    communicator = comm.Communicator(timeout=timedelta(seconds=20), answer_timeout=SILENCE)
    communicator.all_reduce(torch.ones(100))
    dist.barrier()  # a rank may still be in that call, and would be told that the next one has failed
    if rank == 1:
        communicator.close()
        return
    with pytest.raises(dist.DistBackendError, match="the culprit is rank 1: it has left"):
        communicator.all_reduce(torch.ones(100), algorithm="ring")


def test_a_rank_that_has_closed_its_communicator_is_the_culprit():
    """The others then close their communicators, and are not taken for the culprit."""
    for _ in range(5):
        run_ranks(4, see_one_close)


def miss_the_beginning(rank, world_size):
    group = dist.new_group([1, 2], timeout=DEADLINE)
    store = dist.group.WORLD.get_group_store()
    if rank == 2:
        store.wait(["failed"])
    if rank == 1:
        with pytest.raises(
            dist.DistBackendError, match=rf"communicator of ranks \[1, 2\]: rank 2 did not come in {DEADLINE}"
        ):
            comm.all_reduce(torch.ones(1), group=group)
        store.set("failed", "")


def test_a_rank_that_never_comes_is_named():
    """The deadline of the communicator is that of the group."""
    run_ranks(3, miss_the_beginning)


def lose_a_rank_of_a_subgroup(rank, world_size):
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    communicator = comm.Communicator(group, timeout=FAR, answer_timeout=SILENCE)
    communicator.all_reduce(torch.ones(1))
    finish_before(2, 1)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError, match=r"on rank 1 in a group of 2: .*the culprit is rank 2: it has left"):
        communicator.all_reduce(torch.ones(1))


def test_ranks_of_a_subgroup_have_their_names_in_the_default_group():
    run_ranks(3, lose_a_rank_of_a_subgroup, dying=(2,))


def survive_in_backward(rank, world_size, options):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), bucket_cap_mb=16 / 1024)
    ddp.register(model, timeout=FAR, **options)
    for _ in range(3):
        model(torch.randn(2, 64)).sum().backward()
    finish_before(1, *range(world_size))
    if rank == 1:
        model.module[2].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"the culprit is rank 1: it has left"):
        model(torch.randn(2, 64)).sum().backward()
    return time.monotonic() - start


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (3, {"codec": "raw"}),
        (2, {"codec": "int8"}),
        (3, {"codec": "int4"}),
        (4, {"codec": "int8", "algorithm": "ring"}),
    ],
    ids=str,
)
def test_a_rank_killed_in_backward(world_size, options):
    results = run_ranks(world_size, survive_in_backward, options, dying=(1,))
    assert all(results[rank] < SLACK for rank in range(world_size) if rank != 1)


def leave_in_flight(rank, world_size):
    communicator = comm.Communicator(timeout=timedelta(minutes=30))
    store = dist.group.WORLD.get_group_store()
    if rank == 0:
        work = communicator.all_reduce(torch.ones(10), async_op=True)
        time.sleep(0.3)
        assert not work.is_completed()
        store.set("process", str(os.getpid()))
        return
    process = int(store.get("process"))
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(process, 0)
            time.sleep(0.05)


def test_exit_does_not_wait_for_pending_work():
    """Rank 0 exits while rank 1, which is alive, has not sent it a message."""
    run_ranks(2, leave_in_flight, fresh=True)


def close_in_flight(rank, world_size):
    communicator = comm.Communicator(timeout=timedelta(minutes=30))
    if rank == 0:
        works = [communicator.all_reduce(torch.ones(10), async_op=True) for _ in range(3)]
        time.sleep(0.3)
        communicator.close()
        for work in works:
            with pytest.raises(dist.DistBackendError, match="the communicator was closed"):
                work.wait()
    # The user's group still works.
    dist.barrier()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((3,), 2.0))


def test_close_fails_pending_work():
    run_ranks(2, close_in_flight)
