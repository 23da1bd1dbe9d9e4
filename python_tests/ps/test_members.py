"""Workers and servers that come and go while a store is at work: real processes, which are killed."""

import contextlib
import hashlib
import os
import signal
import time
from datetime import timedelta
from functools import partial
from typing import NamedTuple
from unittest import mock

import pytest
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
    """What a worker has after a step."""

    number: int
    epoch: int
    members: tuple[int, ...]
    version: int
    digest: str


def join(port, least):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    return store, elastic.Membership(store, least=least, timeout=TIMEOUT)


def work(port, place, least, options):
    """Train until told to stop. Report the state after each step, and return the last one."""
    store, members = join(port, least)
    torch.manual_seed(place)
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 5))
    processes.report(None)
    with mock.patch.object(membership, "_SILENT", SILENT):
        optimizer = ps.Optimizer(model.named_parameters(), optim.AdamW, lr=1e-3, group=members, **options)
        state = None
        while not store.check(["stop"]):
            optimizer.zero_grad()
            model(torch.randn(8, 40)).square().mean().backward()
            optimizer.step()
            digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
            state = State(members.number, members.epoch, members.members, optimizer.version, digest)
            processes.report(state)
            time.sleep(0.01)
        optimizer.close()
    return state


def serve(port, place, least, options):
    _, members = join(port, least)
    processes.report(None)
    with mock.patch.object(membership, "_SILENT", SILENT):
        ps.serve(members, **options)


class Member:
    """A process that works or serves."""

    def __init__(self, job, body, options):
        call = partial(body, job.store.port, len(job.members), job.least, options)
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

    def kill(self):
        os.kill(self._team.pids[0], signal.SIGKILL)

    def stacks(self):
        return f"{self.states[-1:]}\n{self._team.stacks()}"


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

    def until(self, condition):
        while not condition():
            for member in self.members:
                member.look()
            if not all(member.has_begun or member.is_over for member in self.members):
                self._began = time.monotonic()
            if time.monotonic() - self._began > HANGS:
                raise AssertionError("the job hangs:\n" + "\n".join(member.stacks() for member in self.members))
            time.sleep(0.005)

    def steps_more(self, workers, count=20):
        """Wait until these workers have taken so many steps more."""
        had = [len(worker.states) for worker in workers]
        self.until(lambda: all(len(w.states) >= before + count for w, before in zip(workers, had, strict=True)))

    def stop(self):
        self.store.set("stop", "")
        self.until(lambda: all(member.is_over for member in self.members))


@pytest.fixture
def make_job(tmp_path):
    with contextlib.ExitStack() as stack:
        yield partial(Job, stack, tmp_path)


def agree(workers):
    """Check that those in one epoch have the same parameters at the same version; return how often that was seen."""
    seen, twice = {}, 0
    for worker in workers:
        for state in worker.states:
            digest = seen.setdefault((state.epoch, state.version), state.digest)
            assert digest == state.digest, state
            twice += 1
    return twice - len(seen)


def test_workers_that_are_killed_and_join(make_job):
    job = make_job(5)
    servers = [job.server(), job.server()]
    workers = [job.worker() for _ in range(3)]
    job.steps_more(workers)
    workers[0].kill()
    job.steps_more(workers[1:])
    epoch = workers[1].states[-1].epoch
    joined = job.worker()
    job.steps_more([*workers[1:], joined])
    assert joined.states[-1].epoch > epoch == workers[1].states[0].epoch
    assert joined.states[0].version >= workers[1].states[0].version + 20
    job.stop()
    assert [member.error for member in [*servers, *workers[1:], joined]] == [""] * 5
    assert agree([*workers, joined]) > 40


def test_a_server_that_is_lost_comes_back_from_its_checkpoint(make_job):
    job = make_job(4)
    servers = [job.server(), job.server()]
    workers = [job.worker(), job.worker()]
    job.until(lambda: len(list(job.folder.glob("*.pt"))) == 2)
    job.steps_more(workers)
    servers[1].kill()
    version = max(worker.states[-1].version for worker in workers)
    job.until(lambda: servers[1].is_over)
    back = job.server()
    epochs = [worker.states[-1].epoch for worker in workers]
    job.until(lambda: all(w.states[-1].epoch > epoch for w, epoch in zip(workers, epochs, strict=True)))
    job.steps_more(workers)
    assert all(worker.states[-1].version > version for worker in workers)
    job.stop()
    assert [member.error for member in [servers[0], back, *workers]] == ["", "", "", ""]
    agree(workers)


def test_a_server_without_a_checkpoint_takes_no_place(make_job, tmp_path):
    job = make_job(3)
    servers = [job.server(), job.server()]
    worker = job.worker()
    job.until(lambda: len(list(job.folder.glob("*.pt"))) == 2)
    job.steps_more([worker])
    servers[0].kill()
    empty = job.server(checkpoint=tmp_path / "empty")
    job.until(lambda: empty.is_over)
    assert "there is no checkpoint of shard 0 of 2" in empty.error
    other = job.server()
    job.steps_more([worker])
    job.stop()
    assert [member.error for member in [servers[1], other, worker]] == ["", "", ""]


