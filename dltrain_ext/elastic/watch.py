"""Observes whether other processes are alive."""

import time
from collections.abc import Iterable

import torch.distributed as dist

from dltrain_ext.comm.heart import beats

BEAT = 0.25  # s between two heartbeats


class Watch:
    """Observes the hearts of others, from now on."""

    def __init__(self, store: dist.Store):
        self._store = store
        self._seen: dict[int, tuple[int, float, float]] = {}  # by number: its beats, its silence, when it was looked at

    def silences(self, numbers: Iterable[int]) -> dict[int, float]:
        """Returns for how many seconds each heart has not been seen to beat. Time in which this process stood still, or
        waited for the store, counts as one beat: the others may not have come through either."""
        for number in numbers:
            count, now = beats(self._store, number), time.monotonic()
            before, silence, looked = self._seen.get(number, (count, 0.0, now))
            self._seen[number] = count, silence + min(now - looked, BEAT) if count == before else 0.0, now
        return {number: self._seen[number][1] for number in numbers}
