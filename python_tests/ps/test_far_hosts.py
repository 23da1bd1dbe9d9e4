"""A store on emulated hosts, one of which is cut off, stopped and killed: the others go on, each push counts once."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import cluster, wait_for
from ranks import FAR

from dltrain_ext import optim, ps

HOSTS, SERVER, VICTIM, PUSH = 4, 0, 3, 0


def work(folder, staleness):
    """Each push adds 1 to a parameter, so that it is its own version. The server's rank works, too."""
    dist.init_process_group("gloo", timeout=FAR)
    rank = dist.get_rank()
    parameter = torch.nn.Parameter(torch.zeros(5000))
    optimizer = ps.Optimizer(
        [("p", parameter)], optim.SGD, lr=1.0, servers=[SERVER], quorum=1, staleness=staleness, timeout=FAR, record=True
    )
    steps = 0
    while not Path(folder, "stop").exists():
        parameter.grad = torch.full_like(parameter, -1.0)
        optimizer.step()
        steps += 1
        assert torch.equal(parameter, torch.full_like(parameter, float(optimizer.version)))
        Path(folder, f"steps {rank}.part").write_text(str(steps))
        os.replace(Path(folder, f"steps {rank}.part"), Path(folder, f"steps {rank}"))
    optimizer.close()
    if rank == SERVER:
        Path(folder, "handled").write_text(json.dumps(optimizer.record().handled[rank]))
    dist.destroy_process_group()


def steps_of(folder, ranks):
    return {rank: int(Path(folder, f"steps {rank}").read_text()) for rank in ranks}


def wait_for_steps(folder, ranks, more=10):
    before, until = steps_of(folder, ranks), time.monotonic() + FAR.total_seconds()
    while any(now < before[rank] + more for rank, now in steps_of(folder, ranks).items()):
        assert time.monotonic() < until, f"{before}, and now {steps_of(folder, ranks)}"
        time.sleep(0.01)


@pytest.mark.needs("rich")
@pytest.mark.xdist_group("machine")
@pytest.mark.parametrize("staleness", [None, 2])
def test_a_host_that_is_cut_off_and_stopped_and_killed(tmp_path, staleness):
    everyone, survivors = range(HOSTS), [rank for rank in range(HOSTS) if rank != VICTIM]
    with cluster(HOSTS, f"import test_far_hosts as test; test.work({str(tmp_path)!r}, {staleness})") as hosts:
        wait_for(*(tmp_path / f"steps {rank}" for rank in everyone))
        hosts.set_link(VICTIM, "down")
        time.sleep(0.5) if staleness is not None else wait_for_steps(tmp_path, survivors)
        hosts.set_link(VICTIM, "up")
        wait_for_steps(tmp_path, everyone)
        hosts.ranks[VICTIM].send_signal(signal.SIGSTOP)
        time.sleep(0.5) if staleness is not None else wait_for_steps(tmp_path, survivors)
        hosts.ranks[VICTIM].send_signal(signal.SIGCONT)
        wait_for_steps(tmp_path, everyone)
        hosts.ranks[VICTIM].kill()
        wait_for_steps(tmp_path, survivors)
        Path(tmp_path, "stop").touch()
        assert [hosts.ranks[rank].wait(120) for rank in survivors] == [0] * len(survivors)
    pushed = {rank: [] for rank in everyone}
    for what, worker, clock, _ in json.loads(Path(tmp_path, "handled").read_text()):
        if what == PUSH:
            pushed[worker].append(clock)
    for rank, steps in steps_of(tmp_path, everyone).items():
        may_miss_one = rank == VICTIM  # it may have been killed in a step
        assert pushed[rank] in ([*range(steps)], [*range(steps + may_miss_one)])
