"""The threads, descriptors and store keys that communicators use, in addition to those of a Gloo group."""

import gc
import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from dltrain_ext import comm


def threads_that_stay():
    """Return the number of threads, without those that end now: Python forgets a thread before the kernel does."""
    while any(thread.name.startswith("dltrain_ext: ") for thread in threading.enumerate()):
        time.sleep(0.01)
    counts = []
    for _ in range(10):
        counts.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.01)
    return min(counts)


def taken(store):
    """Return the numbers of descriptors and threads, and the keys in the store, after these have been cleaned up."""
    gc.collect()
    threads = threads_that_stay()
    own = len(os.listdir("/proc/self/fd")), threads
    dist.barrier()
    keys = len(store.list_keys())
    dist.barrier()
    return (*own, keys)


def take(rank, world_size, ranks_per_host):
    store = dist.group.WORLD.get_group_store()
    dist.barrier()
    before = taken(store)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, world_size, timedelta(seconds=60))
    of_gloo = taken(store)
    del gloo
    counts, communicators = [], []
    for _ in range(5):
        communicators.append(comm.Communicator(ranks_per_host=ranks_per_host))
        communicators[-1].all_reduce(torch.ones(10))
        counts.append(taken(store))
    for communicator in communicators:
        communicator.close()
    return before, of_gloo, counts, taken(store)


@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_communicators_share_resources_and_release_them(ranks_per_host):
    for before, of_gloo, counts, after in run_ranks(4, take, ranks_per_host, fresh=True):
        for many, (descriptors, threads, keys) in enumerate(counts, 1):
            assert descriptors - before[0] <= 4 + 2 * many * (of_gloo[0] - before[0])
            each = (7, 2) if ranks_per_host == 1 else (7, 3)
            assert descriptors - before[0] <= 8 + each[0] * many  # the number in docs/all_reduce.md
            assert threads - before[1] <= 2 + each[1] * many
            assert keys == of_gloo[2]
        assert after == (*before[:2], of_gloo[2])
