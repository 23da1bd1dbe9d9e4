"""Ranks meet at their group's store: each leaves a text there and takes those of all."""

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist

_LOOKS = 0.001, 0.05  # seconds between two looks at the store: at first, and at most
_LONG = timedelta(seconds=20)  # for a rank that lives to give no sign of it
_BEATS = 4  # such signs in that time


class Meetings:
    """Of some ranks, in the order of the calls. No rank is waited for longer than the timeout.

    Args:
        store: of these meetings alone; nothing stays there of those that all have come to.
        ranks: the members, as the world knows them.
        index: this one's place among them.
        timeout: how long the others are waited for: since the meeting began, or since their last sign of life.
    """

    def __init__(self, store: dist.Store, ranks: list[int], index: int, timeout: timedelta):
        self._store, self._ranks, self._index, self._timeout = store, ranks, index, timeout
        self._numbers = itertools.count()
        self._work: Work | None = None

    def share(self, text: str) -> list[str]:
        """The texts of all, in their order.

        Raises:
            torch.distributed.DistBackendError: a rank did not come, or failed at its work; names it.
        """
        store, numbers, life = self._store, self._numbers, _no_life
        if self._work is not None:
            store, numbers, life = self._work.own_store, self._work.numbers, self._work.life
        with _place(f"meeting {next(numbers)}", store, len(self._ranks)) as place:
            return meet(place, "texts", self._ranks, self._index, text, self._timeout, life=life)

    @contextlib.contextmanager
    def at_work(self) -> Iterator["Work"]:
        """While all are in it, a rank is waited for as long as it lives, and the others hear at once if it fails."""
        # Who waits at a store, as Gloo does, has it for himself.
        own: dist.Store = self._store.clone()  # type: ignore[attr-defined]
        name, silence = f"work {next(self._numbers)}", min(self._timeout, _LONG)
        with _place(name, self._store, len(self._ranks)) as place:
            self._work = Work(place, dist.PrefixStore(name, own), self._ranks, self._index, silence)
            try:
                with self._work.under_way():
                    yield self._work
            finally:
                self._work = None


class Work:
    """What some ranks do together, each seeing that the others live. Made by :meth:`Meetings.at_work`."""

    def __init__(self, store: dist.Store, own_store: dist.Store, ranks: list[int], index: int, silence: timedelta):
        self._store, self.own_store = store, own_store  # the same, over two connections
        self._ranks, self._index, self.silence = ranks, index, silence
        self.numbers = itertools.count()  # of its meetings

    def part(self, name: str, members: Sequence[int] | None = None) -> "Part":
        """Done by those members alone, of which this rank is one; by all where None."""
        members = range(len(self._ranks)) if members is None else members
        ranks = [self._ranks[member] for member in members]
        return Part(self, dist.PrefixStore(name, self._store), name, ranks, members.index(self._index))

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Gives the signs of life, and says so if the work fails."""
        rank, over = self._ranks[self._index], threading.Event()

        def beat() -> None:
            with contextlib.suppress(RuntimeError):  # without a store the work fails, too
                self.own_store.add(f"beats/{rank}", 1)
                while not over.wait(self.silence.total_seconds() / _BEATS):
                    self.own_store.add(f"beats/{rank}", 1)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        except BaseException as error:
            said = str(error) or type(error).__name__
            with contextlib.suppress(RuntimeError):
                self.own_store.set("failed", f"communicator of ranks {self._ranks}: rank {rank} failed: {said}")
            raise
        finally:
            over.set()
            thread.join()

    def life(self, rank: int) -> int:
        """What changes while it is at work. Raises DistBackendError where one of them has failed at it."""
        if self.own_store.check(["failed"]):
            raise dist.DistBackendError(self.own_store.get("failed").decode())
        return self.own_store.add(f"beats/{rank}", 0)


class Part:
    """A part of the work: its ``ranks``, this one's place among them, ``rank``, and a ``store`` for what they make."""

    def __init__(self, work: Work, store: dist.Store, name: str, ranks: list[int], rank: int):
        self._work, self.name = work, name
        self.store, self.ranks, self.rank = store, ranks, rank

    def agree(self, answer: str) -> list[str]:
        """The answers of all of them, who are waited for while at work. Once for each part."""
        work, about = self._work, f"{self.name}/answers"
        return meet(work.own_store, about, self.ranks, self.rank, answer, work.silence, life=work.life)


@contextlib.contextmanager
def _place(name: str, store: dist.Store, users: int) -> Iterator[dist.Store]:
    """A part of the store, cleared by the last to leave; not if one of them fails, since the others may not know."""
    place = dist.PrefixStore(name, store)
    yield place
    with contextlib.suppress(dist.DistNetworkError):  # the store is gone, and its keys with it
        if place.add("left", 1) == users:
            for key in place.list_keys():
                place.delete_key(key)


def _no_life(rank: int) -> int:
    return 0


def meet(
    store: dist.Store,
    about: str,
    ranks: list[int],
    index: int,
    answer: str,
    timeout: timedelta,
    *,
    life: Callable[[int], int] = _no_life,
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
