"""The code that every rank of the case local_sgd runs: the sides' training, its check, and what it sends and waits."""

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import Progress
from benchmarks.local_sgd_faults import Fault, Outcome, lose_ranks
from benchmarks.local_sgd_peers import make_runner
from benchmarks.local_sgd_sides import (
    ALONE,
    DDP,
    LR,
    MIX,
    MOMENTUM,
    Runner,
    Schedule,
    Side,
    layers_of,
    sgd,
)
from benchmarks.machine.ranks import over_ranks
from dltrain_ext import codecs
from dltrain_ext.local_sgd.fragments import divide
from dltrain_ext.selftest.sums import count_wrong, first_if_unlike, relative_error

DEADLINE = 900.0
FEW = 2  # steps of DDP, of which each sends what others send in a round
CHECKED = 64  # width of the model in the check
INTERVAL = 0.02  # s between two readings of the interface's counter
WINDOW, PAUSE, QUIET = 0.5, 0.25, 16384  # s, s, and bytes: a burst ends where fewer are sent in a pause


class Job(NamedTuple):
    sides: list[Side]
    width: int
    sync_every: int
    rounds: int  # of sync_every steps, in one turn
    turns: int
    seconds: float  # of a step
    faults: list[Fault]


class Measured(NamedTuple):
    """One turn of one side on one rank, by step, except for the last four. Mean over the ranks, except for
    `seconds` of the slowest rank, the bursts of the last one, and the failures of all."""

    seconds: float
    waited: float  # share of the time
    nbytes: float
    own: float  # seconds on the main thread in an outer step, without waiting
    burst: float
    peak: float
    failures: float  # averages, over all ranks


class Result(NamedTuple):
    """`turns` is empty if the side was wrong, or if it failed: `why`."""

    side: Side
    wrong: int
    error: float
    turns: list[Measured]
    why: str = ""


class Calibration(NamedTuple):
    batch: int
    seconds: float


def work(rank: int, ranks: int, progress: Progress, job: Job) -> Iterator[Calibration | Result | Outcome]:
    """Yield what is found, the same on all ranks."""
    progress("finding the batch size", 0.0)
    found = calibrate(rank, job)
    yield found
    if job.sides:
        yield from measure(rank, ranks, job, found.batch, progress)
    yield from lose_ranks(rank, ranks, job.faults, job.width, found, progress)


def calibrate(rank: int, job: Job) -> Calibration:
    """Return the batch size with which a step takes so long while all ranks compute: time grows linearly with it."""
    model = layers_of(job.width)
    runner = make_runner(Side(ALONE), model, Schedule(job.sync_every, 1, 0))

    def slowest(batch: int) -> float:
        x = inputs(rank, batch, job.width)
        runner.train(x)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(5):
            runner.train(x)
        return over_ranks([(time.perf_counter() - began) / 5], "max")[0]

    small, large = 8, 64
    times = slowest(small), slowest(large)
    each = max(1e-9, (times[1] - times[0]) / (large - small))
    batch = int(min(4096.0, max(1.0, small + (job.seconds - times[0]) / each)))
    return Calibration(batch, slowest(batch))


def inputs(rank: int, batch: int, width: int) -> Tensor:
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(rank))


def measure(rank: int, ranks: int, job: Job, batch: int, progress: Progress) -> Iterator[Result]:
    """Check all sides, then measure them in turns: each turn makes a side anew, so that none disturbs another one."""
    checks: dict[str, tuple[int, float, str]] = {}
    turns: dict[str, list[Measured]] = {side.name: [] for side in job.sides}
    for side in job.sides:
        progress(f"check of {side.name}", 0.0)
        checks[side.name] = check(rank, ranks, side)
    right = [side for side in job.sides if checks[side.name][0] == 0 and not checks[side.name][2]]
    x = inputs(rank, batch, job.width)
    for side in job.sides:
        if side not in right:
            yield Result(side, *checks[side.name][:2], [], checks[side.name][2])
    for turn in range(job.turns):
        first = (turn + 1) % len(right) if right and turn < job.turns - 1 else 0  # the last turn is in the given order
        for index, side in enumerate(right[first:] + right[:first]):
            progress(f"turn {turn + 1} of {job.turns}, {side.name}", (turn + index / len(right)) / job.turns)
            measured = take_turn(rank, ranks, job, side, x)
            turns[side.name].append(measured)
            if measured.failures:
                wrong, error, _ = checks[side.name]
                checks[side.name] = wrong, error, f"{measured.failures:.0f} averages in turn {turn + 1}, over all ranks"
            if turn == job.turns - 1:
                wrong, error, why = checks[side.name]
                yield Result(side, wrong, error, turns[side.name], why)


