"""The machine's memory limit, measured by streams that run alternately with the sides; the memory that a call needs."""

import functools
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks import cupy_peers
from benchmarks.harness import Row, interleave


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
    """Time the steps and the streams of the limit alternately. Fill the rows with GB/s, its share of the limit, and
    the ratio to our first row. Return the note on the limit.
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
    ours = next((rows[side] for side in steps if rows[side].ours), None)
    for side in steps:
        row = rows[side]
        speed = bytes_moved[side] / 1e9 / row.time.median
        row.figures |= {"GB/s": speed, "% of limit": 100 * speed / limit.of(speeds) if limit else None}
        if device == "cuda":
            row.figures["% of copy"] = 100 * speed / speeds["copy"] if speeds else None
        if ours and not row.ours:
            row.compare_with(ours)
    return limit.note(speeds) if limit else ""


def last_level_cache(device: str = "cpu") -> int:
    """Return the bytes of the largest cache of CPU 0 (32 MiB if the system does not report it), or of the GPU's L2.

    A virtual machine reports the whole cache of its host, so at most 16 MiB are counted for each of its CPUs.
    """
    if device == "cuda":
        return torch.cuda.get_device_properties(0).L2_cache_size
    units = {"K": 2**10, "M": 2**20}
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    largest = max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=2**25)
    return min(largest, 2**24 * (os.cpu_count() or 1))


class MemoryLimit:
    """Plain streams over arrays larger than the last-level cache, timed as sides of the workload that they limit.

    Bytes are those that the code reads and writes. On a CPU a copy also reads the lines that it overwrites
    (write-allocate) unless it uses non-temporal stores, so its figure alone is too low: the limit is the best stream.
    With `reads`, the limit is a stream that reads so many arrays and writes all but one of them, as the step of an
    optimizer does; torch.compile makes it, if it can.
    """

    def __init__(self, device: str = "cpu", reads: int = 0) -> None:
        self.device = device
        cache = 2 * last_level_cache(device)
        # A GPU reads its cache twice in the time of a launch and the wait for it; larger arrays make these negligible.
        n = (max(cache, 2**30) if device == "cuda" else min(cache, 2**28)) // 4
        a, b = torch.zeros(n, device=device), torch.ones(n, device=device)
        self.bytes = {"copy": 8 * n, "in-place scale": 8 * n, "a += b": 12 * n}
        self.sides = {"copy": lambda: a.copy_(b), "in-place scale": lambda: a.mul_(1.0), "a += b": lambda: a.add_(b)}
        self.cupy = cupy_peers.why_not() if device == "cuda" else "for a GPU"
        if not self.cupy:
            self.bytes["cupy memcpy"], self.sides["cupy memcpy"] = 8 * n, lambda: cupy_peers.copy(b, a)
        self.update = ""
        if reads and (update := compiled_update(reads - 1)):
            written = [a, *(torch.zeros(n, device=device) for _ in range(reads - 2))]
            update(b, *written)
            self.update = f"{reads} read, {reads - 1} written"
            self.bytes[self.update] = 4 * (2 * reads - 1) * n
            self.sides[self.update] = lambda: update(b, *written)

    def speeds(self, samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Return the GB/s of each stream."""
        return {name: size / 1e9 / statistics.median(samples[name]) for name, size in self.bytes.items()}

    def of(self, speeds: Mapping[str, float]) -> float:
        """Return the GB/s that is shown as 100 %."""
        return speeds[self.update] if self.update else max(speeds.values())

    def note(self, speeds: Mapping[str, float]) -> str:
        """Return a note on how the limit was measured."""
        parts = ", ".join(f"{name} {value:.1f}" for name, value in speeds.items())
        what = f"the stream {self.update}; all streams" if self.update else "the best of"
        line = f"memory limit {self.of(speeds):.1f} GB/s, {what}: {parts}"
        if self.device == "cpu":
            line += f" (copy with the write-allocate read {1.5 * speeds['copy']:.1f})"
        elif self.cupy:
            line += f"; cupy memcpy: {self.cupy}"
        return line


@functools.cache
def compiled_update(written: int) -> Callable[..., None] | None:
    """Return a call that adds its first argument to all others in one pass; None if torch cannot compile it."""

    def update(addend: torch.Tensor, *sums: torch.Tensor) -> None:
        for each in sums:
            each.add_(addend)

    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no worker processes: Ctrl-C would reach them, too
    compiled = torch.compile(update, dynamic=False)
    try:
        compiled(*torch.zeros(written + 1, 4096))
    except Exception:  # the backend may lack a compiler, or something else
        return None
    return compiled


def extra_memory(call: Callable[[], object], device: str = "cpu") -> float | None:
    """Return the peak MiB of a call beyond the memory in use before it; None if the system does not report it."""
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
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = status("VmRSS")
        call()
        return max(0, status("VmHWM") - before) / 2**10
    except (OSError, StopIteration):
        call()
        return None
