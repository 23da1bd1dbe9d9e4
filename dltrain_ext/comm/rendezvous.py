"""Ranks rendezvous at their group's store: each stores a text there and reads the texts of all."""

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist

from dltrain_ext.comm.heart import Heart, beats

_POLLS = 0.001, 0.05  # seconds between two polls of the store: at first, and at most
SILENCE = timedelta(seconds=20)  # without a heartbeat, after which a rank is taken for dead
_BEATS = 4  # heartbeats in that time


class Rendezvous:
    """Exchanges texts between ranks, in the order of the calls. No rank is waited for longer than the timeout.

    Args:
        store: for this object only; when all ranks have completed their work, its keys are deleted.
        ranks: the global ranks of the members.
        index: the index of this rank among them.
        timeout: how long other ranks are waited for, since the exchange began or since their last heartbeat.
        beats: returns how often the heart of a rank has beaten; None if they only have hearts while they are at work.
    """

    def __init__(
        self,
        store: dist.Store,
        ranks: list[int],
        index: int,
        timeout: timedelta,
        beats: Callable[[int], int] | None = None,
    ):
        self._store, self._ranks, self._index, self._timeout = store, ranks, index, timeout
        self._beats = beats
        self._silence = timeout if beats is None else min(timeout, SILENCE)
        self._numbers = itertools.count()
        self._work: JointWork | None = None

    def exchange(self, text: str) -> list[str]:
        """Returns the texts of all ranks, in their order.

        Raises:
            torch.distributed.DistBackendError: a rank did not come, or failed in its work; the message names it.
        """
        if self._work is not None:
            return self._work.exchange(text, self._timeout)
        about = f"{next(self._numbers)}/texts"
        return exchange_texts(self._store, about, self._ranks, self._index, text, self._silence, beats=self._beats)

    @contextlib.contextmanager
    def at_work(self) -> Iterator["JointWork"]:
        """In this context a rank is waited for as long as it is alive, and the others fail at once if it fails."""
        silence = min(self._timeout, SILENCE)
        self._work = JointWork(self._store, next(self._numbers), self._ranks, self._index, silence)
        try:
            with self._work.under_way():
                yield self._work
        finally:
            self._work = None


class JointWork:
    """Work of some ranks, each of which observes that the others are alive. :meth:`Rendezvous.at_work` makes it."""

    def __init__(self, store: dist.Store, number: int, ranks: list[int], index: int, silence: timedelta):
        self._number, self._ranks, self._index, self.silence = number, ranks, index, silence
        self._own: dist.Store = store.clone()  # type: ignore[attr-defined]
        self._store = dist.PrefixStore(str(number), store)
        # The same store on its own connection, which a waiting Gloo does not block.
        self.own_store = dist.PrefixStore(str(number), self._own)
        self._exchanges = itertools.count()

    def exchange(self, text: str, timeout: timedelta) -> list[str]:
        """Returns the texts of all ranks."""
        about = f"texts {next(self._exchanges)}"
        return exchange_texts(self.own_store, about, self._ranks, self._index, text, timeout, beats=self.beats)

    def part(self, name: str, members: Sequence[int] | None = None) -> "SubWork":
        """Returns a part of the work that these members do alone, of which this rank is one; all members if None."""
        members = range(len(self._ranks)) if members is None else members
        ranks = [self._ranks[member] for member in members]
        return SubWork(self, dist.PrefixStore(name, self._store), name, ranks, members.index(self._index))

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Has a heart. At the end its thread clears the store, so that the work need not wait for that."""
        rank = self._ranks[self._index]
        heart = Heart(self.own_store, rank, self.silence.total_seconds() / _BEATS)
        try:
            yield
            heart.stop(then=self._leave)
        except BaseException as error:
            heart.stop()
            said = str(error) or type(error).__name__
            with contextlib.suppress(RuntimeError):
                self.own_store.set("failed", f"communicator of ranks {self._ranks}: rank {rank} failed: {said}")
            raise

    def _leave(self) -> None:
        """The last rank that leaves deletes the keys of this work and of the exchanges before it."""
        if self.own_store.add("left", 1) == len(self._ranks):
            for key in self._own.list_keys():
                if int(key.partition("/")[0]) <= self._number:
                    self._own.delete_key(key)

    def beats(self, rank: int) -> int:
        """Returns the number of a rank's heartbeats. Raises DistBackendError if a rank has failed in the work."""
        if self.own_store.check(["failed"]):
            raise dist.DistBackendError(self.own_store.get("failed").decode())
        return beats(self.own_store, rank)


class SubWork:
    """A part of the work: its ``ranks``, the index of this one among them, ``rank``, and a ``store`` for this part."""

    def __init__(self, work: JointWork, store: dist.Store, name: str, ranks: list[int], rank: int):
        self._work, self.name = work, name
        self.store, self.ranks, self.rank = store, ranks, rank

    def agree(self, answer: str) -> list[str]:
        """Returns the answers of all its ranks, which are waited for while they are alive. It can be called once."""
        work, about = self._work, f"{self.name}/answers"
        return exchange_texts(work.own_store, about, self.ranks, self.rank, answer, work.silence, beats=work.beats)


def exchange_texts(
    store: dist.Store,
    about: str,
    ranks: list[int],
    index: int,
    answer: str,
    timeout: timedelta,
    *,
    beats: Callable[[int], int] | None = None,
) -> list[str]:
    """Stores this rank's answer and returns those of all ranks, in their order.

    Each rank is waited for since now, or since its heartbeats last changed. The error names the rank whose heart has
    stopped, or, without hearts, all ranks that are missing.
    """
    keys = [f"{about}/{member}" for member in range(len(ranks))]
    began = time.monotonic()
    try:
        store.set(keys[index], answer)
        for member, key in enumerate(keys):
            if store.check(keys[member:]):  # all at once, since the store may be far away
                break
            if not wait_for_key(store, key, timeout, began, beats and functools.partial(beats, ranks[member])):
                missing = [ranks[member]]
                if beats is None:  # one of them may be late because it waits for another
                    missing += [ranks[m] for m in range(member + 1, len(keys)) if not store.check([keys[m]])]
                who = f"rank{'s' if missing[1:] else ''} {', '.join(map(str, missing))}"
                raise dist.DistBackendError(f"communicator of ranks {ranks}: {who} did not come in {timeout}")
        return [said.decode() for said in store.multi_get(keys)]
    except dist.DistNetworkError as error:
        raise dist.DistBackendError(f"communicator of ranks {ranks}: the store of their group is gone") from error


def wait_for_key(
    store: dist.Store, key: str, timeout: timedelta, began: float, beats: Callable[[], int] | None = None
) -> bool:
    """Returns whether the key is set in time. The store's own wait() cannot be interrupted, and warns of a timeout."""
    (pause, longest), seen = _POLLS, None
    while not store.check([key]):
        sign = beats() if beats else None
        if seen is not None and sign != seen:
            began = time.monotonic()
        elif time.monotonic() - began > timeout.total_seconds():
            return False
        seen = sign
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return True
