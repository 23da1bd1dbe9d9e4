"""Outer optimizers: the sites of a run train on their own, and from time to time average what they have moved."""

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
from dltrain_ext.local_sgd.fragments import Fragment, divide
from dltrain_ext.local_sgd.link import Link
from dltrain_ext.local_sgd.settings import NAMES, Settings
from dltrain_ext.local_sgd.sites import site_of
from dltrain_ext.local_sgd.snapshot import Snapshot
from dltrain_ext.local_sgd.trained import Trained, trained

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


class DiLoCo:
    """Averages the models of several sites every ``sync_every`` steps of their own optimizers (Douillard et al. 2023,
    arXiv 2311.08105).

    It hooks on ``inner.step()``, so that the training loop does not change. After ``sync_every`` steps the mean over
    the sites of how far each has moved is the gradient of an outer optimizer, stochastic gradient descent with
    momentum, whose result becomes the parameters of all sites. What a site sends is encoded. The state of the inner
    optimizer and buffers of the model, such as those of batch normalization, stay at each site.

    With ``fragments`` the model is averaged in as many parts, one after another, so that links carry a part of the
    bytes at a time; with ``delay`` they do so while the sites go on training (Streaming DiLoCo, Douillard et al. 2025,
    arXiv 2501.18512)::

        outer = local_sgd.DiLoCo(model, inner, sync_every=100, fragments=4, delay=20)

    A site may have several ranks, by DDP or FSDP2. Then ``group`` has the ranks with the same place at all sites::

        mesh = init_device_mesh("cpu", (sites, ranks_per_site), mesh_dim_names=("sites", "ranks"))
        model = DistributedDataParallel(module, process_group=mesh.get_group("ranks"))
        outer = local_sgd.DiLoCo(model, inner, group=mesh.get_group("sites"))

    Ranks of a site that have the same parameters share the work, so a site sends as much as one rank would. After each
    outer step all sites have the same bits. A digest of them goes with the next average, which fails if they differ.

    Making it is a collective call over the group. If the parameters of the sites differ at the first step, those of the
    group's first rank are sent to all, unless a state was loaded. It has two copies of the parameters in fp32, in the
    CPU's memory also if they are on CUDA, one without momentum, and one more with ``error_feedback``; while a part is
    under way, with ``delay`` or on CUDA, also a copy of that part. Messages go over Gloo, whatever the backend of the
    group. Before a part is sent from CUDA the host waits for the device once.

    Args:
        model: the module, or the DDP or FSDP2 model.
        inner: its optimizer, any of torch's interface. A loss scaler may skip its steps; sites then reach the next
            average later.
        sync_every: the number of steps between two averages of a parameter; a multiple of ``fragments``.
        lr, momentum, nesterov: of the outer optimizer.
        fragments: the number of parts of the model.
        delay: the number of steps that the sites go on while a part is under way, less than ``sync_every /
            fragments``.
        mix: with ``delay``, the share of a site's own parameters in the new ones, the rest is the outer optimizer's.
        codec: one of ``codecs.CODECS``. Parameters of at most one dimension, and those of fewer than
            ``min_compress_numel`` elements, are sent as fp32 in the same messages.
        error_feedback: add what encoding loses to the next average, as in :class:`dltrain_ext.ddp.AllReduceState`.
        group: a rank of each site; the default group if None. Or the :class:`dltrain_ext.elastic.Membership` of a job
            whose sites, of one rank each, come and go. It begins with the first step, which waits until this site is a
            member; one that joins takes what all sites have, bit for bit, and its first gradients are not used. When a
            site is lost the others go on by themselves.
        timeout: how long an average may wait for the other sites; the group's own timeout if None.
        allow_public: send over public addresses, although nothing is encrypted or authenticated (docs/security.md).

    Attributes:
        steps: of the inner optimizer.
        outer_steps: of all fragments together.

    Raises:
        TypeError, ValueError: an argument is invalid, or differs between the sites.
        PermissionError: a rank would be reached at a public address.
        torch.distributed.DistBackendError: a site did not come.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer,
        *,
        sync_every: int = 100,
        lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        fragments: int = 1,
        delay: int = 0,
        mix: float = 0.5,
        codec: str = "int4",
        error_feedback: bool = True,
        group: dist.ProcessGroup | Membership | None = None,
        timeout: timedelta | None = None,
        min_compress_numel: int = 1024,
        allow_public: bool = False,
    ):
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(inner, Optimizer):
            raise TypeError(f"inner: expected a torch.optim.Optimizer, got {type(inner).__name__}")
        if not isinstance(allow_public, bool):
            raise TypeError(f"allow_public: expected a bool, got {allow_public!r}")
        self._settings = Settings(
            sync_every, lr, momentum, nesterov, fragments, delay, mix, codec, error_feedback, min_compress_numel
        )
        self._trained = trained(model)
        if fragments > len(self._trained):
            raise ValueError(
                f"fragments: expected at most the number of trained parameters, {len(self._trained)}, got {fragments}"
            )
        self._inner, self._link = inner, Link(timeout, allow_public)
        self._membership = group if isinstance(group, Membership) else None
        self._group = None if isinstance(group, Membership) else group_of(group)
        self._site = site_of(model, self._trained, self._group)
        self._owners = self._site.owners(self._trained)
        self._parts = divide([each.parameter.numel() for each in self._trained], fragments)
        self._fragments = [
            Fragment(
                [self._trained[i] for i in part if self._site.is_own(self._owners[i])],
                has_momentum=momentum != 0,
                has_feedback=error_feedback,
            )
            for part in self._parts
        ]
        self._on_cuda = self._trained[0].device.type == "cuda"
        self._snapshot = Snapshot(self._fragments, self._on_cuda) if delay or self._on_cuda else None
        self._flight: _Flight | None = None
        self._spoilt: Fragment | None = None  # whose residuals are those of an average that has failed
        self.steps = self.outer_steps = 0
        self._due = self._settings.interval
        self._waited = 0.0
        self._nonfinite = 0
        if self._group is None:
            self._lay(2)  # or more sites; it is for a state that is loaded before
        else:
            self._connect(members_of(self._group))
            if not self._link.agree(self._alike):
                raise ValueError(f"{NAMES}: expected the same at all sites")
        self._remember()
        self._has_begun = self._has_loaded = False
        self._beginning = inner.register_step_pre_hook(self._begin)
        self._hook = inner.register_step_post_hook(self._stepped)

    def _connect(self, members: Members) -> None:
        self._link.connect(members)
        self._lay(len(members.ranks))

    def _lay(self, sites: int) -> None:
        codec = "raw" if sites == 1 else self._settings.codec  # a site alone sends nothing
        for fragment in self._fragments:
            fragment.lay(codec, self._settings.min_compress_numel, sites)
        # It is kept, because mapping new memory can take as long as the outer step itself.
        self._message = torch.empty(max(each.message_bytes for each in self._fragments), dtype=torch.uint8)

    @property
    def _alike(self) -> int:
        """A number of what all sites must have in common."""
        layouts = [each.layout for fragment in self._fragments for each in fragment.trained]
        return hashed(f"{self._settings} {layouts}".encode())

    def _remember(self) -> None:
        """Takes the present parameters as those after the last outer step."""
        for fragment in self._fragments:
            fragment.remember(self._inner)

    def _begin(self, *_: Any) -> None:
        """Is called before each step. Before the first one, unless a state was loaded, it gives all sites the same
        parameters."""
        if self._has_begun:
            return
        if self._membership is not None:
            self._enter(self._membership)
        elif not self._has_loaded:
            self._remember()
            equalize(self._link, self._fragments, self._inner)
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
                if not self._link.agree(digest(self._fragments, self.outer_steps)):
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

    def _stepped(self, *_: Any) -> None:
        """Is called after each step of the inner optimizer."""
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
        return self.outer_steps % len(self._fragments)

    def _depart(self) -> None:
        """Sends how far a fragment has moved."""
        if self._membership is not None:
            self._membership.announce()
        fragment = self._fragments[self._turn]
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
        self._waited += time.monotonic() - began if waits else 0.0

    def _land(self) -> None:
        """Takes the outer step of the fragment that is under way, when the mean has arrived."""
        flight = self._flight
        assert flight is not None
        if flight.work is not None:
            began = time.monotonic()
            flight.work.wait()
            self._waited += time.monotonic() - began
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
            self._nonfinite += 1
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
        """Waits for the average that is under way, if there is one, and takes its outer step at once."""
        if self._flight is not None:
            with self._trying():
                self._land()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group that has a rank of each site; None if they are members of a job."""
        return self._group

    @property
    def lost(self) -> int | None:
        """The global rank that is responsible for the failure of an average; None if there is none, or it is not
        known."""
        return self._link.lost

    def recover(self, group: dist.ProcessGroup | None = None) -> None:
        """Continues with the sites that are left when one has been lost, after an average has raised an error::

            try:
                inner.step()
            except dist.DistBackendError:
                outer.recover()

        No site loses a step: the parameters stay as they are. The average that failed is taken again after the next
        step of the inner optimizer. Sites that had the mean before the error pass its outer step on to those that had
        not. What error feedback holds for the fragment that was under way is lost. It is a collective call of the sites
        that are left.

        Args:
            group: a rank of each of them. None: a new one of the ranks of ``group`` without ``lost``, which needs the
                store of the default group.

        Raises:
            RuntimeError: no rank is known to be lost, and no group was given; or a site has several ranks; or the sites
                are members of a job, who go on by themselves.
        """
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
        (self.outer_steps, due_in), taken = catch_up(self._link, self._fragments, self._inner, own, has_state)
        if taken:  # one that joins has its averages when the others do
            self._due = self.steps + (self._settings.interval if has_state else due_in)
        for index in taken:
            self._share(self._parts[index])

    def state_dict(self) -> dict[str, Any]:
        """Returns plain tensors and numbers, for ``torch.save`` on every rank: counts, what all sites had after the
        last outer step, its momentum, and the residuals of this rank.

        An average that is under way is finished first, see :meth:`finish`; all sites should save after the same step.
        """
        self.finish()
        counts = checkpoint.Counts(self.outer_steps, self.steps, self._due - self.steps)
        return checkpoint.save(self._fragments, counts, *self._place)

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continues from a checkpoint, on all ranks. The parameters are those of the model's own checkpoint, loaded
        before or after.

        Args:
            state_dict: that of this rank if there are as many sites, else a list of those of all sites, whose residuals
                are added up.

        Raises:
            TypeError, ValueError: the state is invalid; nothing has changed.
            RuntimeError: an average is under way, which would write to what is loaded; :meth:`finish` waits for it.
        """
        loaded = checkpoint.check(state_dict, self._fragments, *self._place)
        if self._membership is not None and self._has_begun:
            raise RuntimeError("load_state_dict: expected a member that has made no step yet, got one that has")
        if self._flight is not None:
            raise RuntimeError("load_state_dict: expected no average under way, got one; call finish() first")
        self._has_loaded = True
        checkpoint.apply(loaded, self._fragments)
        self.outer_steps, self.steps, due_in = loaded.counts
        self._due = self.steps + min(due_in, self._settings.interval)

    @property
    def _place(self) -> tuple[int, int]:
        """The rank in the group, and the number of its ranks. What a member of a job saves stands for itself."""
        if self._group is None:
            return 0, 1
        return dist.get_rank(self._group), dist.get_world_size(self._group)

    def metrics(self) -> dict[str, float]:
        """Returns numbers for a logger: ``outer/steps``; ``outer/waited``, the seconds in which training stood still
        for averages; ``outer/nonfinite``, the outer steps whose mean was not finite everywhere; and
        ``outer/wire_bytes``, what this rank has sent."""
        return {
            "outer/steps": self.outer_steps,
            "outer/waited": self._waited,
            "outer/nonfinite": self._nonfinite,
            "outer/wire_bytes": self._link.wire_bytes,
        }

    def close(self) -> None:
        """Ends the averaging. An average that is under way is given up, and a member leaves its job."""
        self._beginning.remove()
        self._hook.remove()
        if self._membership is not None:
            self._membership.leave()
        self._link.close()


class LocalSGD(DiLoCo):
    """Sets the parameters of all sites to their mean every ``sync_every`` steps (Stich 2018, arXiv 1805.09767): a
    :class:`DiLoCo` with ``lr=1``, ``momentum=0`` and, by default, exact messages."""

    def __init__(self, model: nn.Module, inner: Optimizer, *, sync_every: int = 10, codec: str = "raw", **options: Any):
        if own := {"lr", "momentum", "nesterov"} & options.keys():
            raise TypeError(f"{', '.join(sorted(own))}: expected none, since LocalSGD averages; DiLoCo has them")
        super().__init__(
            model, inner, sync_every=sync_every, codec=codec, lr=1.0, momentum=0.0, nesterov=False, **options
        )