def take_turn(rank: int, ranks: int, job: Job, side: Side, x: Tensor) -> Measured:
    runner = make_runner(side, layers_of(job.width), Schedule(job.sync_every, side.fragments, side.delay))
    # A turn begins and ends where a fragment has just arrived, so that all it sends is sent within the turn.
    for _ in range(runner.lead):
        runner.train(x)
    steps = FEW if side.kind == DDP else job.sync_every * job.rounds
    clock = MainThread(runner)
    dist.barrier()
    counter = Counter(ranks, samples=rank == ranks - 1)
    waited, began = runner.waited, time.perf_counter()
    for _ in range(steps):
        runner.train(x)
    seconds = time.perf_counter() - began
    waited = runner.waited - waited
    dist.barrier()  # so that all that this rank sends to the others is counted
    nbytes = counter.end()
    slowest = over_ranks([seconds], "max")[0]
    mine = [waited / seconds, nbytes / steps, clock.own(waited), runner.failures]
    share, sent, own, failures = over_ranks(mine, "sum")
    burst, peak = over_ranks([counter.burst(), counter.peak()], "max")
    runner.close()
    return Measured(slowest / steps, share / ranks, sent / ranks, own / ranks, burst, peak, failures)


class MainThread:
    """The time that DiLoCo takes on the thread that trains, in what begins and ends an average."""

    def __init__(self, runner: Runner):
        self.total, self.outer = 0.0, runner.outer
        self.before = self.outer.outer_steps if self.outer else 0
        for name in ("_depart", "_land") if self.outer else ():
            setattr(self.outer._exchange, name, self.timed(getattr(self.outer._exchange, name)))

    def timed(self, call: Callable[[], Any]) -> Callable[[], None]:
        def wrapped() -> None:
            began = time.perf_counter()
            call()
            self.total += time.perf_counter() - began

        return wrapped

    def own(self, waited: float) -> float:
        """Return the seconds of an outer step that are not waited."""
        taken = self.outer.outer_steps - self.before if self.outer else 0
        return max(0.0, self.total - waited) / taken if taken else 0.0


class Counter:
    """The bytes that have left through the interface of this rank's host; over loopback, a rank's share of them."""

    def __init__(self, ranks: int, samples: bool):
        self.name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        self.share = ranks if self.name == "lo" else 1
        self.first = self.read()
        self.samples = [(time.monotonic(), 0.0)]
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.sample, daemon=True)
        if samples:
            self.thread.start()

    def read(self) -> float:
        return counters()[self.name] / self.share

    def sample(self) -> None:
        while not self.ended.wait(INTERVAL):
            self.samples.append((time.monotonic(), self.read() - self.first))

    def end(self) -> float:
        nbytes = self.read() - self.first
        self.ended.set()
        if self.thread.is_alive():
            self.thread.join()
            self.samples.append((time.monotonic(), nbytes))
        return nbytes

    def peak(self) -> float:
        """Return the most bytes that left within `WINDOW` seconds."""
        most, begin = 0.0, 0
        for now, nbytes in self.samples:
            while self.samples[begin][0] < now - WINDOW:
                begin += 1
            most = max(most, nbytes - self.samples[begin][1])
        return most

    def burst(self) -> float:
        """Return the most bytes that left between two pauses."""
        most, start, quiet = 0.0, self.samples[0][1], self.samples[0]
        for now, nbytes in self.samples:
            if nbytes - quiet[1] >= QUIET:
                if now - quiet[0] > PAUSE:  # the pause lasted until now
                    start = quiet[1]
                quiet = now, nbytes
            most = max(most, nbytes - start)
        return most


