"""A process may end right after a collective, also while its threads are still at work on it."""

import sys

import commands
import pytest

# Threads that run only when nothing else does are still at work on the collective when the main thread ends. torch's
# own all_reduce aborts about a fifth of these processes (pytorch#190489).
ENDS = """
import os
import torch
import torch.distributed as dist
from dltrain_ext import comm

def end(rank, store):
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    for last in (False, True):
        if last:
            for thread in map(int, os.listdir("/proc/self/task")):
                os.sched_setaffinity(thread, {min(os.sched_getaffinity(0))})
                if thread != os.getpid():
                    os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        comm.all_reduce(torch.ones(2, dtype=torch.float64))
        comm.all_reduce(torch.ones(2))

for number in range(10):
    pids = []
    for rank in range(2):
        if (pid := os.fork()) == 0:
            break
        pids.append(pid)
    if not pid:
        end(rank, f"store{number}")
        break
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert statuses == [0, 0], statuses
"""


@pytest.mark.exhaustive  # these threads starve beside other tests
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the priority is one of Linux")
def test_a_process_may_end_right_after_a_collective(tmp_path):
    done = commands.python("-c", ENDS, cwd=tmp_path, GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stderr
