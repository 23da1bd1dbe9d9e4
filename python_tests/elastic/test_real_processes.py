"""Random schedules of processes that join a job, leave it, are killed and stand still.

DLTRAIN_ELASTIC_SCHEDULES: how many (default: 6).
"""

import contextlib
import hashlib
import os
import random
import re
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch.distributed as dist
from jobs import SILENT, Job, Process
from ranks import processes

from dltrain_ext import elastic, local_sgd, optim
from dltrain_ext.elastic import membership

sys.path.append(str(Path(__file__).parents[1] / "local_sgd"))
from local_training import network, train

SCHEDULES = int(os.environ.get("DLTRAIN_ELASTIC_SCHEDULES", "6"))
MOST = 4  # sites at a time
TIMEOUT = timedelta(seconds=20)
SETTINGS = [
    dict(sync_every=2, fragments=1, delay=0),
    dict(sync_every=3, fragments=1, delay=1),
    dict(sync_every=2, fragments=2, delay=0),
    dict(sync_every=4, fragments=2, delay=1),
]


class State(NamedTuple):
    """What a member has after an outer step."""

    number: int
    epoch: int
    steps: int
    digest: str


def state_of(outer, members):
    """Unlike a checkpoint it does not finish an average that is under way."""
    digest = hashlib.sha256()
    for fragment in outer._exchange.fragments:
        digest.update(fragment.backup.numpy().tobytes())
        digest.update(fragment.momentum.numpy().tobytes())
    return State(members.number, members.epoch, outer.outer_steps, digest.hexdigest())


def train_site(port, place, settings, silent):
    """Train until told to leave, or to stop as all others do. Report all states, and return the last one."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    members = elastic.Membership(store, least=2, timeout=TIMEOUT)
    model = network(seed=place)
    inner = optim.AdamW(model.parameters(), lr=1e-3)
    outer = local_sgd.DiLoCo(model, inner, group=members, **settings)
    last = None

    def look(*_):
        nonlocal last
        if last is None or (members.epoch, outer.outer_steps) != (last.epoch, last.steps):
            last = state_of(outer, members)
            processes.report(last)

    def is_over():
        if not store.check(["stop"]):
            return store.check([f"leave/{place}"])
        # No member is ahead of another by as much as these steps.
        return outer.outer_steps >= int(store.compare_set("last", "", str(outer.outer_steps + 5)))

    inner.register_step_pre_hook(look)  # after the one in which it joins
    processes.report(None)
    step = 0
    with mock.patch.object(membership, "_SILENT", silent):
        while step == 0 or not is_over():
            train(model, inner, place, range(step, step + 1))
            step += 1
            time.sleep(0.01)
        look()
        outer.close()
    return last


class Site(Process):
    """A process that trains."""

    def __init__(self, job, silent=SILENT):
        super().__init__(job, partial(train_site, job.store.port, len(job.processes), job.settings, silent))


class SitesJob(Job):
    def __init__(self, stack, settings):
        super().__init__(stack)
        self.settings = settings


@pytest.fixture
def make_job():
    with contextlib.ExitStack() as stack:
        yield partial(SitesJob, stack)


class Schedule:
    """Random events of a job. Nothing happens to the keeper, so that there is always a member that has the state."""

    def __init__(self, job, draw):
        self._job, self._draw = job, draw
        self.living = [Site(job) for _ in range(draw.choice([2, 3]))]
        self.keeper = draw.choice(self.living)

    def run(self):
        self._job.until(lambda: self.keeper.states)
        for _ in range(self._draw.randint(3, 6)):
            self._job.wait(self._draw.choice([0.0, self._draw.uniform(0.0, 1.0)]))
            others = [site for site in self.living if site is not self.keeper]
            events = [self._kill, self._stand_still, self._leave] if others else []
            if len(self.living) < MOST:
                events.append(self._join)
            event = self._draw.choice(events)
            print(f"{self._job.seconds:.2f} s: {event.__name__[1:]}, site", event(others).place)
        print(f"{self._job.seconds:.2f} s: no more events")
        self._job.wait(3.0 if self._job.standing else 0.0)
        taken = max(site.states[-1].steps for site in self._job.processes if site.states)
        self._job.until(lambda: self._are_together(taken))
        print(f"{self._job.seconds:.2f} s: together")

    def _are_together(self, taken):
        """Whether the living have taken more outer steps together since the events."""
        states = [site.states[-1] if site.states else None for site in self.living]
        others = [site for site in self._job.processes if site not in self.living]
        return (
            all(site.is_over for site in others)
            and all(state is not None and state.steps > taken for state in states)
            and len({state.epoch for state in states}) == 1
        )

    def _kill(self, others):
        site = self._draw.choice(others)
        site.kill()
        self.living.remove(site)
        return site

    def _stand_still(self, others):
        site = self._draw.choice(others)
        site.stand_still(self._draw.uniform(0.2, 3.0))
        return site

    def _join(self, others):
        self.living.append(site := Site(self._job))
        return site

    def _leave(self, others):
        site = self._draw.choice(others)
        site.leave()
        self.living.remove(site)
        return site


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_members_have_one_state(seed, make_job):
    draw = random.Random(seed)
    job = make_job(draw.choice(SETTINGS) | {"codec": draw.choice(["int4", "raw"])})
    schedule = Schedule(job, draw)
    schedule.run()
    job.stop()

    assert not any(site.error for site in job.processes), "\n".join(site.error for site in job.processes)
    finals = [site.final for site in schedule.living]
    assert None not in finals and len({(final.steps, final.digest) for final in finals}) == 1, finals

    seen = {}
    for state in (state for site in job.processes for state in site.states):
        assert seen.setdefault((state.epoch, state.steps), state.digest) == state.digest, state

    kept = {state.steps: state.digest for state in schedule.keeper.states}
    first = {state.number: state for site in job.processes for state in reversed(site.states)}
    for state in first.values():
        if state.steps >= min(kept):  # else it is of one that founded the job before the keeper joined
            assert kept[state.steps] == state.digest, state


def test_a_newcomer_does_not_go_on_without_the_state(make_job):
    job = make_job(SETTINGS[0])
    founders = Site(job), Site(job)
    job.until(lambda: all(site.states for site in founders))
    for site in founders:
        site.send(signal.SIGSTOP)
    newcomer = Site(job, silent=3.0)
    job.until(lambda: newcomer.has_begun)
    for site in founders:
        site.send(signal.SIGKILL)
    job.until(lambda: newcomer.is_over)
    assert re.search("DistBackendError: .* has lost all members that had its state", newcomer.error), newcomer.error


def test_a_job_ends_when_all_leave(make_job):
    job = make_job(SETTINGS[0])
    founders = Site(job), Site(job)
    job.until(lambda: all(site.states for site in founders))
    job.stop()
    assert founders[0].final.digest == founders[1].final.digest
    newcomer = Site(job)
    job.until(lambda: newcomer.is_over)
    assert re.search("DistBackendError: .* has ended", newcomer.error), newcomer.error
