"""Ranks meet at their group's store: each leaves a text there and takes those of all."""

import contextlib
import functools
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist

_LOOKS = 0.001, 0.05  # seconds between two looks at the store: at first, and at most
_LONG = timedelta(seconds=20)  # for a rank that lives to give no sign of it
_BEATS = 4  # such signs in that time


class Meetings:
    """Of some ranks, in the order of the calls. No rank is waited for longer than the timeout.

    Args:
        store: of these meetings alone.
        ranks: the members, as the world knows them.
        index: this one's place among them.
        timeout: how long the others are waited for: since the meeting began, or since their last sign of life.
    """

    def __init__(self, store: dist.Store, ranks: list[int], index: int, timeout: timedelta):
        self._store, self._ranks, self._index, self._timeout = store, ranks, index, timeout
        self._silence = min(timeout, _LONG)
        self._work, self._works = "", itertools.count()
        self._meetings: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)  # of each work

    def share(self, text: str) -> list[str]:
        """The texts of all, in their order.

        Raises:
            torch.distributed.DistBackendError: a rank did not come, or failed at its work; names it.
        """
        about = f"{self._work}/meetings/{next(self._meetings[self._work])}"
        return meet(self._store, about, self._ranks, self._index, text, self._timeout, life=self._life)

    def agree(self, about: str, ranks: list[int], index: int, answer: str) -> list[str]:
        """At work, of those ranks that do the same part of it: the answers of all, who are waited for while at it."""
        return meet(self._store, f"{self._work}/{about}", ranks, index, answer, self._silence, life=self._life)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """While all are in it, a rank is waited for as long as it lives, and the others hear at once if it fails."""
        self._work = f"work {next(self._works)}"
        # Who waits at a store, as Gloo does, has it for himself.
        groups, self._store = self._store, self._store.clone()  # type: ignore[attr-defined]
        own, over, pause = self._beats(self._ranks[self._index]), threading.Event(), self._silence / _BEATS

        def beat() -> None:
            with contextlib.suppress(RuntimeError):  # without a store the work fails, too
                self._store.add(own, 1)
                while not over.wait(pause.total_seconds()):
                    self._store.add(own, 1)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        except BaseException as error:
            said = str(error) or type(error).__name__
            with contextlib.suppress(RuntimeError):
                self._store.set(f"{self._work}/failed", f"rank {self._ranks[self._index]} failed: {said}")
            raise
        finally:
            over.set()
            thread.join()
            self._work, self._store = "", groups

    def _life(self, rank: int) -> int:
        """What changes while it is at work. Raises DistBackendError where one of them has failed at it."""
        if not self._work:
            return 0
        if self._store.check([failed := f"{self._work}/failed"]):
            raise dist.DistBackendError(f"communicator of ranks {self._ranks}: {self._store.get(failed).decode()}")
        return self._store.add(self._beats(rank), 0)

    def _beats(self, rank: int) -> str:
        return f"{self._work}/beats/{rank}"


def meet(
    store: dist.Store,
    about: str,
    ranks: list[int],
    index: int,
    answer: str,
    timeout: timedelta,
    *,
    life: Callable[[int], int] = lambda rank: 0,
) -> list[str]:
    """Tells all ranks one's answer and returns those of all, in their order. A rank that does not come is named.

    Each is waited for since now, or since the rank's life last changed.
    """
    keys = [f"{about}/{member}" for member in range(len(ranks))]
    began = time.monotonic()
    try:
        store.set(keys[index], answer)
        for member, key in enumerate(keys):
            if not comes(store, key, timeout, began, functools.partial(life, ranks[member])):
                raise dist.DistBackendError(
                    f"communicator of ranks {ranks}: rank {ranks[member]} did not come in {timeout}"
                )
        return [said.decode() for said in store.multi_get(keys)]
    except dist.DistNetworkError as error:
        raise dist.DistBackendError(f"communicator of ranks {ranks}: the store of their group is gone") from error


def comes(store: dist.Store, key: str, timeout: timedelta, began: float, life: Callable[[], int] = lambda: 0) -> bool:
    """Whether it is there in time; the store's own wait() could not be interrupted, and warns of a timeout."""
    (pause, longest), seen = _LOOKS, life()
    while not store.check([key]):
        if (sign := life()) != seen:
            seen, began = sign, time.monotonic()
        elif time.monotonic() - began > timeout.total_seconds():
            return False
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return True
