"""What every rank of the case membership runs: members of a job are killed, and others join.

A rank starts some of the members, which are processes of their own, and all ranks learn what the members report. Over
loopback there is one rank, which starts all of them.
"""

import contextlib
import os
import queue
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise, product
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from benchmarks.harness import Progress
from benchmarks.machine import processes
from benchmarks.membership_processes import CODEC, LOOPBACK, PATIENCE, Settings, Step, serve, train, work

T = TypeVar("T")
DILOCO, STORE = "diloco", "store"
PARTS = [DILOCO, STORE]
SERVERS = 2
SETTLED = 3  # steps before a change


class Wrong(Exception):
    """What is wrong with the members."""


class Job(NamedTuple):
    part: str
    members: int  # that train
    width: int
    times: int

    @property
    def servers(self) -> range:
        """Their places, which follow those of the members that train."""
        return range(self.members, self.members + (SERVERS if self.part == STORE else 0))


@dataclass
class Change:
    """What happens to a job several times, with a number of each time.

    Attributes:
        seconds: how long it takes.
        gaps: seconds of the longest time between two steps of another member meanwhile.
        usual: seconds between two steps before it.
        lost: the most inner steps of a site, or versions of a shard, that were lost.
    """

    what: str
    side: str
    seconds: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    usual: list[float] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def enter(self, since: float, until: float, steps: dict[int, list[Step]]) -> None:
        """Enter one time, with the steps of each other member. Raises Wrong if the members differ."""
        check(steps)
        gaps = [
            later.ended - earlier.ended
            for each in steps.values()
            for earlier, later in pairwise(each)
            if later.ended > since and earlier.ended < until
        ]
        self.seconds.append(until - since)
        self.gaps.append(max(gaps))
        self.lost.append(max(sum(step.lost for step in each[1:]) for each in steps.values()))


def check(steps: dict[int, list[Step]]) -> None:
    """Raise Wrong if two members differ at one version of one epoch."""
    seen: dict[tuple[int, int], str] = {}
    for place, each in steps.items():
        for step in each:
            if seen.setdefault(step.state, step.digest) != step.digest:
                raise Wrong(f"member {place} has other parameters than others at version {step.version}")


def check_newcomer(first: Step, steps: dict[int, list[Step]]) -> None:
    """Raise Wrong if no other member has had what one has begun with."""
    if not any((first.state, first.digest) == (step.state, step.digest) for each in steps.values() for step in each):
        raise Wrong(f"no other member has had what a newcomer has at version {first.version}")


def measure(rank: int, ranks: int, progress: Progress, jobs: list[Job]) -> Iterator[Change]:
    """Yield what is found, the same on all ranks."""
    for index, job in enumerate(jobs):
        with contextlib.ExitStack() as stack:
            members = Members(rank, ranks, job, stack)
            changes = members.changes()
            change, _ = changes[0]
            try:
                members.begin()
                for turn, (place, (change, make)) in product(range(job.times), enumerate(changes)):
                    done = (turn + place / len(changes)) / job.times
                    progress(f"{change.what}, {turn + 1} of {job.times}", (index + done) / len(jobs))
                    make(change)
            except Wrong as wrong:
                change.wrong.extend(wrong.args)
        yield from (change for change, _ in changes)


class Member:
    """A process of the job, and what it reports. Raises Wrong if it is stuck or has ended."""

    def __init__(self, call: Callable[[], None]):
        self._stack = contextlib.ExitStack()
        self._team = self._stack.enter_context(processes.calling([call], fresh=True))
        self._events: queue.SimpleQueue[processes.Event] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        self._last: list[Step] = []

    def _listen(self) -> None:
        """Take all that it reports at once, so that it never waits for this process."""
        while self._team.busy:
            if event := self._team.next(1.0):
                self._events.put(event)

    def next(self) -> Step | None:
        """Return what it reports next: None when it is ready to begin, and then steps."""
        try:
            event = self._events.get(timeout=PATIENCE)
        except queue.Empty:
            raise Wrong(f"it has reported nothing for {PATIENCE:.0f} s") from None
        if event.kind != "reported":
            raise Wrong(f"it has {event.kind}: {str(event.value).strip().splitlines()[-1]}")
        reported: Step | None = event.value
        return reported

    def read(self, is_wanted: Callable[[Step], bool]) -> list[Step]:
        """Return the steps until one that is wanted, and before them the last one that was returned before."""
        steps, until = self._last, time.monotonic() + PATIENCE
        while step := self.next():
            steps = [*steps, step]
            self._last = [step]
            if is_wanted(step):
                break
            if time.monotonic() > until:
                raise Wrong(f"it has not come so far within {PATIENCE:.0f} s")
        return steps

    def kill(self) -> float:
        """Kill it by SIGKILL, and return when."""
        at = time.monotonic()
        if self._team.busy:
            os.kill(self._team.pids[0], signal.SIGKILL)
        return at

    def last(self) -> Step:
        """Return the last step of a process that was killed."""
        with contextlib.suppress(Wrong):
            self.read(lambda step: False)
        return self._last[0]

    def end(self) -> None:
        self.kill()
        self._thread.join()
        self._stack.close()


