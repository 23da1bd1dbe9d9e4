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


class Rendezvous:
    """Of some ranks, in the order of the calls. No rank is waited for longer than the timeout.

    Args:
        store: of these meetings alone; when all have done their work, nothing is left there.
        ranks: the members, as the world knows them.
        index: this one's place among them.
        timeout: how long the others are waited for: since the meeting began, or since their last sign of life.
    """

    def __init__(self, store: dist.Store, ranks: list[int], index: int, timeout: timedelta):
        self._store, self._ranks, self._index, self._timeout = store, ranks, index, timeout
        self._numbers = itertools.count()
        self._work: JointWork | None = None

    def exchange(self, text: str) -> list[str]:
        """The texts of all, in their order.

        Raises:
            torch.distributed.DistBackendError: a rank did not come, or failed at its work; names it.
        """
        if self._work is not None:
            return self._work.exchange(text, self._timeout)
        return exchange_texts(
            self._store, f"{next(self._numbers)}/texts", self._ranks, self._index, text, self._timeout
        )

    @contextlib.contextmanager
    def at_work(self) -> Iterator["JointWork"]:
        """While all are in it, a rank is waited for as long as it lives, and the others hear at once if it fails."""
        silence = min(self._timeout, _LONG)
        self._work = JointWork(self._store, next(self._numbers), self._ranks, self._index, silence)
        try:
            with self._work.under_way():
                yield self._work
        finally:
            self._work = None


class JointWork:
    """What some ranks do together, each seeing that the others live. Made by :meth:`Rendezvous.at_work`."""

    def __init__(self, store: dist.Store, number: int, ranks: list[int], index: int, silence: timedelta):
        self._number, self._ranks, self._index, self.silence = number, ranks, index, silence
        self._own: dist.Store = store.clone()  # type: ignore[attr-defined]
        self._store = dist.PrefixStore(str(number), store)
        # The same, and not held by who waits at the store, as Gloo does.
        self.own_store = dist.PrefixStore(str(number), self._own)
        self._exchanges = itertools.count()

    def exchange(self, text: str, timeout: timedelta) -> list[str]:
        """The texts of all."""
        about = f"texts {next(self._exchanges)}"
        return exchange_texts(self.own_store, about, self._ranks, self._index, text, timeout, life=self.life)

    def part(self, name: str, members: Sequence[int] | None = None) -> "SubWork":
        """Done by those members alone, of which this rank is one; by all where None."""
        members = range(len(self._ranks)) if members is None else members
        ranks = [self._ranks[member] for member in members]
        return SubWork(self, dist.PrefixStore(name, self._store), name, ranks, members.index(self._index))

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """A thread gives the signs of life. In the end it clears the store: the work need not wait for that."""
        rank, over, well = self._ranks[self._index], threading.Event(), False

        def live() -> None:
            with contextlib.suppress(RuntimeError):  # without a store the work fails, too
                self._beat()
                while not over.wait(self.silence.total_seconds() / _BEATS):
                    self._beat()
                if well:
                    self._leave()

        threading.Thread(target=live, name="dltrain_ext: at work", daemon=True).start()
        try:
            yield
            well = True
        except BaseException as error:
            said = str(error) or type(error).__name__
            with contextlib.suppress(RuntimeError):
                self.own_store.set("failed", f"communicator of ranks {self._ranks}: rank {rank} failed: {said}")
            raise
        finally:
            over.set()

    def _beat(self) -> None:
        self.own_store.add(f"beats/{self._ranks[self._index]}", 1)

    def _leave(self) -> None:
        """The last one clears the store of this work, and of the meetings before it."""
        if self.own_store.add("left", 1) == len(self._ranks):
            for key in self._own.list_keys():
                if int(key.partition("/")[0]) <= self._number:
                    self._own.delete_key(key)

    def life(self, rank: int) -> int:
        """What changes while it is at work. Raises DistBackendError where one of them has failed at it."""
        if self.own_store.check(["failed"]):
            raise dist.DistBackendError(self.own_store.get("failed").decode())
        return self.own_store.add(f"beats/{rank}", 0)


class SubWork:
    """A part of the work: its ``ranks``, this one's place among them, ``rank``, and a ``store`` for what they make."""

    def __init__(self, work: JointWork, store: dist.Store, name: str, ranks: list[int], rank: int):
        self._work, self.name = work, name
        self.store, self.ranks, self.rank = store, ranks, rank

    def agree(self, answer: str) -> list[str]:
        """The answers of all of them, who are waited for while at work. Once for each part."""
        work, about = self._work, f"{self.name}/answers"
        return exchange_texts(work.own_store, about, self.ranks, self.rank, answer, work.silence, life=work.life)


def _no_life(rank: int) -> int:
    return 0


def exchange_texts(
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
            if store.check(keys[member:]):  # at one go, since the store may be far away
                break
            if not wait_for_key(store, key, timeout, began, functools.partial(life, ranks[member])):
                raise dist.DistBackendError(
                    f"communicator of ranks {ranks}: rank {ranks[member]} did not come in {timeout}"
                )
        return [said.decode() for said in store.multi_get(keys)]
    except dist.DistNetworkError as error:
        raise dist.DistBackendError(f"communicator of ranks {ranks}: the store of their group is gone") from error


def wait_for_key(
    store: dist.Store, key: str, timeout: timedelta, began: float, life: Callable[[], int] = lambda: 0
) -> bool:
    """Whether it is there in time; the store's own wait() could not be interrupted, and warns of a timeout."""
    (pause, longest), seen = _LOOKS, None
    while not store.check([key]):
        sign = life()
        if seen is not None and sign != seen:
            began = time.monotonic()
        elif time.monotonic() - began > timeout.total_seconds():
            return False
        seen = sign
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return True
