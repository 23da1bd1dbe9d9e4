"""Workers and servers that are killed or stopped: they are named, and the others go on where their mode allows it."""

import os
import re
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import FAR, SLACK, await_stop, ready, run_ranks

from dltrain_ext import optim, ps

SHORT = timedelta(seconds=2)


def kill(victim, how):
    return lambda processes: os.kill(processes[victim], how)


def make(servers, **options):
    params = [torch.nn.Parameter(torch.ones(1000)) for _ in range(3)]
    named = [(f"p{number}", p) for number, p in enumerate(params)]
    return params, ps.Optimizer(named, optim.SGD, servers=servers, lr=0.1, **options)


def step(params, optimizer):
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()


def goes_on_without(rank, world_size, how):
    """Ranks 0 to 2 work, and rank 0 serves; rank 2 is lost."""
    params, optimizer = make([0], quorum=1, staleness=1, timeout=FAR)
    step(params, optimizer)
    ready()
    if rank == 2:
        time.sleep(3600)
    for _ in range(20):  # with the bound it could not be so far ahead of a living worker
        step(params, optimizer)
    optimizer.store.pull({f"p{number}": p for number, p in enumerate(params)}, staleness=0).wait()
    assert optimizer.version > 20
    optimizer.close()
    return float(params[0][0])


def test_others_go_on_without_a_worker_that_is_killed():
    first, second, _ = run_ranks(3, goes_on_without, signal.SIGKILL, dying=(2,), when_ready=kill(2, signal.SIGKILL))
    assert first == second == pytest.approx(1 - 0.1 * (2 * 21 + 1), rel=1e-5)


def fails_by_name(rank, world_size, servers, victim, options):
    params, optimizer = make(servers, **options)
    step(params, optimizer)
    ready()
    if rank == victim:
        time.sleep(3600)
    with pytest.raises(dist.DistBackendError) as caught:
        for _ in range(1_000_000):
            step(params, optimizer)
    failed = time.monotonic()
    with pytest.raises(dist.DistBackendError):  # at once
        step(params, optimizer)
    assert time.monotonic() - failed < SLACK
    # One that has returned closes its store, which is another reason to fail.
    store, survivors = dist.group.WORLD.get_group_store(), {*range(world_size)} - {victim}
    store.set(f"{rank} has failed", "")
    store.wait([f"{each} has failed" for each in survivors])
    return str(caught.value)


def test_a_killed_worker_is_named_in_synchronous_mode():
    *texts, _ = run_ranks(3, fails_by_name, [0], 2, {"timeout": FAR}, dying=(2,), when_ready=kill(2, signal.SIGKILL))
    for text in texts:
        assert "the worker of rank 2 has left" in text, text


@pytest.mark.parametrize("options", [{}, {"quorum": 1, "staleness": None}])
def test_a_killed_server_is_named_with_what_is_lost(options):
    *texts, _ = run_ranks(
        3, fails_by_name, [0, 2], 2, {"timeout": FAR, **options}, dying=(2,), when_ready=kill(2, signal.SIGKILL)
    )
    for text in texts:
        assert re.search(r"the server of rank 2 is lost, and with it \d of \d blocks|rank 2 has left", text), text


@pytest.mark.parametrize(
    ("servers", "expected"),
    [
        ([0], r"not complete after 2 s: the server of rank 0 waits for pushes of rank 2"),
        ([2], "the server of rank 2 does not answer"),
    ],
)
def test_a_stopped_rank_is_named_in_time(servers, expected):
    began = time.monotonic()
    *texts, _ = run_ranks(
        3, fails_by_name, servers, 2, {"timeout": SHORT}, dying=(2,), when_ready=kill(2, signal.SIGSTOP)
    )
    for text in texts:
        assert re.search(expected, text), text
    assert time.monotonic() - began < 4 * SLACK


def pushes_more_than_is_sent_at_once(rank, world_size, presses):
    """Rank 1 serves, and stands still. Rank 0 pushes 80 MB, of which 64 MiB are sent before any is acknowledged."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    values = {"w": torch.ones(20_000_000)}
    store = ps.Store(servers=[1], timeout=FAR if presses else SHORT)
    store.init(values)
    shared = dist.group.WORLD.get_group_store()
    if rank == 1:
        shared.set("process", str(os.getpid()))
    dist.barrier()
    ready()
    if rank == 1:
        time.sleep(3600)
    await_stop(int(shared.get("process")))
    began = time.monotonic()
    if presses:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            store.push(values)
        with pytest.raises(dist.DistBackendError, match="the store is closed"):
            store.push(values)
    else:
        with pytest.raises(dist.DistBackendError, match=r"the server of rank 1 has taken no message for [\d.]+ s"):
            store.push(values)
    assert time.monotonic() - began < SLACK


@pytest.mark.parametrize("presses", [False, True], ids=["timeout", "Ctrl-C"])
def test_a_push_does_not_wait_for_ever_for_a_server_that_is_stopped(presses):
    run_ranks(2, pushes_more_than_is_sent_at_once, presses, dying=(1,), when_ready=kill(1, signal.SIGSTOP))
