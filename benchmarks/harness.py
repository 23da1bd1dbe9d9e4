"""The tools that every case uses: interleaved timing, the rows of the report, and the types of options."""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.simulation import Simulation
from dltrain_ext import info

Progress = Callable[[str, float], None]
"""Receives what a case is doing, and which part of the whole case is done (0 to 1)."""


class Failure(Exception):
    """A case could not run. The user sees only the text."""


def check_device(device: str) -> None:
    """Raise Failure unless both torch and dltrain_ext support the device."""
    if device == "cpu":
        return
    if (built := info.collect()["CUDA"]).startswith("none"):
        raise Failure(f"--device {device}: this build of dltrain_ext is without CUDA ({built})")
    if not torch.cuda.is_available():
        raise Failure(f"--device {device}: torch sees no CUDA device")


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a sample."""

    q1: float
    median: float
    q3: float

    @classmethod
    def of(cls, sample: Sequence[float]) -> "Spread":
        return cls(*(statistics.quantiles(sample, n=4, method="inclusive") if len(sample) > 1 else [sample[0]] * 3))


@dataclass
class Row:
    """One side of one workload.

    `samples` are seconds, one per round; a wrong result is not timed and has none. `ratio` is peer time / our time, of
    the medians: above 1 ours is faster. Of the two rows that are compared, one has the ratio, and names the other in
    `against`. A row that is left out was not run, and its `check` says why.
    """

    workload: str
    side: str
    ours: bool
    correct: bool
    check: str
    samples: list[float] = field(default_factory=list)
    ratio: float | None = None
    figures: dict[str, float | None] = field(default_factory=dict)
    x: float | None = None
    against: str = ""
    left_out: bool = False

    @classmethod
    def missing(cls, side: str, why: str, workload: str = "") -> "Row":
        return cls(workload, side, ours=False, correct=True, check=why, left_out=True)

    def compare_with(self, other: "Row") -> None:
        """Set the ratio to the other row; exactly one of the two rows is ours."""
        if self.time and other.time:
            ours, peer = (self, other) if self.ours else (other, self)
            self.against, self.ratio = other.side, peer.time.median / ours.time.median

    @property
    def time(self) -> Spread | None:
        return Spread.of(self.samples) if self.samples else None


@dataclass
class Table:
    """The results of a case. Rows with an `x` are drawn as one curve per side, the others as bars.

    Rows of the workload `summary` are not timed, and are shown below the others in a separate grid.
    """

    title: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    check_heading: str = "check"
    x_label: str = ""
    summary: str = ""

    @property
    def correct(self) -> bool:
        return all(row.correct for row in self.rows)


Keep = Callable[[Table | Simulation], None]
"""Receives the object that a case is about to fill, so that its complete rows are shown even if the case fails."""


def interleave(
    sides: Mapping[str, Callable[[], object]],
    *,
    rounds: tuple[int, int],
    warmup: int = 2,
    seconds: float = float("inf"),
    before: Callable[[str], None] = lambda side: None,
    after: Callable[[str], None] = lambda side: None,
    device: str = "cpu",
    progress: Callable[[float], None] = lambda done: None,
) -> dict[str, list[float]]:
    """Time one call of every side per round, so that a drift of the machine affects all sides. Return seconds by side.

    At least rounds[0] rounds and at most rounds[1] are timed, and no new round begins after `seconds` have passed. The
    order is shuffled with a fixed seed (the same in every process of a group), and no side runs twice in a row.
    `before` and `after` are called around each call, untimed. On CUDA, events on the current stream measure the time.
    """
    timed = _seconds_on_stream if device == "cuda" else _seconds
    samples: dict[str, list[float]] = {side: [] for side in sides}
    order, shuffle, start = list(sides), random.Random(0).shuffle, time.perf_counter()
    for turn in range(-warmup, rounds[1]):
        elapsed = time.perf_counter() - start
        if turn >= rounds[0] and elapsed > seconds:
            break
        progress(max(0.0, turn / rounds[1], min(1.0, elapsed / seconds)))
        last = order[-1] if order else None
        shuffle(order)
        while len(order) > 1 and order[0] == last:
            shuffle(order)
        for side in order:
            before(side)
            took = timed(sides[side])
            after(side)
            if turn >= 0:
                samples[side].append(took)
    return samples


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _seconds_on_stream(call: Callable[[], object]) -> float:
    """Time from an idle stream until all that the call enqueues is done; this includes waiting for a slow host."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def choices(valid: Sequence[str]) -> Callable[[str], list[str]]:
    """Return an argparse type: names out of `valid`, separated by commas."""

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if unknown := [name for name in names if name not in valid]:
            raise argparse.ArgumentTypeError(f"unknown {', '.join(map(repr, unknown))}; valid: {', '.join(valid)}")
        return list(dict.fromkeys(names))

    return parse


def at_least(low: int) -> Callable[[str], int]:
    """Return an argparse type: a whole number that is at least `low`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= {low}")
        return int(text)

    return parse
