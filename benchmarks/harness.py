"""What every case measures with: interleaved timing, the rows for the report, the machine's memory limit."""

import argparse
import functools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dltrain_ext import info

Progress = Callable[[str, float], None]
"""What a case is doing, and how much of the whole case is done (0 to 1)."""


class Failure(Exception):
    """A case could not run; the text is all that the user is shown."""


def check_device(device: str) -> None:
    """Raise Failure unless both torch and dltrain_ext can work there."""
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
    the medians: above 1 we are faster. It stands where a peer meets us: at the peer's row, or at each of ours.
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

    @property
    def time(self) -> Spread | None:
        return Spread.of(self.samples) if self.samples else None


@dataclass
class Table:
    """What a case returns. Rows with an `x` are drawn as one curve per side, the others as bars.

    Those of the workload `summary` are not timed, and are shown below in a grid of their own.
    """

    title: str
    rows: list[Row]
    notes: list[str]
    check_heading: str = "check"
    x_label: str = ""
    summary: str = ""

    @property
    def correct(self) -> bool:
        return all(row.correct for row in self.rows)


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
    """Time one call of every side per round, so that a drift of the machine hits all sides alike; seconds, by side.

    At least rounds[0] rounds and at most rounds[1] are timed, and no new one is begun once `seconds` have passed.
    The order is shuffled with a fixed seed (the same in every process of a group) and no side runs twice in a row.
    `before` and `after` surround each call, untimed. On CUDA calls only enqueue: what came before a call, and the call
    itself, are waited for before the clock is read.
    """
    synchronize: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None
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
            synchronize()
            began = time.perf_counter()
            sides[side]()
            synchronize()
            took = time.perf_counter() - began
            after(side)
            if turn >= 0:
                samples[side].append(took)
    return samples


def time_rows(
    rows: Mapping[str, Row],
    steps: Mapping[str, Callable[[], object]],
    bytes_moved: Mapping[str, int],
    *,
    limit: "MemoryLimit | None",
    device: str,
    seconds: float,
    progress: Callable[[float], None],
    before: Callable[[str], None] = lambda side: None,
) -> str:
    """Time the steps, and the streams of the limit in between, and fill the rows: GB/s, its shares, and the ratio to
    the first of ours. Returns the line about the limit.
    """
    streams = limit.sides if limit else {}
    samples = interleave(
        {**steps, **streams},
        rounds=(3, 200),
        seconds=seconds,
        before=before,
        device=device,
        progress=progress,
    )
    speeds = limit.speeds(samples) if limit else {}
    for side in steps:
        rows[side].samples = samples[side]
    ours = next((rows[side].time for side in steps if rows[side].ours), None)
    for side in steps:
        row = rows[side]
        speed = bytes_moved[side] / 1e9 / row.time.median
        row.figures |= {"GB/s": speed, "% of limit": 100 * speed / limit.of(speeds) if limit else None}
        if device == "cuda":
            row.figures["% of copy"] = 100 * speed / speeds["copy"] if speeds else None
        if ours and not row.ours:
            row.ratio = row.time.median / ours.median
    return limit.note(speeds) if limit else ""


def last_level_cache(device: str = "cpu") -> int:
    """Bytes of the largest cache of CPU 0, or 32 MiB where the system does not tell; or of the GPU's L2 cache."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).L2_cache_size
    units = {"K": 2**10, "M": 2**20}
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=2**25)


class MemoryLimit:
    """Plain streams, run as sides of the workload whose limit they show; each sweeps past the last-level cache.

    Bytes are those that the code reads and writes. On a CPU a copy also reads the lines that it overwrites
    (write-allocate) unless it stores around the cache, so alone it reads low: the limit is the best of the streams.
    With `reads` the limit is a stream of as many arrays read, all but one of them also written, as an optimizer's step
    does it; torch.compile makes it, where it can.
    """

    def __init__(self, device: str = "cpu", reads: int = 0) -> None:
        self.device = device
        cache = 2 * last_level_cache(device)
        # A GPU sweeps its cache twice in the time that a launch and the wait for it take; these shall not count.
        n = (max(cache, 2**30) if device == "cuda" else min(cache, 2**28)) // 4
        a, b = torch.zeros(n, device=device), torch.ones(n, device=device)
        self.bytes = {"copy": 8 * n, "in-place scale": 8 * n, "a += b": 12 * n}
        self.sides = {"copy": lambda: a.copy_(b), "in-place scale": lambda: a.mul_(1.0), "a += b": lambda: a.add_(b)}
        self.update = ""
        if reads and (update := compiled_update(reads - 1)):
            written = [a, *(torch.zeros(n, device=device) for _ in range(reads - 2))]
            update(b, *written)
            self.update = f"{reads} read, {reads - 1} written"
            self.bytes[self.update] = 4 * (2 * reads - 1) * n
            self.sides[self.update] = lambda: update(b, *written)

    def speeds(self, samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """GB/s of each stream."""
        return {name: size / 1e9 / statistics.median(samples[name]) for name, size in self.bytes.items()}

    def of(self, speeds: Mapping[str, float]) -> float:
        """GB/s that 100 % stands for."""
        return speeds[self.update] if self.update else max(speeds.values())

    def note(self, speeds: Mapping[str, float]) -> str:
        """A line that says how the limit came about."""
        parts = ", ".join(f"{name} {value:.1f}" for name, value in speeds.items())
        what = f"the stream {self.update}; all streams" if self.update else "the best of"
        line = f"memory limit {self.of(speeds):.1f} GB/s, {what}: {parts}"
        if self.device == "cpu":
            line += f" (copy with the write-allocate read {1.5 * speeds['copy']:.1f})"
        return line


@functools.cache
def compiled_update(written: int) -> Callable[..., None] | None:
    """A call that adds its first argument to each of the others in one pass; None where torch cannot compile it."""

    def update(addend: torch.Tensor, *sums: torch.Tensor) -> None:
        for each in sums:
            each.add_(addend)

    compiled = torch.compile(update, dynamic=False)
    try:
        compiled(*torch.zeros(written + 1, 4096))
    except Exception:  # whatever its backend is missing
        return None
    return compiled


def extra_memory(call: Callable[[], object], device: str = "cpu") -> float | None:
    """MiB that a call needs at its peak beyond what was there before it; None where the system does not tell."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def status(name: str) -> int:
        return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith(name))

    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = status("VmRSS")
        call()
        return max(0, status("VmHWM") - before) / 2**10
    except (OSError, StopIteration):
        call()
        return None


def choices(valid: Sequence[str]) -> Callable[[str], list[str]]:
    """An argparse type: names separated by commas, each out of `valid`."""

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if unknown := [name for name in names if name not in valid]:
            raise argparse.ArgumentTypeError(f"unknown {', '.join(map(repr, unknown))}; valid: {', '.join(valid)}")
        return list(dict.fromkeys(names))

    return parse


def at_least(low: int) -> Callable[[str], int]:
    """An argparse type: a whole number, `low` or more."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= {low}")
        return int(text)

    return parse
