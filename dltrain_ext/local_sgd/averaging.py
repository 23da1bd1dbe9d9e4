"""The averages of sites that all take the same outer steps, each with its own optimizer."""

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dltrain_ext import _ops
from dltrain_ext.comm.groups import Members, group_of, members_of
from dltrain_ext.comm.work import Work
from dltrain_ext.elastic import Membership
from dltrain_ext.local_sgd import checkpoint
from dltrain_ext.local_sgd.agreement import Standing, catch_up, digest, equalize, hashed
from dltrain_ext.local_sgd.exchange import Exchange
from dltrain_ext.local_sgd.fragments import Fragment, divide
from dltrain_ext.local_sgd.link import Link
from dltrain_ext.local_sgd.settings import NAMES, Settings
from dltrain_ext.local_sgd.sites import site_of
from dltrain_ext.local_sgd.snapshot import Snapshot
from dltrain_ext.local_sgd.trained import Trained

_ATTEMPTS = 8  # to connect members, of which others are lost meanwhile

_log = logging.getLogger("dltrain_ext")


@dataclass
class _Flight:
    """An average under way: what it is of, where it arrives, and after which inner step it is used."""

    fragment: Fragment
    moved: list[Tensor]  # the values of its parameters that are sent
    message: Tensor
    work: Work | None  # None: it has arrived
    lands: int

    def has_arrived(self) -> bool:
        """Raises what the average has failed with."""
        return self.work is not None and self.work.is_completed() and self.work.wait()


