"""Members of a job in one process, one of which runs at a time: a seed decides which, and time passes as it says.

They run the library's own outer optimizer and membership, over a store and averages that are simulated.
"""

import random
import threading
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from dltrain_ext import elastic, local_sgd
from dltrain_ext.elastic import membership, watch
from dltrain_ext.local_sgd import averaging, fragments

MOST_TURNS = 200_000  # of all members, in a schedule that does not hang
LONG = 3600.0  # s, likewise


class Killed(BaseException):
    """Ends the thread of a member that has been killed."""


class World:
    """Runs members, each in a thread that waits for its turn."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.now = 0.0
        self.values = {}  # of the store
        self.members = []
        self.averages = {}  # what has been given to each collective call
        self.epochs = {}  # the states that were seen, by epoch and outer step
        self._back = threading.Semaphore(0)
        self._own = threading.local()

    @property
    def own(self):
        return self._own.member

    def start(self, body):
        member = Member(len(self.members))

        def run():
            self._own.member = member
            member.turn.acquire()
            try:
                if not member.is_killed:
                    body(member)
            except Killed:
                pass
            except Exception as error:
                member.error = error
            member.is_over = True
            self._back.release()

        member.thread = threading.Thread(target=run, daemon=True)
        member.thread.start()
        self.members.append(member)
        return member

    def pause(self, seconds=0.0):
        """Is called by a member: others run, at least for that time."""
        own = self.own
        own.wakes = self.now + seconds
        self._back.release()
        own.turn.acquire()
        if own.is_killed:
            raise Killed

    def run(self, events):
        """Run until all members are over. ``events``: functions by the time at which they are called."""
        events = sorted(events, key=lambda event: event[0])
        for _ in range(MOST_TURNS):
            while events and events[0][0] <= self.now:
                events.pop(0)[1]()
            living = [member for member in self.members if not member.is_over]
            if not living and not events:
                return
            ready = [member for member in living if member.wakes <= self.now and member.stands_until <= self.now]
            if not ready:
                times = [max(member.wakes, member.stands_until) for member in living] + [time for time, _ in events[:1]]
                self._pass(min(times) - self.now)
                continue
            self._pass(self.draw.expovariate(1000.0))
            self.let(self.draw.choice(ready))
            assert self.now < LONG, f"a member hangs: {[vars(member) for member in living]}"
        raise AssertionError("the members take too many turns")

    def let(self, member):
        member.turn.release()
        self._back.acquire()

    def _pass(self, seconds):
        before, self.now = self.now, self.now + seconds
        for member in self.members:
            if member.number and not member.is_over and member.stands_until <= self.now:
                beats = int(self.now / watch.BEAT) - int(before / watch.BEAT)
                key = f"beats/{member.number}"
                self.values[key] = self.values.get(key, 0) + beats

    def kill(self, member):
        member.is_killed = True
        if not member.is_over:
            member.stands_until = 0.0
            self.let(member)
        assert member.is_over


class Member:
    def __init__(self, place):
        self.place, self.turn = place, threading.Semaphore(0)
        self.wakes = self.stands_until = 0.0
        self.is_over = self.is_killed = False
        self.number = 0  # whose heart beats
        self.error = None
        self.closed = set()  # the epochs whose connections it has closed


class Store:
    """Has what a membership calls of a torch.distributed.Store."""

    def __init__(self, world):
        self._world = world

    def clone(self):
        return self

    def _values(self):
        self._world.pause()
        return self._world.values

    def set(self, key, value):
        self._values()[key] = value.encode()

    def get(self, key):
        return self._values()[key]

    def check(self, keys):
        return all(key in self._values() for key in keys)

    def add(self, key, amount):
        values = self._values()
        values[key] = values.get(key, 0) + amount
        return values[key]

    def compare_set(self, key, expected, desired):
        values = self._values()
        if values.get(key, b"") == expected.encode():
            values[key] = desired.encode()
        return values[key]


class Link:
    """Has what an outer optimizer calls of its link."""

    def __init__(self, world, *_):
        self._world, self._members, self.lost, self.wire_bytes = world, None, None, 0

    @property
    def communicator(self):
        return self

    def connect(self, members):
        self.close()
        self._members, self._number, self.lost = members, 0, None
        self.gather(0)

    def close(self):
        if self._members is not None:
            self._world.own.closed.add(self._members.name)
            self._members = None

    def exchange(self, given):
        """Return what all members have given. Some may have it when others fail, as when a member dies meanwhile."""
        world, members = self._world, self._members
        call = world.averages.setdefault((members.name, self._number), {})
        self._number += 1
        call[members.rank] = given
        began = world.now
        while True:
            world.pause(0.01)
            by_number = {member.number: member for member in world.members if member.number in members.ranks}
            gone = [
                number
                for number in members.ranks
                if number not in by_number or by_number[number].is_over or members.name in by_number[number].closed
            ]
            if len(call) == len(members.ranks) and not (gone and world.draw.random() < 0.5):
                return [call[rank] for rank in members.ranks]
            if gone:
                dead = [number for number in gone if number not in by_number or by_number[number].is_over]
                self.lost = dead[0] if dead else None
                raise dist.DistBackendError(f"members {gone} are gone")
            late = [number for number in members.ranks if number not in call]
            if late and world.now - began > members.timeout.total_seconds():
                self.lost = late[0]
                raise dist.DistBackendError(f"members {late} are late")

    def gather(self, number):
        return self.exchange(number)

    def agree(self, number):
        return len(set(self.exchange(number))) == 1

    def give(self, tensor, source):
        tensor.copy_(self.exchange(tensor.clone())[source])


class _Done:
    def is_completed(self):
        return True

    def wait(self):
        return True


def _send(fragment, link, moved, message, agreement, waits):
    flat = torch.cat([each.detach().flatten() for each in moved])
    found = link.exchange((agreement, flat))
    if len({its for its, _ in found}) > 1:
        raise RuntimeError("members have two states")
    fragment.mean = torch.stack([values for _, values in found]).mean(0)
    return None if waits else _Done()


def _step(fragment, message, parameters, copies, *, mix, lr, momentum, nesterov):
    at = 0
    for kept, speed, parameter in zip(
        fragment.named(fragment.backup).values(), fragment.named(fragment.momentum).values(), parameters, strict=True
    ):
        moved = kept - fragment.mean[at : at + kept.numel()].view(kept.shape)
        at += kept.numel()
        speed.mul_(momentum).add_(moved)
        kept.sub_(lr * speed)
        parameter.copy_(kept.lerp(parameter, mix))
    return True


def simulated(world):
    """Return a context in which members of the world can be made."""
    patches = mock.patch.multiple(
        membership,
        time=SimpleNamespace(monotonic=lambda: world.now, sleep=lambda seconds: world.pause(5 * seconds)),
        Heart=lambda store, number, interval: _heart(world, number),
    )
    clock = mock.patch.object(watch, "time", SimpleNamespace(monotonic=lambda: world.now))
    link = mock.patch.object(averaging, "Link", lambda *given: Link(world, *given))
    sums = mock.patch.multiple(fragments.Fragment, send=_send, step=_step)
    prefix = mock.patch.object(dist, "PrefixStore", lambda prefix, store: store)
    return patches, clock, link, sums, prefix


def _heart(world, number):
    own = world.own
    own.number = number

    def stop():
        own.number = 0

    return SimpleNamespace(stop=stop)


def member_of(world, timeout, least):
    """Return a membership of this world."""
    found = elastic.Membership(dist.HashStore(), least=least, timeout=timeout)
    found._store = Store(world)
    return found


def site(world, seed, members, **settings):
    """Return the model of a site, its optimizer, and the outer one."""
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=data))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = local_sgd.DiLoCo(model, inner, group=members, codec="raw", error_feedback=False, **settings)
    return model, inner, outer, data