def counters() -> dict[str, int]:
    """Return the bytes sent through each interface of this process's network namespace."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return {name.strip(): int(numbers.split()[8]) for name, _, numbers in (line.partition(":") for line in lines)}


# Checks


def check(rank: int, ranks: int, side: Side) -> tuple[int, float, str]:
    """Train a small model for two rounds with given gradients, and a twin whose averages are exact. Return the number
    of wrong elements, the rms error over the rms of what the twin has moved, and why the side failed."""
    few = Schedule(side.fragments * (3 if side.delay else 2), side.fragments, min(side.delay, 1))
    try:
        runner = make_runner(side, layers_of(CHECKED), few, sgd)
    except Exception as error:
        return 0, 0.0, f"{type(error).__name__}: {error}".splitlines()[0]
    model, twin = runner.model, layers_of(CHECKED)
    inner, exact = sgd(twin), Exact(runner, twin, few, ranks)
    for step in range(1, 2 * few.sync_every + few.delay + 1):
        runner.give(lambda parameters, step=step: give_grads(parameters, rank, step))
        give_grads(list(twin.parameters()), rank, step)
        exact.before_step()
        inner.step()
        exact.after_step(step)
    start = flat(layers_of(CHECKED).parameters())
    found, expected = flat(model.parameters()), flat(twin.parameters())
    moved = expected - start
    lost = codecs.error_bound(side.codec).max if side.codec != "raw" else 0.0
    tolerance = (1e-4 + (ranks + 1) * lost) * moved.abs().max().item()
    wrong = count_wrong(found, expected, tolerance)
    for same in runner.same():
        wrong += count_wrong(same, same.clone(), 0, first_if_unlike(same))
    error = relative_error(found - start, moved)
    runner.close()
    total, errors, failures = over_ranks([wrong, error, runner.failures], "sum")
    return int(total), errors / ranks, f"{failures:.0f} averages in the check, over all ranks" if failures else ""


class Exact:
    """What a side computes, with exact averages, by torch: the mean of gradients, of parameters, or an outer step."""

    def __init__(self, runner: Runner, model: nn.Module, schedule: Schedule, ranks: int):
        self.runner, self.ranks, self.schedule = runner, ranks, schedule
        self.parameters = list(model.parameters())
        self.backup = [p.detach().clone() for p in self.parameters]
        self.momentum = [torch.zeros_like(p) for p in self.parameters]
        self.parts = divide([p.numel() for p in self.parameters], schedule.fragments)
        self.turn, self.flight = 0, dict[int, Tensor]()

    def mean(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total / self.ranks

    def before_step(self) -> None:
        if self.runner.averages == "gradients":
            for p in self.parameters:
                assert p.grad is not None
                p.grad = self.mean(p.grad)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        departs, lands = self.runner.departs(step), self.runner.lands(step)
        if self.runner.averages == "parameters" and departs:
            for p in self.parameters:
                p.copy_(self.mean(p))
        if self.runner.averages != "moves":
            return
        if departs:
            self.depart()
        if lands and self.flight:
            self.land()

    def depart(self) -> None:
        self.flight = {i: self.mean(self.backup[i] - self.parameters[i]) for i in self.parts[self.turn]}

    def land(self) -> None:
        for i, mean in self.flight.items():
            self.momentum[i].mul_(MOMENTUM).add_(mean)
            self.backup[i].sub_(LR * (mean + MOMENTUM * self.momentum[i]))
            self.parameters[i].copy_(self.backup[i].lerp(self.parameters[i], MIX if self.schedule.delay else 0.0))
        self.turn, self.flight = (self.turn + 1) % self.schedule.fragments, {}


def give_grads(parameters: list[nn.Parameter], rank: int, step: int) -> None:
    data = torch.Generator().manual_seed(1000 * step + rank)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=data)


def flat(parameters: Iterator[nn.Parameter]) -> Tensor:
    return torch.cat([p.detach().flatten() for p in parameters])


def median(result: Result, name: str) -> float:
    return statistics.median(getattr(turn, name) for turn in result.turns)
