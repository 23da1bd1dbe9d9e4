"""Ranks behind links that delay and lose packets: a living rank is never reported as dead.

To run it manually for an hour: python -m benchmarks hosts --rate 10mbit --delay 150 --loss 0.5 -- python THIS_FILE 3600
"""

import json
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1]))  # for the ranks, which run this file

import commands

from dltrain_ext import comm

MANNERS = ("it is alive, but has not made call", "it does not answer", "it has left", "all ranks answer")


def late_in_turn(rank, world_size, seconds, timeout):
    """Count what the errors say about ranks that are too late in turn. All of them are alive."""
    said = Counter()
    end, go_on, late = time.monotonic() + seconds, torch.ones(1), 0
    while go_on:
        communicator = comm.Communicator(timeout=timeout, ranks_per_host=1)
        for _ in range(4):
            communicator.all_reduce(torch.ones(10_000))
        if rank == late:
            time.sleep(1.5 * timeout.total_seconds())
        with pytest.raises(dist.DistBackendError) as raised:
            communicator.all_reduce(torch.ones(10_000))
        said[next(manner for manner in MANNERS if manner in str(raised.value))] += 1
        late = (late + 1) % world_size
        go_on = torch.tensor([float(time.monotonic() < end)])
        dist.broadcast(go_on, 0)
    return said


def main():
    """Run this on torchrun's ranks; rank 0 prints the counts of all ranks."""
    seconds, timeout = float(sys.argv[1]), timedelta(seconds=float(sys.argv[2]) if len(sys.argv) > 2 else 10)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    everyones = [Counter()] * world_size
    dist.all_gather_object(everyones, late_in_turn(rank, world_size, seconds, timeout))
    if rank == 0:
        print(json.dumps(sum(everyones, Counter())))
    dist.destroy_process_group()


@pytest.mark.xdist_group("machine")
@pytest.mark.needs("matplotlib", "rich")
@pytest.mark.parametrize(
    ("hosts", "delay", "arguments"),
    [
        (3, 40, (1, 8)),  # 8 s are enough on a machine under load
        pytest.param(4, 150, (600,), marks=pytest.mark.exhaustive),
    ],
)
def test_a_distant_rank_is_not_reported_as_dead(capfd, hosts, delay, arguments):
    commands.skip_without_hosts()
    link = ("--hosts", hosts, "--rate", "10mbit", "--delay", delay, "--loss", 0.5)
    assert commands.hosts(*link, "--", sys.executable, __file__, *arguments) == 0
    said = json.loads(capfd.readouterr().out)
    assert said == {MANNERS[0]: sum(said.values())} and sum(said.values()) % hosts == 0


if __name__ == "__main__":
    main()
