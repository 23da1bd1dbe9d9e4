"""Heartbeats: processes count them up in a store, and observe whether those of others go on."""

import contextlib
import threading
import time
import weakref
from collections.abc import Iterable

import torch.distributed as dist

BEAT = 0.25  # s between two of them


def _key(number: int) -> str:
    return f"beats/{number}"


def beats(store: dist.Store, number: int) -> int:
    """Returns how often a heart has beaten."""
    return store.add(_key(number), 0)


class Heart:
    """Beats in a thread of its own, on its own connection to the store, until it is stopped or the store is gone."""

    def __init__(self, store: dist.Store, number: int):
        over = threading.Event()
        own: dist.Store = store.clone()  # type: ignore[attr-defined]
        own.add(_key(number), 1)

        def beat() -> None:
            with contextlib.suppress(RuntimeError):
                while not over.wait(BEAT):
                    own.add(_key(number), 1)

        thread = threading.Thread(target=beat, name="dltrain_ext: heartbeats", daemon=True)
        thread.start()
        # Also at the end of the process: a thread that returns from a store meanwhile aborts it.
        self.stop = weakref.finalize(self, _stop, over, thread)


def _stop(over: threading.Event, thread: threading.Thread) -> None:
    over.set()
    thread.join()


class Watch:
    """Observes the hearts of others, from now on."""

    def __init__(self, store: dist.Store):
        self._store = store
        self._seen: dict[
            int, tuple[int, float, float]
        ] = {}  # by number: its beats, its silence, and when it was looked at

    def silences(self, numbers: Iterable[int]) -> dict[int, float]:
        """Returns for how many seconds each heart has not been seen to beat. Time in which this process stood still, or
        waited for the store, counts as one beat: the others may not have come through either."""
        for number in numbers:
            count, now = beats(self._store, number), time.monotonic()
            before, silence, looked = self._seen.get(number, (count, 0.0, now))
            self._seen[number] = count, silence + min(now - looked, BEAT) if count == before else 0.0, now
        return {number: self._seen[number][1] for number in numbers}
