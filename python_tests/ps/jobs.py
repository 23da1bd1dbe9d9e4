"""Workers and servers of a store, as real processes that can be killed and stopped."""

import contextlib
import hashlib
import os
import signal
import time
from datetime import timedelta
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from ranks import processes
from torch import nn

from dltrain_ext import elastic, optim, ps
from dltrain_ext.elastic import membership

HANGS = 120.0  # s after which a job is taken to hang, since all processes have begun
SILENT = 6.0  # s after which members are taken for dead, unlike the library's, so that the tests are short
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


def work(port, place, least, options):
    """Train until told to stop. Report the state after each step, and return the last one."""
    store, members = join(port, least)
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


def serve(port, place, least, options):
    """Serve until all workers have ended. Report each epoch."""
    _, members = join(port, least, OfServer)
    processes.report(None)
    with mock.patch.object(membership, "_SILENT", SILENT):
        ps.serve(members, **options)


class Member:
    """A process that works or serves."""

    def __init__(self, job, body, options):
        self.job, self.place = job, len(job.members)
        call = partial(body, job.store.port, self.place, job.least, options)
        self._team = job.stack.enter_context(processes.calling([call], fresh=True))
        self.states, self.error, self.has_begun = [], "", False
        job.members.append(self)

    @property
    def is_over(self):
        return not self._team.busy

    def look(self):
        while self._team.busy and (event := self._team.next(0)):
            if event.kind == "raised":
                self.error = event.value
            elif event.kind == "reported" and self.has_begun:
                self.states.append(event.value)
            self.has_begun = True

    def send(self, signum):
        if not self.is_over:
            with contextlib.suppress(ProcessLookupError):  # it may have ended since the last look
                os.kill(self._team.pids[0], signum)

    def kill(self):
        self.send(signal.SIGKILL)

    def leave(self):
        """Tell a worker to leave the job."""
        self.job.store.set(f"leave/{self.place}", "")

    def stacks(self):
        self.send(signal.SIGCONT)
        return f"member of place {self.place}: {self.states[-1:]}\n{self.error}{self._team.stacks()}"


class Job:
    """The members, and the store in which they find each other."""

    def __init__(self, stack, folder, least):
        self.stack, self.folder, self.least, self.members = stack, folder, least, []
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._began = time.monotonic()

    def worker(self, **options):
        return Member(self, work, options)

    def server(self, **options):
        options = {"checkpoint": self.folder, "checkpoint_every": timedelta(milliseconds=200), **options}
        return Member(self, serve, options)

    @property
    def seconds(self):
        return time.monotonic() - self._began

    def until(self, condition):
        """Wait for it. What hangs is noticed by the time since all have begun."""
        while not condition():
            for member in self.members:
                member.look()
            if not all(member.has_begun or member.is_over for member in self.members):
                self._began = time.monotonic()
            if self.seconds > HANGS:
                raise AssertionError("the job hangs:\n" + "\n".join(member.stacks() for member in self.members))
            time.sleep(0.005)

    def steps_more(self, workers, count=20):
        """Wait until these workers have taken so many steps more."""
        had = [len(worker.states) for worker in workers]
        self.until(lambda: all(len(w.states) >= before + count for w, before in zip(workers, had, strict=True)))

    def stop(self):
        self.store.set("stop", "")
        self.until(lambda: all(member.is_over for member in self.members))


def agree(workers):
    """Check that those in one epoch have the same parameters at the same version; return how often that was seen."""
    seen, twice = {}, 0
    for worker in workers:
        for state in worker.states:
            digest = seen.setdefault((state.epoch, state.version), state.digest)
            assert digest == state.digest, state
            twice += 1
    return twice - len(seen)