class Members:
    """The members of a job, of which each rank starts some."""

    def __init__(self, rank: int, ranks: int, job: Job, stack: contextlib.ExitStack):
        self.rank, self.ranks, self.job = rank, ranks, job
        self.own: dict[int, Member] = {}  # by place
        self.killed = 0  # the place of the last one that trained, and was killed
        self._draw, self._keys = random.Random(0), count()
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        host = os.environ.get("MASTER_ADDR", LOOPBACK)
        where = (host, 0, folder)
        if rank == 0:
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            where = (host, self._store.port, folder)
        self.host, self.port, self.folder = self._gather(where)[0]
        if rank != 0:
            self._store = dist.TCPStore(self.host, self.port, is_master=False)
        stack.callback(self._gather, None)  # rank 0 has the store and the folder
        self._stack = stack

    def changes(self) -> list[tuple[Change, Callable[[Change], None]]]:
        """Return what is to happen, in turns, and how."""
        if self.job.part == DILOCO:
            side = f"DiLoCo, {CODEC}"
            return [(Change("member killed", side), self.kill), (Change("member joins", side), self.join)]
        side = f"store, {len(self.job.servers)} servers"
        changes = [(Change("worker killed", side), self.kill), (Change("worker joins", side), self.join)]
        return [*changes, (Change("server killed", side), self.kill_server)]

    def begin(self) -> None:
        key = self._start(range(self.job.members + len(self.job.servers)))
        self._store.set(key, "")
        self._follow(lambda step: True)

    def kill(self, change: Change) -> None:
        """Kill one that trains at a random moment, until all others have taken a step without it."""
        self.killed, moment = self._draw.randrange(self.job.members), self._draw.random()
        usual = self._usual(change)

        def kill() -> tuple[float, Step]:
            time.sleep(moment * usual)
            return self.own[self.killed].kill(), self.own[self.killed].last()

        killed, last = self._on(self.killed, kill)

        def is_without(step: Step) -> bool:
            # It may have pushed its part of the version after its last one.
            return step.epoch > last.epoch or (self.job.part == STORE and step.version > last.version + 1)

        steps = self._follow(is_without, without=self.killed)
        change.enter(killed, max(each[-1].ended for each in steps.values()), steps)

    def join(self, change: Change) -> None:
        """Let another one join in the place of the one that was killed."""
        key = self._start([self.killed])
        self._usual(change, without=self.killed)

        def begin() -> Step:
            self._store.set(key, "")
            return self.own[self.killed].read(lambda step: True)[-1]

        first = self._on(self.killed, begin)
        steps = self._follow(lambda step: step.ended >= first.ended and step.state >= first.state, without=self.killed)
        check_newcomer(first, steps)
        change.enter(first.began, first.ended, steps)

    def kill_server(self, change: Change) -> None:
        """Kill a server at a random moment, and have another one serve at once, which was started before."""
        place, moment = self._draw.choice(self.job.servers), self._draw.random()
        served = self.own.get(place)
        key = self._start([place])
        usual = self._usual(change)
        epoch = max(each[-1].epoch for each in self._follow(lambda step: True).values())

        def kill() -> float:
            assert served
            time.sleep(moment * usual)
            killed = served.kill()
            self._store.set(key, "")
            return killed

        killed = self._on(place, kill)
        steps = self._follow(lambda step: step.epoch > epoch)
        change.enter(killed, max(each[-1].ended for each in steps.values()), steps)

    def _start(self, places: Iterable[int]) -> str:
        """Start processes in these places, and wait until they are ready. Return the key with which they begin."""
        key = f"begin/{next(self._keys)}"
        founders = self.job.members + len(self.job.servers)
        new = {}
        for place in filter(self._is_own, places):
            body = serve if place in self.job.servers else {DILOCO: train, STORE: work}[self.job.part]
            settings = Settings(self.host, self.port, key, place, founders, self.job.width, self.folder)
            new[place] = Member(partial(body, settings))
            self._stack.callback(new[place].end)
        self.own |= new
        self._everywhere(lambda: {place: member.next() for place, member in new.items()})
        return key

    def _usual(self, change: Change, without: int | None = None) -> float:
        """Enter the time between two steps, and return it."""
        now = time.monotonic()
        _, *taken = [self._follow(lambda step: step.ended > now, without) for _ in range(SETTLED)]
        change.usual.append(
            statistics.median(later.ended - earlier.ended for steps in taken for earlier, later in steps.values())
        )
        return change.usual[-1]

    def _follow(self, is_wanted: Callable[[Step], bool], without: int | None = None) -> dict[int, list[Step]]:
        """Return the steps of all that train, by place, until one that is wanted."""
        training = {place: member for place, member in self.own.items() if place < self.job.members}
        return self._everywhere(
            lambda: {place: member.read(is_wanted) for place, member in training.items() if place != without}
        )

    def _is_own(self, place: int) -> bool:
        return place % self.job.members % self.ranks == self.rank

    def _on(self, place: int, call: Callable[[], T]) -> T:
        """Return what the call returns on the rank that has this place."""
        return self._everywhere(lambda: {place: call()} if self._is_own(place) else {})[place]

    def _everywhere(self, call: Callable[[], dict[int, T]]) -> dict[int, T]:
        """Return what the call returns on all ranks. Raises Wrong on all of them."""
        found: tuple[dict[int, T], str] = {}, ""
        try:
            found = call(), ""
        except Wrong as wrong:
            found = {}, f"rank {self.rank}: {wrong}"
        every = self._gather(found)
        if texts := [text for _, text in every if text]:
            raise Wrong(*texts)
        return {place: value for values, _ in every for place, value in values.items()}

    def _gather(self, value: T) -> list[T]:
        every = [value] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(every, value)
        return every
