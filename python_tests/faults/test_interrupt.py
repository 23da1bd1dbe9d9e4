"""Ctrl-C in Python's main thread while it waits for living peers that do not make the call."""

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import SLACK, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import comm, ddp

FAR = timedelta(minutes=30)
SOON = 0.3  # s; by then the wait has begun


def press(signum=signal.SIGINT, after=SOON, then=lambda: None):
    """Send a signal to this process while its main thread waits, and call ``then``; return a list of the time."""
    pressed = []

    def send():
        time.sleep(after)
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signum)
        then()

    threading.Thread(target=send).start()
    return pressed


def reduce(communicator):
    communicator.all_reduce(torch.ones(1000), algorithm="ring")


def wait(communicator):
    communicator.all_reduce(torch.ones(1000), algorithm="ring", async_op=True).wait()


def reduce_behind_another(communicator):
    communicator.all_reduce(torch.ones(10), async_op=True)
    communicator.all_reduce(torch.ones(10))


def reduce_natively(communicator):
    communicator.all_reduce(torch.ones(1000), algorithm="native")


def make(communicator):
    comm.Communicator(timeout=FAR)


def tune(communicator):
    communicator.tune(codecs=())


class Hooked:
    """Makes a model with the hook, which both ranks have to do."""

    def __init__(self):
        self.model = DistributedDataParallel(nn.Linear(10, 10))
        ddp.register(self.model, timeout=FAR)

    def __call__(self, communicator):
        self.model(torch.ones(1, 10)).sum().backward()


def interrupt(rank, world_size, wait):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    communicator, store = comm.Communicator(timeout=FAR), dist.group.WORLD.get_group_store()
    if wait is Hooked:
        wait = Hooked()
    if rank == 1:
        store.wait(["over"])
        return
    pressed = press()
    with pytest.raises(KeyboardInterrupt):
        wait(communicator)
    assert time.monotonic() - pressed[0] < SLACK
    store.set("over", "")


@pytest.mark.parametrize("wait", [reduce, wait, reduce_behind_another, reduce_natively, make, tune, Hooked])
def test_ctrl_c_interrupts_the_wait(wait):
    run_ranks(2, interrupt, wait, fresh=True)


def go_on(rank, world_size):
    heard = []
    signal.signal(signal.SIGINT, lambda *_: heard.append(None))
    communicator, store = comm.Communicator(timeout=FAR), dist.group.WORLD.get_group_store()
    tensor = torch.ones(10)
    if rank == 0:
        press(then=lambda: store.set("pressed", ""))
        communicator.all_reduce(tensor)
        assert heard
    else:
        store.wait(["pressed"])
        communicator.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((10,), 2.0))


def test_a_users_signal_handler_runs_after_the_call():
    run_ranks(2, go_on, fresh=True)
