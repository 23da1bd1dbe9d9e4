"""Who the members of a job are. They agree on it in a store, one epoch after another."""

import contextlib
import json
import logging
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dltrain_ext._arguments import check_number
from dltrain_ext.comm.arguments import check_timeout
from dltrain_ext.comm.groups import Members
from dltrain_ext.comm.heart import Heart, beats
from dltrain_ext.comm.rendezvous import SILENCE
from dltrain_ext.elastic.watch import BEAT, Watch

_POLL = 0.02  # s
_QUIET = 4 * BEAT  # s without a heartbeat, after which one whose connection has failed is taken for dead
_SILENT = SILENCE.total_seconds()  # after which any other is

_log = logging.getLogger("dltrain_ext")


class _Epoch(NamedTuple):
    """A time in which the members are the same."""

    number: int
    members: tuple[int, ...]


class Membership:
    """The members of a job, which may leave, die, come back and join while it runs.

    Each process has a number, a new one whenever it joins. A process that joins waits until the members let it in,
    which they do between two outer steps, and becomes a copy of one that has the job's state. A member that is killed
    or stands still is left out; when it goes on, it joins again. Processes need no process group and no rank::

        store = dist.TCPStore("first.site", 29500, is_master=is_first)
        outer = local_sgd.DiLoCo(model, inner, group=elastic.Membership(store, least=2))

    The first ``least`` processes found the job together. Afterwards it has a state, and a process that has none never
    becomes the one that others copy: when all that have the state are lost, the others stop with an error.

    All decisions are made by comparing and setting one key of the store, so there are no two opinions on who is a
    member. The process that has the store must live as long as the job.

    Args:
        store: a ``TCPStore`` that all processes reach.
        name: of the job, for several in a store.
        least: how many processes found the job.
        timeout: how long members wait for one that lives but does not come; then they go on without it.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
    """

    def __init__(
        self, store: dist.Store, *, name: str = "", least: int = 1, timeout: timedelta = timedelta(minutes=30)
    ):
        if not isinstance(store, dist.Store):
            raise TypeError(f"store: expected a torch.distributed.Store, got {type(store).__name__}")
        if not isinstance(name, str):
            raise TypeError(f"name: expected a str, got {name!r}")
        check_number(least, "least", 2**16)
        if least < 1:
            raise ValueError(f"least: expected an int of at least 1, got {least!r}")
        check_timeout(timeout, "timeout")
        self._name, self._least, self._timeout = name, least, timeout
        self._store = dist.PrefixStore(f"dltrain_ext/elastic/{name}", store)
        self._heart: Heart | None = None
        self._gone: set[int] = set()
        self._epoch = _Epoch(0, ())
        self._number = 0
        self._has_state = False

    @property
    def number(self) -> int:
        """That of this process; 0 before it has joined."""
        return self._number

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the present members."""
        return self._epoch.members

    @property
    def epoch(self) -> int:
        """How often the members have changed."""
        return self._epoch.number

    @property
    def has_state(self) -> bool:
        """Whether this process has the state that the members have."""
        return self._has_state

    def is_founded(self) -> bool:
        """Returns whether a member has the state of the job. Until then one that was loaded before may become that.

        :meta private:
        """
        return self._store.check(["founded"])

    def enter(self, alike: str, what: str) -> Members:
        """Joins, and returns the members when this process is one. ``alike``: what all must have in common, and the
        names of the arguments that it comes from.

        Raises:
            ValueError: the others have something else in common.
            torch.distributed.DistBackendError: the job has ended, or its state is lost.

        :meta private:
        """
        self.check_alike(alike, what)
        return self._join()

    def check_alike(self, alike: str, what: str) -> None:
        """Raises ValueError if others, who call this with the same ``what``, have something else in common.

        :meta private:
        """
        if self._store.compare_set(f"alike/{what}", "", alike).decode() != alike:
            raise ValueError(f"{what}: expected the same as the members of job {self._name!r} have")

    def announce(self, among: Iterable[int] = (), lost: Iterable[int] = ()) -> None:
        """Lets in those who wait, in the next epoch. The first of the members decides; after an outer step it does so
        before it sends its part, so all others know it when they have the result. ``among``: the members of which the
        first decides, if not all. ``lost``: members that are known to be lost, if it decides.

        :meta private:
        """
        if self._number != min(among, default=min(self.members)):
            return
        waiting = self._arrived(self._others(self.members))
        if not waiting:
            return
        self._bury(lost)
        watch = Watch(self._store)
        watch.silences(waiting)
        time.sleep(2 * BEAT)
        alive = [number for number, silence in watch.silences(waiting).items() if silence < BEAT]
        if self._decided(self._epoch.number + 1) is None:
            self._bury(set(waiting) - set(alive))
        if alive:
            self._decide(self._epoch.number + 1, {*self.members, *alive} - self._left(self.members))

    def is_over(self) -> bool:
        """Returns whether the members are about to change, or one of them cannot go on as they are.

        :meta private:
        """
        following, place = self._epoch.number + 1, f"epochs/{self._epoch.number}"
        return self._store.check([f"{place}/broken"]) or self._store.check([f"epochs/{following}/members"])

    def has_left(self, number: int) -> bool:
        """Returns whether this one has left in good order.

        :meta private:
        """
        key = f"gone/{number}"
        return self._store.check([key]) and self._store.get(key) == b"left"

    def is_left_out(self) -> bool:
        """Returns whether the others have gone on without this process.

        :meta private:
        """
        following = self._decided(self._epoch.number + 1)
        return bool(self._left([self._number])) or (following is not None and self._number not in following.members)

    def watch(self) -> Watch:
        """Returns an observer of the others, for :meth:`silent`.

        :meta private:
        """
        return Watch(self._store)

    def silent(self, watch: Watch, numbers: Iterable[int], *, may_leave: bool = False) -> set[int]:
        """Returns those that are taken for dead, or have left; not at once where they ``may_leave`` in good order.

        :meta private:
        """
        numbers = set(numbers)
        silences, left = watch.silences(numbers), self._left(numbers)
        if may_leave:
            left = {number for number in left if not self.has_left(number)}
        return {number for number in numbers if number in left or silences[number] > self._patience(number)}

    def end(self) -> None:
        """Ends the job, so that nobody waits any longer to become a member.

        :meta private:
        """
        self._store.set("ended", "1")

    def has_ended(self) -> bool:
        """Returns whether the job was ended.

        :meta private:
        """
        return self._store.check(["ended"])

    def changed(self, steps: int | None = None) -> Members | None:
        """Returns the members after so many outer steps if they are others than before.

        :meta private:
        """
        if steps is not None:
            self._store.set(f"steps/{self._number}", str(steps))
        decided = self._decided(self._epoch.number + 1)
        if decided is not None and self._number not in decided.members:
            raise dist.DistBackendError(f"member {self._number} was left out after it had stood still")
        return None if decided is None else self._begin(decided)

    def give_up(self, *lost: int | None) -> None:
        """Lets all know that the members cannot go on as they are; the present ones then meet in :meth:`recover`.

        :meta private:
        """
        self._store.set(f"epochs/{self._epoch.number}/broken", "1")
        for number in lost:
            if number is not None:
                self._store.set(f"suspected/{number}", "1")

    def recover(self, *lost: int | None) -> Members:
        """Returns the members that go on when those before could not. ``lost``: those who are responsible, if that is
        known. Where the others have gone on without this process, it joins again, and has no state.

        :meta private:
        """
        self.give_up(*lost)
        return self._next()

    def keep(self) -> None:
        """This member has the state of the job.

        :meta private:
        """
        if not self._has_state:
            self._store.set("founded", "1")
            self._has_state = True

    def leave(self) -> None:
        """Leaves the job in good order: when the others have taken the outer steps that this member has taken, or have
        failed to, or are late."""
        if self._heart is None:
            return
        with contextlib.suppress(dist.DistNetworkError):  # the store is gone, and so the job has ended
            if self._number in self.members:
                self._await_others()
            self._store.set(f"gone/{self._number}", "left")
        self._heart.stop()
        self._heart = None

    def _await_others(self) -> None:
        began, watch, own = time.monotonic(), Watch(self._store), self._steps(self._number)
        while not self._store.check([f"epochs/{self.epoch}/broken"]):
            others = set(self.members) - self._left(self.members) - {self._number}
            silences = watch.silences(others)
            behind = [n for n in others if silences[n] < self._patience(n) and self._steps(n) < own]
            if not behind or time.monotonic() - began > self._timeout.total_seconds():
                return
            time.sleep(_POLL)

    def _join(self) -> Members:
        if self._heart is not None:
            self._heart.stop()
        self._number, self._has_state = self._store.add("numbers", 1), False
        own_connection: dist.Store = self._store.clone()  # type: ignore[attr-defined]
        self._heart = Heart(own_connection, self._number, BEAT)
        newest = int(self._store.get("epoch")) if self._store.check(["epoch"]) else 0  # or an earlier one
        self._epoch = self._decided(newest) or _Epoch(0, ())
        return self._next()

    def _next(self) -> Members:
        """Waits for an epoch with this process in it, and for its members."""
        while True:
            decided = self._await_decision()
            if decided is None or (self._number in self.members and self._number not in decided.members):
                _log.warning("elastic: member %d was left out, and joins again", self._number)
                return self._join()
            if self._number not in decided.members:
                self._epoch = decided
                continue
            try:
                return self._begin(decided)
            except dist.DistBackendError as error:
                _log.warning("elastic: %s", error)

    def _await_decision(self) -> _Epoch | None:
        """Waits for the epoch after the present one, and decides on it if nobody else does. Returns None if this
        process was taken for dead."""
        following = self._epoch.number + 1
        self._store.set(f"arrived/{following}/{self._number}", str(int(self._has_state)))
        began, watch = time.monotonic(), Watch(self._store)
        while True:
            if (decided := self._decided(following)) is not None:
                return decided
            if self._number not in self.members and self._left([self._number]):
                return None
            if self.has_ended():
                raise dist.DistBackendError(f"job {self._name!r} has ended")
            chosen = self._choose(watch, time.monotonic() - began)
            if chosen:
                self._decide(following, chosen)  # perhaps after another one
            else:
                time.sleep(_POLL)

    def _choose(self, watch: Watch, waited: float) -> list[int]:
        """Returns the members of the next epoch, or none as long as some may still come.

        Raises DistBackendError if nobody is left who has the state.
        """
        before = set(self.members) - self._left(self.members)
        numbers = before | set(self._others(self.members))
        arrived = self._arrived(numbers)
        silences = watch.silences(numbers)
        dead = {n for n, silence in silences.items() if silence > (_QUIET if n in arrived else self._patience(n))}
        here = sorted(arrived.keys() - dead)
        if not self.members:
            return here if len(here) >= self._least and self._number == here[0] else []
        awaited = before - dead - set(arrived)
        if self._number in self.members and waited > self._timeout.total_seconds():
            awaited = set()
        if awaited:
            return []
        if any(arrived[number] for number in here) or not self.is_founded():
            return here
        if self._decided(self._epoch.number + 1) is not None:
            return []
        all_left = all(self.has_left(number) for number in self.members if number != self._number)
        why = "has ended: all members have left" if all_left else "has lost all members that had its state"
        raise dist.DistBackendError(
            f"job {self._name!r} {why}; its last members were {list(self.members)}. Start it again, from a checkpoint"
        )

    def _begin(self, epoch: _Epoch) -> Members:
        """Enters an epoch, when all its members do. Raises DistBackendError if one of them does not come."""
        self._epoch = epoch
        place = f"epochs/{epoch.number}"
        self._store.set(f"{place}/ready/{self._number}", "1")
        watch, missing = Watch(self._store), list(epoch.members)
        while missing:
            self._check_whole(epoch.number)
            missing = [number for number in missing if not self._store.check([f"{place}/ready/{number}"])]
            if lost := self.silent(watch, missing):
                self.give_up(min(lost))
                raise dist.DistBackendError(f"epoch {epoch.number}: member {min(lost)} did not come")
            if missing:
                time.sleep(_POLL)
        return Members(
            name=f"{self._name} epoch {epoch.number}",
            description="",
            ranks=list(epoch.members),
            rank=self._number,
            store=dist.PrefixStore(f"{place}/communicator", self._store),
            timeout=self._timeout,
            device=torch.device("cpu"),
            beats=lambda number: self._beats(epoch.number, number),
        )

    def _check_whole(self, epoch: int) -> None:
        if self._store.check([f"epochs/{epoch}/broken"]):
            raise dist.DistBackendError(f"epoch {epoch}: another member could not enter it")

    def _beats(self, epoch: int, number: int) -> int:
        self._check_whole(epoch)
        return beats(self._store, number)

    def _patience(self, number: int) -> float:
        """Returns the seconds without a heartbeat after which it is taken for dead."""
        return _QUIET if self._store.check([f"suspected/{number}"]) else _SILENT

    def _steps(self, number: int) -> int:
        """Returns how many outer steps a member has told that it has taken."""
        key = f"steps/{number}"
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _decide(self, number: int, members: Iterable[int]) -> None:
        """Makes this the next epoch, unless another one was decided on."""
        decided = self._store.compare_set(f"epochs/{number}/members", "", json.dumps(sorted(members)))
        self._store.set("epoch", str(number))
        self._bury(set(self.members) - set(json.loads(decided)))

    def _decided(self, number: int) -> _Epoch | None:
        key = f"epochs/{number}/members"
        if number < 1 or not self._store.check([key]):
            return None
        members: Any = json.loads(self._store.get(key))
        return _Epoch(number, tuple(members))

    def _arrived(self, numbers: Iterable[int]) -> dict[int, bool]:
        """Returns those that wait for the next epoch, and whether they have the state."""
        keys = {number: f"arrived/{self._epoch.number + 1}/{number}" for number in numbers}
        return {number: self._store.get(key) == b"1" for number, key in keys.items() if self._store.check([key])}

    def _others(self, members: Iterable[int]) -> list[int]:
        """Returns the numbers of those that are no members, and not known to be gone."""
        numbers = set(range(1, self._store.add("numbers", 0) + 1)) - set(members)
        return sorted(numbers - self._left(numbers))

    def _left(self, numbers: Iterable[int]) -> set[int]:
        unknown = set(numbers) - self._gone
        self._gone |= {number for number in unknown if self._store.check([f"gone/{number}"])}
        return self._gone & set(numbers)

    def _bury(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._store.compare_set(f"gone/{number}", "", "lost")
