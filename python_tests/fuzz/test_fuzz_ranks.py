"""Wrong arguments on one of two ranks, and two communicators at once: no rank hangs, and messages are not mixed up."""

import gc
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import DEADLINE, SILENCE, run_ranks

from dltrain_ext import comm


def refuse_on_one(rank, world_size):
    """A refused call does not count as a call: the other rank gets an error, and does not wait forever."""
    communicator = comm.Communicator(timeout=DEADLINE, answer_timeout=SILENCE)
    communicator.all_reduce(torch.ones(100))
    if rank == 0:
        for bad in (torch.ones(4, dtype=torch.complex64), torch.ones(4, device="meta"), torch.ones(1).expand(4)):
            with pytest.raises((TypeError, ValueError), match="tensor: expected"):
                communicator.all_reduce(bad)
    tensor = torch.full((100,), float(rank))
    communicator.all_reduce(tensor)
    assert torch.equal(tensor, torch.ones(100))
    if rank == 1:
        with pytest.raises(dist.DistBackendError, match="rank 0: it is alive, but has not made call 3|it has left"):
            communicator.all_reduce(tensor)
    else:
        with pytest.raises(TypeError, match="tensor: expected a torch.Tensor"):
            communicator.all_reduce(None)
        communicator.close()


def test_a_refused_call_on_one_rank():
    run_ranks(2, refuse_on_one)


TOLD = r"this rank is in call \d+|the culprit is rank|all ranks answer"


def disagree(rank, world_size):
    for mine in (
        {"tensor": torch.ones(10 + rank)},
        {"tensor": torch.ones(10), "codec": ("int8", "int4")[rank]},
        {"tensor": torch.ones(10), "algorithm": ("ring", "direct")[rank]},
        {"tensor": torch.ones(10), "op": ("sum", "avg")[rank]},
        {"tensor": torch.ones(100_000), "segments": 2 + rank},
    ):
        with pytest.raises(dist.DistBackendError, match=TOLD):
            comm.Communicator(timeout=DEADLINE).all_reduce(**mine)


def test_ranks_that_disagree_raise():
    run_ranks(2, disagree)


WAYS = [{"codec": "int8", "algorithm": "ring"}, {"codec": "raw", "algorithm": "halving_doubling"}]


def values(rank, call):
    return torch.randn(20_000, generator=torch.Generator().manual_seed(100 * call + rank))


def one_at_a_time(rank, ways, calls):
    made = []
    for way in ways:
        communicator = comm.Communicator(timeout=timedelta(seconds=30))
        tensors = [values(rank, call) for call in range(calls)]
        for tensor in tensors:
            communicator.all_reduce(tensor, **way)
        made.append(tensors)
    return made


def use_two_at_once(rank, world_size, in_threads):
    calls = 12
    expected = one_at_a_time(rank, WAYS, calls)
    both = [comm.Communicator(timeout=timedelta(seconds=30)) for _ in WAYS]
    found = [[values(rank, call) for call in range(calls)] for _ in WAYS]
    if in_threads:

        def body(which):
            for tensor in found[which]:
                both[which].all_reduce(tensor, **WAYS[which])

        threads = [threading.Thread(target=body, args=(which,)) for which in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        works = [
            both[which].all_reduce(found[which][call], async_op=True, **WAYS[which])
            for call in range(calls)
            for which in ((0, 1) if rank == 0 else (1, 0))
        ]
        for work in works:
            work.wait()
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("in_threads", [False, True])
def test_two_communicators_at_once(in_threads):
    run_ranks(2, use_two_at_once, in_threads)


def drop_while_pending(rank, world_size):
    communicator = comm.Communicator(timeout=timedelta(seconds=60))
    communicator.all_reduce(torch.ones(10))
    if rank == 0:
        future = communicator.all_reduce(torch.ones(10), async_op=True).get_future()
        del communicator
        gc.collect()
        with pytest.raises(dist.DistBackendError, match="the communicator was closed"):
            future.wait()
    dist.barrier()


def test_a_communicator_dropped_with_pending_work():
    run_ranks(2, drop_while_pending)


def outlive_the_group(rank, world_size):
    group = dist.new_group([0, 1])
    communicator = comm.Communicator(group, timeout=DEADLINE)
    dist.destroy_process_group(group)
    tensor = torch.ones(5)
    communicator.all_reduce(tensor)  # it has its own connections
    assert torch.equal(tensor, torch.full((5,), 2.0))
    communicator.close()
    communicator.close()
    with pytest.raises(dist.DistBackendError, match="the communicator was closed"):
        communicator.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((5,), 2.0))


def test_a_communicator_outlives_its_group():
    run_ranks(2, outlive_the_group)
