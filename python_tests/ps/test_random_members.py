"""Random schedules of workers and servers of a store, which come, leave, are killed and stand still.

DLTRAIN_PS_SCHEDULES: how many (default: 4). DLTRAIN_PS_FIRST_SCHEDULE: the seed of the first one (default: 0).
"""

import contextlib
import itertools
import os
import random

import pytest
from store_jobs import StoreJob, agree

SCHEDULES = int(os.environ.get("DLTRAIN_PS_SCHEDULES", "4"))
FIRST = int(os.environ.get("DLTRAIN_PS_FIRST_SCHEDULE", "0"))
MOST_WORKERS, MOST_SERVERS = 4, 3
LONGEST_STOP = 8.0  # s
ASYNCHRONOUS = dict(quorum=1, staleness=None)


class Schedule:
    """Random events of a job. Nothing happens to the keeper, a worker, so that there is always a member of the job."""

    def __init__(self, job, draw):
        self._job, self._draw = job, draw
        self.is_synchronous = draw.random() < 0.7
        self._options = {} if self.is_synchronous else ASYNCHRONOUS
        self.shards = draw.choice([1, 2])
        count = draw.randint(2, 4)
        job.least = self.shards + count
        makers = [job.server] * self.shards + [self._worker] * count
        draw.shuffle(makers)  # the first of the members is a worker in some schedules
        living = [(make == job.server, make()) for make in makers]
        self.servers = [member for serves, member in living if serves]
        self.workers = [member for serves, member in living if not serves]
        self.keeper = draw.choice(self.workers)
        self.all_workers = [*self.workers]
        self.servers_lost = 0

    def _worker(self):
        return self._job.worker(**self._options)

    @property
    def living(self):
        return [*self.workers, *self.servers]

    def run(self):
        self._job.until(lambda: self.keeper.states)
        for _ in range(self._draw.randint(3, 6)):
            self._job.wait(self._draw.choice([0.0, self._draw.uniform(0.0, 1.5)]))
            events = [self._stop_server]
            if len(self.workers) > 1:
                events += [self._kill_worker, self._stop_worker, self._leave]
            if len(self.workers) < MOST_WORKERS:
                events.append(self._join)
            if len(self.servers) < MOST_SERVERS:
                events.append(self._join_server)
            if len(list(self._job.folder.glob("*.pt"))) == self.shards:
                events.append(self._replace_server)
            event = self._draw.choice(events)
            print(f"{self._job.seconds:.2f} s: {event.__name__[1:]}: {event()}", flush=True)
        print(f"{self._job.seconds:.2f} s: no more events", flush=True)
        self._job.until(lambda: not self._job.standing)
        self._job.steps_more(self.workers, 10)
        self._job.until(self._are_together)
        print(f"{self._job.seconds:.2f} s: together", flush=True)

    def _are_together(self):
        """Whether all living are in one epoch. In asynchronous mode some that are dead may be among its members."""
        states = [member.states[-1] if member.states else None for member in self.living]
        if None in states or len({state.epoch for state in states}) > 1:
            return False
        return {state.number for state in states} <= {*states[0].members}

    def _another_worker(self):
        return self._draw.choice([worker for worker in self.workers if worker is not self.keeper])

    def _kill_worker(self):
        worker = self._another_worker()
        worker.kill()
        self.workers.remove(worker)
        return worker.place

    def _leave(self):
        worker = self._another_worker()
        worker.leave()
        self.workers.remove(worker)
        return worker.place

    def _stop_worker(self):
        return self._stop(self._another_worker())

    def _join(self):
        self.workers.append(self._worker())
        self.all_workers.append(self.workers[-1])
        return self.workers[-1].place

    def _stop_server(self):
        self.servers_lost += 1  # it may be left out
        return self._stop(self._draw.choice(self.servers))

    def _join_server(self):
        self.servers.append(self._job.server())
        return self.servers[-1].place

    def _replace_server(self):
        self.servers_lost += 1
        server = self._draw.choice(self.servers)
        server.kill()
        self.servers.remove(server)
        self._job.wait(self._draw.choice([0.0, self._draw.uniform(0.0, 2.0)]))
        return f"{server.place} by {self._join_server()}"

    def _stop(self, member):
        seconds = self._draw.uniform(0.2, LONGEST_STOP)
        member.stand_still(seconds)
        return f"{member.place} for {seconds:.2f} s"


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SCHEDULES))
def test_a_store_goes_on(seed, tmp_path):
    with contextlib.ExitStack() as stack:
        job = StoreJob(stack, tmp_path, 0)
        schedule = Schedule(job, random.Random(seed))
        print(
            f"seed {seed}: {schedule.shards} shards, {len(schedule.workers)} workers, {schedule._options}", flush=True
        )
        schedule.run()
        job.stop()

        errors = [member.error for member in schedule.living if member.error]
        assert not errors, "\n".join(errors)
        if schedule.is_synchronous:
            agree(schedule.all_workers)
        for before, after in itertools.chain(*(itertools.pairwise(each.states) for each in schedule.all_workers)):
            assert before.epoch <= after.epoch
            # If no shard is left, all go on from their checkpoints.
            if schedule.servers_lost < schedule.shards:
                assert before.version <= after.version, (before, after)
