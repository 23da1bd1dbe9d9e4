"""Measures the bandwidth of the link in the same run: each rank exchanges equal parts with all other ranks."""

import statistics
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

SIDE = "line"
NBYTES = 16 << 20
NOTE = (
    "% of line: bytes per second that a rank sends, relative to the line. The line is measured alternately with the "
    f"sides: each rank sends {NBYTES >> 20} MiB, in equal parts to all others at once, with torch's isend and irecv"
)


def sides(rank: int, ranks: int, device: str) -> dict[str, Callable[[], object]]:
    """Return the probe as a side that is timed; none on a GPU, or with one rank only."""
    if device != "cpu" or ranks == 1:
        return {}
    others = [other for other in range(ranks) if other != rank]
    sent, received = ([torch.zeros(NBYTES // 4 // len(others)) for _ in others] for _ in range(2))

    def exchange() -> None:
        sends = [dist.isend(part, other) for part, other in zip(sent, others, strict=True)]
        receives = [dist.irecv(part, other) for part, other in zip(received, others, strict=True)]
        for request in (*sends, *receives):
            request.wait()

    return {SIDE: exchange}


def rate(seconds: Sequence[float]) -> float | None:
    """Return the bytes per second in each direction, of the slowest rank."""
    return NBYTES / statistics.median(seconds) if seconds else None


def share(wire_bytes: int | None, seconds: float, line: float | None) -> dict[str, float | None]:
    """Return the figure for a row; none if the link was not timed."""
    if not line:
        return {}
    return {"% of line": 100 * wire_bytes / seconds / line if wire_bytes else None}


def note(lines: Sequence[float | None]) -> list[str]:
    """Return a note on the measured bandwidths of all workloads."""
    found = [line for line in lines if line]
    return [f"{NOTE}: {min(found) / 1e9:.3g} to {max(found) / 1e9:.3g} GB/s"] if found else []