class Averaging(Exchange):
    """All sites average the same fragment at the same time, and take the outer step with the mean.

    Args:
        model, inner, group, timeout, allow_public: see :class:`dltrain_ext.local_sgd.DiLoCo`.
        trained: the parameters of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Sequence[Trained],
        inner: Optimizer,
        settings: Settings,
        group: dist.ProcessGroup | Membership | None,
        timeout: timedelta | None,
        allow_public: bool,
    ):
        self._trained, self._link = trained, Link(timeout, allow_public)
        self._membership = group if isinstance(group, Membership) else None
        self._group = None if isinstance(group, Membership) else group_of(group)
        self._site = site_of(model, trained, self._group)
        self._owners = self._site.owners(trained)
        self._parts = divide([each.parameter.numel() for each in trained], settings.fragments)
        fragments = [
            Fragment(
                [trained[i] for i in part if self._site.is_own(self._owners[i])],
                has_momentum=settings.momentum != 0,
                has_feedback=settings.error_feedback,
            )
            for part in self._parts
        ]
        super().__init__(inner, settings, fragments)
        self._on_cuda = trained[0].device.type == "cuda"
        self._snapshot = Snapshot(fragments, self._on_cuda) if settings.delay or self._on_cuda else None
        self._flight: _Flight | None = None
        self._spoilt: Fragment | None = None  # whose residuals are those of an average that has failed
        if self._group is None:
            self._lay(2)  # or more sites; it is for a state that is loaded before
        else:
            self._connect(members_of(self._group))
            if not self._link.agree(self._alike):
                raise ValueError(f"{NAMES}: expected the same at all sites")
        self._remember()
        self._has_begun = self._has_loaded = False

    def _connect(self, members: Members) -> None:
        self._link.connect(members)
        self._lay(len(members.ranks))

    def _lay(self, sites: int) -> None:
        codec = "raw" if sites == 1 else self._settings.codec  # a site alone sends nothing
        for fragment in self.fragments:
            fragment.lay(codec, self._settings.min_compress_numel, sites)
        # It is kept, because mapping new memory can take as long as the outer step itself.
        self._message = torch.empty(max(each.message_bytes for each in self.fragments), dtype=torch.uint8)

    @property
    def _alike(self) -> int:
        """A number of what all sites must have in common."""
        layouts = [each.layout for fragment in self.fragments for each in fragment.trained]
        return hashed(f"{self._settings} {layouts}".encode())

    def _remember(self) -> None:
        """Takes the present parameters as those after the last outer step."""
        for fragment in self.fragments:
            fragment.remember(self._inner)

    def begin(self, *_: Any) -> None:
        """Before the first step, unless a state was loaded, gives all sites the same parameters."""
        if self._has_begun:
            return
        if self._membership is not None:
            self._enter(self._membership)
        elif not self._has_loaded:
            self._remember()
            equalize(self._link, self.fragments, self._inner)
            for part in self._parts:
                self._share(part)
        self._has_begun = True

    def _enter(self, membership: Membership) -> None:
        if not self._has_loaded:
            self._remember()
        self._go_on(membership, membership.enter(f"{self._alike:x}", NAMES))
        for each in self._trained:  # these gradients are those of other parameters
            if each.parameter.grad is not None:
                each.parameter.grad.zero_()

    def _go_on(self, membership: Membership, members: Members) -> None:
        """Connects the members and gives them one state, and if that fails those that are left."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._connect(members)
                self._catch_up(membership.has_state or (self._has_loaded and not membership.is_founded()))
                if not self._link.agree(digest(self.fragments, self.outer_steps)):
                    raise RuntimeError(
                        f"members {members.ranks}: expected one state after {self.outer_steps} outer steps"
                    )
                break
            except dist.DistBackendError as error:
                _log.warning("local_sgd: %s", error)
                if attempt == _ATTEMPTS:
                    raise
                members = membership.recover(self.lost)
        membership.keep()

    def stepped(self, *_: Any) -> None:
        self.steps += 1
        with self._trying():
            if self._flight is not None:
                if self._flight.has_arrived():  # raises if it has failed
                    self._flight.work = None
                if self.steps >= self._flight.lands:
                    self._land()
            if self.steps >= self._due:
                self._due = self.steps + self._settings.interval
                self._depart()
                if self._settings.delay == 0:
                    self._land()

    @contextlib.contextmanager
    def _trying(self) -> Iterator[None]:
        """After an error nothing is under way, and the next step sends the same fragment again: with those that are
        left, if members come and go."""
        try:
            yield
        except BaseException as error:
            self._abandon()
            self._due = self.steps + 1
            if self._membership is None or not isinstance(error, dist.DistBackendError):
                raise
            _log.warning("local_sgd: %s", error)
            self._forget_spoilt()
            self._go_on(self._membership, self._membership.recover(self.lost))

    def _abandon(self) -> None:
        if self._flight is not None:
            self._spoilt, self._flight = self._flight.fragment, None

    def _forget_spoilt(self) -> None:
        if self._spoilt is not None:
            self._spoilt.forget()
        self._spoilt = None

    @property
    def _turn(self) -> int:
        """The index of the fragment whose turn it is. It depends on what all sites have done together, and not on how
        many steps a site has taken."""
        return self.outer_steps % len(self.fragments)

    def _depart(self) -> None:
        """Sends how far a fragment has moved."""
        if self._membership is not None:
            self._membership.announce()
        fragment = self.fragments[self._turn]
        message = self._message[: fragment.message_bytes]
        moved = [each.value(self._inner) for each in fragment.trained]
        if self._snapshot is not None:
            moved = self._snapshot.take(fragment, moved)
        self._flight = _Flight(fragment, moved, message, None, self.steps + self._settings.delay)
        if not fragment.message_bytes:
            return
        began, waits = time.monotonic(), self._settings.delay == 0
        self._flight.work = fragment.send(
            self._link.communicator, moved, message, digest([fragment], self.outer_steps), waits
        )
        self.waited += time.monotonic() - began if waits else 0.0

    def _land(self) -> None:
        """Takes the outer step of the fragment that is under way, when the mean has arrived."""
        flight = self._flight
        assert flight is not None
        if flight.work is not None:
            began = time.monotonic()
            flight.work.wait()
            self.waited += time.monotonic() - began
        self._flight = None
        fragment, index = flight.fragment, self._turn
        if fragment.message_bytes:
            self._step(flight)
        self.outer_steps += 1
        self._share(self._parts[index])
        if self._membership is not None and (members := self._membership.changed(self.outer_steps)) is not None:
            self._go_on(self._membership, members)

    def _step(self, flight: _Flight) -> None:
        fragment, own_share = flight.fragment, self._settings.own_share
        if not self._on_cuda:
            values = [each.value(self._inner) for each in fragment.trained]
            copies = [each.copy(self._inner) for each in fragment.trained]
            finite = fragment.step(flight.message, values, copies, **self._settings.rule, mix=own_share)
        else:  # the snapshot becomes what the outer step gives, and is mixed on the device
            copies = [None] * len(flight.moved)
            finite = fragment.step(flight.message, flight.moved, copies, **self._settings.rule, mix=0.0)
            for each, value in zip(fragment.trained, flight.moved, strict=True):
                each.write(self._inner, value, 1.0 - own_share)
        if not finite:
            self.nonfinite += 1
            _log.warning(
                "local_sgd: the mean of outer step %d is not finite in some blocks, which keep the values of the outer "
                "step before; a site has diverged",
                self.outer_steps,
            )

    def _share(self, part: Sequence[int]) -> None:
        """Gives the ranks of this site the parameters of a part, from those that have averaged them."""
        for read in (Trained.value, Trained.copy):
            found = [(read(self._trained[i], self._inner), self._owners[i]) for i in part]
            given = [(tensor, owner) for tensor, owner in found if tensor is not None]
            self._site.share([tensor for tensor, _ in given], [owner for _, owner in given])

    def finish(self) -> None:
        if self._flight is not None:
            with self._trying():
                self._land()

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._group

    @property
    def lost(self) -> int | None:
        return self._link.lost

    def recover(self, group: dist.ProcessGroup | None) -> None:
        if self._group is None:
            raise RuntimeError("recover: expected sites in a process group, got members of a job, who go on themselves")
        if self._site.size > 1:
            raise RuntimeError("recover: expected sites of one rank, got one of several; start all ranks again")
        if group is None:
            if self.lost is None:
                raise RuntimeError("group: expected one of the ranks that are left, since no rank is known to be lost")
            left = [rank for rank in dist.get_process_group_ranks(self._group) if rank != self.lost]
            patience = timedelta(seconds=_ops.timeout_of(self._group))
            group = dist.new_group(left, timeout=patience, backend="gloo", use_local_synchronization=True)
        self._group = group_of(group)
        self._abandon()
        self._forget_spoilt()
        self._connect(members_of(self._group))
        self._catch_up(has_state=True)

    def _catch_up(self, has_state: bool) -> None:
        """Takes what others have made while this site was not with them."""
        own = Standing(self.outer_steps, self._due - self.steps)
        (self.outer_steps, due_in), taken = catch_up(self._link, self.fragments, self._inner, own, has_state)
        if taken:  # one that joins has its averages when the others do
            self._due = self.steps + (self._settings.interval if has_state else due_in)
        for index in taken:
            self._share(self._parts[index])

    def save(self) -> dict[str, Any]:
        self.finish()
        counts = checkpoint.Counts(self.outer_steps, self.steps, self._due - self.steps)
        flats, lost = checkpoint.flats_of(self.fragments), checkpoint.lost_of(self.fragments)
        return checkpoint.save(flats, lost, counts, *self._place)

    def load(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        loaded = checkpoint.check(state_dict, self.fragments, self._settings.momentum != 0, *self._place)
        if self._membership is not None and self._has_begun:
            raise RuntimeError("load_state_dict: expected a member that has made no step yet, got one that has")
        if self._flight is not None:
            raise RuntimeError("load_state_dict: expected no average under way, got one; call finish() first")
        self._has_loaded = True
        checkpoint.apply(loaded, self.fragments)
        self.outer_steps, self.steps, due_in = loaded.counts
        self._due = self.steps + min(due_in, self._settings.interval)

    @property
    def _place(self) -> tuple[int, int]:
        """The rank in the group, and the number of its ranks. What a member of a job saves stands for itself."""
        if self._group is None:
            return 0, 1
        return dist.get_rank(self._group), dist.get_world_size(self._group)

    @property
    def wire_bytes(self) -> int:
        return self._link.wire_bytes

    def close(self) -> None:
        if self._membership is not None:
            self._membership.leave()
        self._link.close()
