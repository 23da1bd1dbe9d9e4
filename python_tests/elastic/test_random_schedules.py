"""Random schedules of members that join, leave, are killed and stand still, in simulated time."""

import contextlib
import hashlib
import json
import random
import re
from datetime import timedelta

import pytest
import torch
from simulated import World, member_of, simulated, site

SCHEDULES = 200
OUTER_STEPS = 12
TIMEOUT = timedelta(seconds=30)


def digest_of(outer):
    flats = [flat for each in outer._exchange.fragments for flat in (each.backup, each.momentum)]
    kept = b"".join(flat.numpy().tobytes() for flat in flats)
    return hashlib.sha256(kept).hexdigest()


class Schedule:
    """What happens in a world, and what is seen of it."""

    def __init__(self, seed):
        self.world = World(seed)
        draw = random.Random(f"schedule {seed}")
        fragments = draw.choice([1, 2, 3])
        interval = draw.choice([2, 3])
        self.settings = dict(sync_every=fragments * interval, fragments=fragments, delay=draw.choice([0, 1]))
        self.founders = draw.choice([1, 2, 3])
        self.pace = [draw.choice([0.02, 0.05, 0.2]) for _ in range(12)]
        self.states, self.finals, self.done = {}, {}, set()
        self.leaves = {place: draw.randint(2, OUTER_STEPS - 2) for place in range(12) if draw.random() < 0.1}
        self.leaves.pop(0, None)
        for _ in range(self.founders):
            self.start()
        self.events = [(draw.uniform(0.0, 8.0), getattr(self, what)) for what in self.drawn(draw)]

    @staticmethod
    def drawn(draw):
        return draw.choices(["start", "kill", "stall"], k=draw.randint(1, 7))

    def start(self):
        self.world.start(self.body)

    def kill(self):
        """Kill a member, unless no other one that has the state would be left."""
        living = [member for member in self.world.members if not member.is_over]
        newest = self.world.values.get("epoch", b"0").decode()
        members = json.loads(self.world.values.get(f"epochs/{newest}/members", "[]"))
        able = {member for member in living if member.number in members and member.membership.has_state}
        if safe := [member for member in living if able - {member}]:
            self.world.kill(self.world.draw.choice(safe))

    def stall(self):
        living = [member for member in self.world.members if not member.is_over]
        if living:
            chosen = self.world.draw.choice(living)
            chosen.stands_until = self.world.now + self.world.draw.choice([0.3, 1.5, 5.0, 40.0])

    def body(self, member):
        world, place = self.world, member.place
        member.membership = members = member_of(world, TIMEOUT, self.founders)
        model, inner, outer, data = site(world, place, members, **self.settings)

        def look():
            """All that are members at the same time have the same state."""
            key = members.epoch, outer.outer_steps
            assert self.states.setdefault(key, digest_of(outer)) == self.states[key], f"two states: {key}"

        go_on = outer._exchange._go_on

        def observed(*given):
            go_on(*given)
            look()

        outer._exchange._go_on = observed
        while outer.outer_steps < OUTER_STEPS * self.settings["fragments"]:
            if outer.outer_steps >= self.leaves.get(place, OUTER_STEPS * 9):
                outer.close()
                self.done.add(place)
                return
            world.pause(world.draw.expovariate(1.0 / self.pace[place]))
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=data)
            before = outer.outer_steps
            inner.step()
            if outer.outer_steps != before:
                look()
        self.finals.setdefault(members.epoch, set()).add((outer.outer_steps, digest_of(outer)))
        self.done.add(place)
        outer.close()

    def run(self):
        with contextlib.ExitStack() as stack:
            for patch in simulated(self.world):
                stack.enter_context(patch)
            self.world.run(self.events)


@pytest.mark.parametrize("first", range(0, SCHEDULES, 20))
def test_no_schedule_hangs_or_makes_two_states(first):
    joined = 0
    for seed in range(first, first + 20):
        schedule = Schedule(seed)
        schedule.run()
        told = f"seed {seed}"
        for member in schedule.world.members:
            if member.error is not None:  # one that waits must think so if the only ones with the state stand still
                assert not member.membership.has_state, f"{told}: {member.error!r}"
                assert re.search("has (ended|lost all members)", str(member.error)), f"{told}: {member.error!r}"
        assert schedule.done, told
        assert all(len(final) == 1 for final in schedule.finals.values()), told
        joined += sum(place >= schedule.founders for place in schedule.done)
    assert joined > 0
