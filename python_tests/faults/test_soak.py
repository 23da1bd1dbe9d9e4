"""Ranks that all-reduce and train for DLTRAIN_SOAK_SECONDS (default: one minute): results stay right, no leaks."""

import os
import time
from pathlib import Path

import pytest
import torch
from contributions import fitting, normal, same_everywhere
from ranks import run_ranks
from test_fault_sweep import cases, reduce
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import codecs, comm, ddp, optim

SECONDS = float(os.environ.get("DLTRAIN_SOAK_SECONDS", "60"))
MEBIBYTE = 2**20


def held():
    """Return the bytes of memory, the threads and the open files of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def reduce_coded(communicator, rank, turn):
    """All-reduce with all codecs and plans, alternately asynchronously; all ranks have to get the same bits."""
    for number, (codec, algorithm) in enumerate((c, a) for c in codecs.CODECS for a in fitting(c)):
        tensor = normal(rank, 5_000, turn)
        is_async = bool((turn + number) % 2)
        work = communicator.all_reduce(tensor, algorithm=algorithm, codec=codec, async_op=is_async)
        assert (work is not None) == is_async
        if work is not None:
            work.wait()
        assert tensor.isfinite().all() and same_everywhere(tensor), (codec, algorithm)


def last(rank, world_size, codec):
    """Return the resources after each turn, the first and the last loss, and the number of all-reduces."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8)))
    ddp.register(model, codec=codec)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(32, 64), torch.randn(32, 8)
    communicators = [comm.Communicator(ranks_per_host=per_host) for per_host in (1, 2)]  # with one level, and with two
    end, stop = time.monotonic() + SECONDS, torch.zeros(1)
    found, losses = [], []
    while not stop:
        for communicator in communicators:
            for algorithm in (*comm.ALGORITHMS, "native"):
                for case in cases(algorithm):
                    reduce(communicator, rank, world_size, algorithm, *case)
            reduce_coded(communicator, rank, len(found))
        for _ in range(20):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        comm.Communicator(ranks_per_host=1 if len(found) % 2 else 2).close()
        found.append(held())
        stop = torch.tensor([float(rank == 0 and time.monotonic() > end)])
        communicators[0].all_reduce(stop)
    return found, losses[0], losses[-1], sum(communicator.stats()["calls"] for communicator in communicators)


@pytest.mark.exhaustive
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_results_stay_right_and_resources_do_not_grow(codec, capsys):
    ranks = run_ranks(4, last, codec, fresh=True, timeout=SECONDS + 600)
    found, *_, calls = ranks[0]
    with capsys.disabled():
        print(f"\nhook in {codec}: {calls} all-reduces; bytes, threads, files: {found[0]} to {found[-1]}")
    for found, first, final, _ in ranks:
        assert len(found) >= 8 and final < first
        memory, threads, files = zip(*found, strict=True)
        quarter = len(found) // 4
        assert max(memory[-quarter:]) < max(memory[quarter : 2 * quarter]) + 16 * MEBIBYTE, memory
        # A thread pool may start a thread late, when it first needs it; a leak would grow in each turn.
        assert max(threads[-quarter:]) <= max(threads[:quarter]) + 2, threads
        assert max(files[-quarter:]) <= max(files[:quarter]), files
