"""Sites of which one is slow, for the case local_sgd: with averages all wait for it, with a store they need not.

Steps are mostly slept, so that sites which share the cores of a machine do not slow each other down.
"""

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.harness import Progress
from benchmarks.local_sgd_sides import LR, MOMENTUM, OURS
from benchmarks.machine.ranks import over_ranks
from dltrain_ext import local_sgd, optim, ps
from dltrain_ext.selftest.sums import count_wrong, first_if_unlike

STEP, SLOWER = 0.005, 5  # s of a step, mostly slept, and how many times as long a step of the last site takes
BATCH, HIDDEN, INNER_LR = 16, 64, 2e-3
DELAY = 1  # step, in which the servers can make a version
GRACE = timedelta(seconds=2 * STEP)
CAREFUL = LR / 4, 0.6  # rate and momentum of the outer optimizer that suit a version of one of four sites
MOST = 100.0  # a loss above it, or one that is not finite, is reported as this


class Job(NamedTuple):
    sync_every: int
    codec: str
    seconds: float  # of a side in a turn
    turns: int


class Way(NamedTuple):
    """Whose movements make an outer step: with a store those of a quorum, otherwise those of all."""

    codec: str
    has_store: bool = True
    quorum: str | int = "all"
    grace: timedelta | None = None
    outer: tuple[float, float] = (LR, MOMENTUM)

    @property
    def name(self) -> str:
        parts = [OURS, self.codec, f"store, quorum {self.quorum}" if self.has_store else "no store"]
        if self.grace:
            parts.append(f"grace {1e3 * self.grace.total_seconds():g} ms")
        if self.outer == CAREFUL:
            parts.append("outer lr {:g}, momentum {:g}".format(*self.outer))
        return ", ".join(parts)

    @property
    def waits(self) -> bool:
        return self.quorum == "all"

    def options(self) -> dict[str, Any]:
        stored = {"store": ps.Store(servers=[0]), "quorum": self.quorum, "grace": self.grace}
        lr, momentum = self.outer
        return {"codec": self.codec, "lr": lr, "momentum": momentum} | (stored if self.has_store else {})


class Turn(NamedTuple):
    """`seconds`, `slow`: of an inner step, on the fast sites and on the slow one. `versions`: outer steps in a second.
    `loss`, `accuracy`: of the held-out data, with the parameters of the first site after its last outer step."""

    seconds: float
    slow: float
    versions: float
    loss: float
    accuracy: float
    wrong: float


def ways(ranks: int, codec: str) -> list[Way]:
    fast = max(1, ranks - 1)
    found = [Way(codec, has_store=False), Way(codec), Way(codec, quorum=fast), Way(codec, quorum=fast, grace=GRACE)]
    return list(dict.fromkeys([*found, Way(codec, quorum=1), Way(codec, quorum=1, outer=CAREFUL)]))


def work(rank: int, ranks: int, progress: Progress, job: Job) -> Iterator[tuple[Way, list[Turn]]]:
    """Yield the turns of each side; the sides take turns, each made anew."""
    from examples.tasks import digits

    torch.set_num_threads(1)
    task, sides = digits(), ways(ranks, job.codec)
    turns: dict[Way, list[Turn]] = {way: [] for way in sides}
    for turn in range(job.turns):
        first = turn % len(sides)
        for index, way in enumerate(sides[first:] + sides[:first]):
            progress(f"turn {turn + 1} of {job.turns}, {way.name}", (turn + index / len(sides)) / job.turns)
            turns[way].append(take_turn(rank, ranks, job, way, turn, task))
    yield from turns.items()


def take_turn(rank: int, ranks: int, job: Job, way: Way, turn: int, task: Any) -> Turn:
    torch.manual_seed(turn)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
    inner = optim.AdamW(model.parameters(), lr=INNER_LR)
    outer = local_sgd.DiLoCo(model, inner, sync_every=job.sync_every, delay=DELAY, **way.options())
    draw = torch.Generator().manual_seed(ranks * turn + rank)
    is_slow = rank == ranks - 1

    def step() -> bool:
        """Take a step, and return whether it has brought an outer step."""
        until = time.perf_counter() + STEP * (SLOWER if is_slow else 1)
        batch = torch.randint(len(task.train[0]), (BATCH,), generator=draw)
        inner.zero_grad()
        torch.autograd.backward(task.criterion(model(task.train[0][batch]), task.train[1][batch]))
        time.sleep(max(0.0, until - time.perf_counter()))
        before = outer.outer_steps
        inner.step()
        return outer.outer_steps > before

    step()  # connects the sites
    kept, steps = parameters_to_vector(model.parameters()).detach(), 0
    dist.barrier()
    began = time.perf_counter()
    while True:
        landed = step()
        took = time.perf_counter() - began
        if took <= job.seconds:
            steps += 1
            kept = parameters_to_vector(model.parameters()).detach() if landed else kept
        # Sites that wait for each other end after the same step, so that none waits for one that has ended.
        if (landed and over_ranks([took], "max")[0] > job.seconds) if way.waits else took > job.seconds:
            break
    dist.barrier()
    state = outer.state_dict()
    outer.close()
    wrong = sum(count_wrong(value, value.clone(), 0, first_if_unlike(value)) for value in state["backup"].values())
    vector_to_parameters(kept, model.parameters())
    loss, accuracy = held_out(model, task) if rank == 0 else (0.0, 0.0)
    shares = [0 if is_slow else steps, steps if is_slow else 0, loss, accuracy, wrong]
    fast, slow, *found = over_ranks(shares, "sum")
    versions = state["steps"] / over_ranks([took], "max")[0]
    return Turn(job.seconds * (ranks - 1) / fast, job.seconds / slow, versions, *found)


@torch.no_grad()
def held_out(model: nn.Module, task: Any) -> tuple[float, float]:
    outputs, targets = model(task.test[0]), task.test[1]
    loss = float(task.criterion(outputs, targets))
    return min(MOST, loss), float(task.score(outputs, targets).float().mean())
