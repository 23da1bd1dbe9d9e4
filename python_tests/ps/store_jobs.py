"""Workers and servers of a store, as real processes that can be killed and stopped."""

import hashlib
import time
from datetime import timedelta
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from jobs import SILENT, Job, Process
from ranks import processes
from torch import nn

from dltrain_ext import elastic, optim, ps
from dltrain_ext.elastic import membership

TIMEOUT = timedelta(seconds=60)


class State(NamedTuple):
    """What a worker has after a step, or a server at the beginning of an epoch, without version and digest."""

    number: int
    epoch: int
    members: tuple[int, ...]
    version: int = 0
    digest: str = ""


def join(port, least, made=elastic.Membership):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    return store, made(store, least=least, timeout=TIMEOUT)


class OfWorker(elastic.Membership):
    """A membership that waits for so many seconds when it has been left, or asked whether its members change."""

    pause = 0.0

    def leave(self):
        super().leave()
        time.sleep(self.pause)

    def is_over(self):
        is_over = super().is_over()
        time.sleep(self.pause)
        return is_over


def work(port, place, least, options, pause=0.0):
    """Train until told to stop. Report the state after each step, and return the last one."""
    store, members = join(port, least, OfWorker)
    members.pause = pause
    torch.manual_seed(place)
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 5))
    processes.report(None)
    with mock.patch.object(membership, "_SILENT", SILENT):
        optimizer = ps.Optimizer(model.named_parameters(), optim.AdamW, lr=1e-3, group=members, **options)
        state = None
        while not (store.check(["stop"]) or store.check([f"leave/{place}"])):
            optimizer.zero_grad()
            model(torch.randn(8, 40)).square().mean().backward()
            optimizer.step()
            digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
            state = State(members.number, members.epoch, members.members, optimizer.version, digest)
            processes.report(state)
            time.sleep(0.01)
        optimizer.close()
    return state


class OfServer(elastic.Membership):
    """A membership that reports each epoch when it has begun."""

    def keep(self):
        super().keep()
        processes.report(State(self.number, self.epoch, self.members))


def serve(port, place, least, options, pause=0.0):
    """Serve until all workers have ended. Report each epoch. Writing a checkpoint takes ``pause`` more seconds."""
    _, members = join(port, least, OfServer)
    processes.report(None)

    def save_slowly(*args):
        time.sleep(pause)
        save(*args)

    save = torch.save
    with mock.patch.object(membership, "_SILENT", SILENT), mock.patch.object(torch, "save", save_slowly):
        ps.serve(members, **options)


class StoreJob(Job):
    """Workers and servers. ``folder``: of the checkpoints; ``least``: how many found the job."""

    def __init__(self, stack, folder, least):
        super().__init__(stack)
        self.folder, self.least = folder, least

    def worker(self, *, pause=0.0, **options):
        return self._begin(work, options, pause)

    def server(self, *, pause=0.0, **options):
        usual = {"checkpoint": self.folder, "checkpoint_every": timedelta(milliseconds=200)}
        return self._begin(serve, usual | options, pause)

    def _begin(self, body, options, pause):
        return Process(self, partial(body, self.store.port, len(self.processes), self.least, options, pause))

    def steps_more(self, workers, count=20):
        """Wait until these workers have taken so many steps more."""
        had = [len(worker.states) for worker in workers]
        self.until(lambda: all(len(w.states) >= before + count for w, before in zip(workers, had, strict=True)))


def agree(workers):
    """Check that those in one epoch have the same parameters at the same version; return how often that was seen."""
    seen, twice = {}, 0
    for worker in workers:
        for state in worker.states:
            digest = seen.setdefault((state.epoch, state.version), state.digest)
            assert digest == state.digest, state
            twice += 1
    return twice - len(seen)