def test_a_spare_server_takes_the_place_of_a_lost_one(make_job):
    job = make_job(3)
    servers = [job.server(), job.server()]
    worker = job.worker()
    job.steps_more([worker])
    spare = job.server()
    job.until(lambda: len(worker.states[-1].members) == 4)
    job.until(lambda: len(list(job.folder.glob("*.pt"))) == 2)
    servers[1].kill()
    job.until(lambda: len(worker.states[-1].members) == 3)
    job.steps_more([worker])
    job.stop()
    assert [member.error for member in [servers[0], spare, worker]] == ["", "", ""]


def test_servers_wait_when_all_workers_are_lost(make_job):
    job = make_job(2)
    server, worker = job.server(), job.worker()
    job.steps_more([worker])
    worker.kill()
    job.until(lambda: worker.is_over)
    joined = job.worker()
    job.steps_more([joined])
    assert joined.states[0].version > worker.states[-1].version
    job.stop()
    assert (server.error, joined.error) == ("", "")


def test_a_job_goes_on_from_the_checkpoints_of_all_servers(make_job):
    job = make_job(3)
    job.server(), job.server()
    worker = job.worker()
    job.steps_more([worker])
    job.stop()
    again = make_job(3)
    servers = [again.server(), again.server()]
    other = again.worker()
    again.steps_more([other])
    again.stop()
    assert other.states[0].version == worker.states[-1].version + 1
    assert [server.error for server in servers] == ["", ""]


@pytest.mark.parametrize(
    "options",
    [
        dict(quorum=1, staleness=None),
        dict(quorum=1, staleness=2, codec="int8"),
        dict(quorum=2, staleness=None, grace=timedelta(milliseconds=5)),
        dict(codec="int8", pull_codec="fp16"),
    ],
    ids=["asynchronous", "bounded staleness", "quorum", "codecs"],
)
def test_modes(make_job, options):
    job = make_job(4)
    servers = [job.server(), job.server()]
    workers = [job.worker(**options) for _ in range(2)]
    job.steps_more(workers)
    joined = job.worker(**options)
    job.steps_more([*workers, joined])
    workers[0].kill()
    job.steps_more([workers[1], joined])
    job.stop()
    assert [member.error for member in [*servers, workers[1], joined]] == ["", "", "", ""]


def test_a_worker_with_other_settings_does_not_join(make_job):
    job = make_job(2)
    server, worker = job.server(), job.worker()
    job.steps_more([worker])
    other = job.worker(quorum=1)
    job.until(lambda: other.is_over)
    assert "values and options of the store: expected the same" in other.error
    job.steps_more([worker])
    job.stop()
    assert (server.error, worker.error) == ("", "")


def test_a_checkpoint_of_another_store_is_refused(make_job):
    job = make_job(2)
    job.server(), job.worker()
    job.until(lambda: list(job.folder.glob("*.pt")))
    job.stop()
    (path,) = job.folder.glob("*.pt")
    torch.save(torch.load(path) | {"optimizer": "SGD"}, path)
    again = make_job(2)
    server, worker = again.server(), again.worker()
    again.until(lambda: server.is_over)
    assert "whose optimizer is another one" in server.error
    other = again.server(checkpoint=None)
    again.steps_more([worker])
    again.stop()
    assert (other.error, worker.error) == ("", "")


@pytest.fixture
def alone():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return elastic.Membership(store)


def test_what_a_membership_excludes(alone):
    named = nn.Linear(2, 2).named_parameters()
    with pytest.raises(ValueError, match="servers: expected None with a membership, whose servers call serve, got "):
        ps.Store(alone, servers=[0])
    with pytest.raises(ValueError, match="record: expected False with a membership, got True"):
        ps.Store(alone, record=True)
    with pytest.raises(ValueError, match="ranks_per_host: expected 1 with a membership, got 2"):
        ps.Optimizer(named, group=alone, ranks_per_host=2)
    with pytest.raises(ValueError, match="store: expected one of a process group, got one of a membership"):
        ps.Store(alone).with_options(quorum=1)
    with pytest.raises(RuntimeError, match="store: expected one with keys, call init first"):
        ps.Store(alone).renew()


def test_arguments_of_serve(alone, tmp_path):
    with pytest.raises(TypeError, match="checkpoint: expected a path or None, got 3"):
        ps.serve(alone, checkpoint=3)
    with pytest.raises(ValueError, match="checkpoint: expected None without a membership, got "):
        ps.serve(checkpoint=tmp_path)
    with pytest.raises(ValueError, match="checkpoint_every: expected a datetime.timedelta of 1 ms to 365 days, got 1"):
        ps.serve(alone, checkpoint_every=1)
    with pytest.raises(ValueError, match="timeout: expected a datetime.timedelta of 1 ms to 365 days, or None, got 1"):
        ps.serve(alone, timeout=1)
