"""Heartbeats: a process counts them up in a store, and others see from the count whether it is alive."""

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable

import torch.distributed as dist

_AT_EXIT = 5.0  # seconds that the end of the process waits for a store

_hearts: "weakref.WeakSet[Heart]" = weakref.WeakSet()
_threads: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Waits for threads that use a store: one that returns from it while the interpreter ends aborts the process."""
    for heart in list(_hearts):
        heart.stop()
    end = time.monotonic() + _AT_EXIT
    for thread in list(_threads):
        thread.join(max(0.0, end - time.monotonic()))


def _key(number: int) -> str:
    return f"beats/{number}"


def beats(store: dist.Store, number: int) -> int:
    """Returns how often the heart with this number has beaten."""
    return store.add(_key(number), 0)


class Heart:
    """Beats in a thread of its own until it is stopped, or the store is gone.

    Args:
        store: on a connection that nothing else blocks.
        number: different for all hearts of the store.
        interval: seconds between two beats.
    """

    def __init__(self, store: dist.Store, number: int, interval: float):
        self._over, self._then = over, then = threading.Event(), list[Callable[[], None]]()

        def beat() -> None:
            with contextlib.suppress(RuntimeError):  # the store is gone, and so what the heart is for fails too
                store.add(_key(number), 1)
                while not over.wait(interval):
                    store.add(_key(number), 1)
                for call in then:
                    call()

        thread = threading.Thread(target=beat, name="dltrain_ext: heartbeats", daemon=True)
        weakref.finalize(self, over.set).atexit = False
        _hearts.add(self)
        _threads.add(thread)
        thread.start()

    def stop(self, then: Callable[[], None] | None = None) -> None:
        """Stops it, without waiting for its thread, which then makes a last call."""
        if then is not None:
            self._then.append(then)
        self._over.set()
