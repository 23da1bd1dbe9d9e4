"""What the line carries, found in the same run: each rank sends every other its share, and receives as much."""

import statistics
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

SIDE = "line"
NBYTES = 16 << 20
NOTE = (
    f"% of line: bytes that a rank sends, over the time, over the line: {NBYTES >> 20} MiB from each rank, in equal "
    "parts to all others by torch's isend and irecv, all at once, taking turns with the sides"
)


def sides(rank: int, ranks: int, device: str) -> dict[str, Callable[[], object]]:
    """The line as a side to be timed; none on a GPU, nor where there is nobody to send to."""
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
    """Bytes per second, each way, of the slowest rank."""
    return NBYTES / statistics.median(seconds) if seconds else None


def share(wire_bytes: int | None, seconds: float, line: float | None) -> dict[str, float | None]:
    """The figure of a row; none where the line was not timed."""
    if not line:
        return {}
    return {"% of line": 100 * wire_bytes / seconds / line if wire_bytes else None}


def note(lines: Sequence[float | None]) -> list[str]:
    """Of the lines of all workloads."""
    found = [line for line in lines if line]
    return [f"{NOTE}: {min(found) / 1e9:.3g} to {max(found) / 1e9:.3g} GB/s"] if found else []
