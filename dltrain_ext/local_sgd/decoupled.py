"""Sites that do not wait for each other: servers average what they have moved, and take the outer steps."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dltrain_ext import _ops, optim
from dltrain_ext._arguments import as_number
from dltrain_ext.local_sgd import checkpoint
from dltrain_ext.local_sgd.exchange import Exchange
from dltrain_ext.local_sgd.fragments import Fragment, divide
from dltrain_ext.local_sgd.settings import Settings
from dltrain_ext.local_sgd.trained import Trained
from dltrain_ext.ps import Store, Work
from dltrain_ext.ps.gradients import are_finite

_MOMENTUM = "momentum_buffer"  # in the state of the servers' optimizer

_log = logging.getLogger("dltrain_ext")


@dataclass
class _Flight:
    """A fragment whose movement the servers have: the pull of the version that contains it."""

    pull: Work
    departed: int  # the inner step after which it was sent
    lands: int  # the one after which the version is used, if it is there


class Decoupled(Exchange):
    """The keys of a store are the parameters. Each site pushes how far a fragment has moved when its turn comes, and
    pulls the version of which that is a part. While a fragment is under way the site goes on with others.

    Args:
        trained, inner, settings, quorum, grace, weight: see :class:`dltrain_ext.local_sgd.DiLoCo`.
        store: one without keys; this makes another one on the same ranks.
    """

    def __init__(
        self,
        trained: Sequence[Trained],
        inner: Optimizer,
        settings: Settings,
        store: Store,
        quorum: str | int,
        grace: timedelta | None,
        weight: float,
    ):
        if not as_number(weight, "weight") > 0:
            raise ValueError(f"weight: expected more than 0, got {weight!r}")
        if grace is None and weight != 1.0:
            raise ValueError(f"weight: expected 1.0 without a grace, got {weight!r}")
        self.store = store.with_options(
            optimizer=optim.SGD,
            quorum=quorum,
            grace=grace,
            staleness=None,
            codec=settings.codec,
            error_feedback=settings.error_feedback,
            **settings.rule,
        )
        parts = divide([each.parameter.numel() for each in trained], settings.fragments)
        fragments = [
            Fragment(trained[part.start : part.stop], has_momentum=False, has_feedback=False) for part in parts
        ]
        super().__init__(inner, settings, fragments)
        self._codec = _ops.find_codec(settings.codec)
        self._is_synchronous, self._grace, self._weight = quorum == "all", grace, weight
        self._flights: dict[int, _Flight] = {}  # by the place of the fragment
        self._departed = [0] * len(fragments)
        self._turn = 0
        self._sent = 0
        self._has_begun = False
        self._loaded = 0  # outer steps before those of this store

    def begin(self, *_: Any) -> None:
        """Before the first step, gives all sites the parameters of the first one."""
        if not self._has_begun:
            self._open()
            for fragment in self.fragments:
                fragment.restore(self._inner)

    def _open(self) -> None:
        """Makes the keys of the store. It is a collective call of all sites."""
        for fragment in self.fragments:
            fragment.remember(self._inner)
        self.store.init(self._backups)
        self._has_begun = True

    @property
    def _backups(self) -> dict[str, Tensor]:
        return {name: value for each in self.fragments for name, value in each.named(each.backup).items()}

    def stepped(self, *_: Any) -> None:
        self.steps += 1
        for place, flight in list(self._flights.items()):
            if self.steps >= flight.lands:
                self._land(place, waits=self.steps == flight.lands)
        if self.steps >= self._due:
            self._due = self.steps + self._settings.interval
            place, self._turn = self._turn, (self._turn + 1) % len(self.fragments)
            if place in self._flights:  # its last version is not made yet, so what it moves goes with its next turn
                return
            self._depart(place)
            if self._settings.delay == 0:
                self._land(place, waits=True)

    def _depart(self, place: int) -> None:
        fragment = self.fragments[place]
        kept = fragment.named(fragment.backup)
        moved = {each.name: kept[each.name] - each.value(self._inner).to("cpu").float() for each in fragment.trained}
        weight = None
        if self._grace is not None:
            weight = self._weight * (self.steps - self._departed[place]) / self._settings.sync_every
        began = time.monotonic()
        self.store.push(moved, weight=weight, finite=are_finite(moved.values()))
        pull = self.store.pull(kept, applied=True)
        self.waited += time.monotonic() - began
        self._sent += sum(self._codec.bytes(each.numel) for each in fragment.trained)
        self._departed[place] = self.steps
        self._flights[place] = _Flight(pull, self.steps, self.steps + self._settings.delay)

    def _land(self, place: int, waits: bool) -> None:
        """Takes the version of a fragment, if it is there. ``waits``: for all sites, or as long as others wait for this
        one."""
        flight = self._flights[place]
        began = time.monotonic()
        if waits and self._is_synchronous:
            flight.pull.wait()
        patience = self._grace if waits and self._grace is not None else timedelta()
        arrived = flight.pull.completes_within(patience)
        self.waited += time.monotonic() - began
        if not arrived:
            return
        flight.pull.wait()
        del self._flights[place]
        own_share = self._settings.mix if self.steps > flight.departed else 0.0
        fragment = self.fragments[place]
        for each, value in zip(fragment.trained, fragment.named(fragment.backup).values(), strict=True):
            each.write(self._inner, value, 1.0 - own_share)
        self.outer_steps += 1
        if flight.pull.versions.skipped:
            self.nonfinite += 1
            _log.warning(
                "local_sgd: version %d of a fragment is that before, because what a site has moved is not finite",
                flight.pull.versions.highest,
            )

    def finish(self) -> None:
        for place in list(self._flights):
            self._land(place, waits=True)

    def save(self) -> dict[str, Any]:
        self.begin()
        self.finish()
        whole = self.store.save()
        assert whole is not None
        flats = {"backup": whole.values, "momentum": {}}
        if self._settings.momentum:
            flats["momentum"] = {name: entry[_MOMENTUM] for name, entry in whole.entries.items()}
        lost: dict[str, Tensor] = {}
        for name, first, piece in self._residuals():
            lost.setdefault(name, torch.zeros(whole.values[name].shape)).view(-1)[first : first + piece.numel()] = piece
        outer = self._loaded + whole.versions[0] * len(self.fragments)
        counts = checkpoint.Counts(outer, self.steps, self._due - self.steps)
        return checkpoint.save(flats, lost, counts, self.store.worker, self.store.workers)

    def load(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        if self.steps:
            raise RuntimeError(f"load_state_dict: expected a site that has made no step yet, got one of {self.steps}")
        if not self._has_begun:
            self._open()
        has_momentum = self._settings.momentum != 0
        loaded = checkpoint.check(state_dict, self.fragments, has_momentum, self.store.worker, self.store.workers)
        local, params = self.store.local_optimizer(loaded.flats["backup"])
        for name, momentum in loaded.flats["momentum"].items():
            local.state[params[name]] = {_MOMENTUM: momentum.detach().to("cpu", copy=True)}
        self.store.restore(local, params, updated=True)
        for name, first, piece in self._residuals():
            lost = loaded.residuals.get(name)
            piece.zero_() if lost is None else piece.copy_(lost.reshape(-1)[first : first + piece.numel()])
        self.store.pull(self._backups).wait()
        self._loaded = self.outer_steps = loaded.counts.outer
        self.steps = loaded.counts.inner
        self._departed = [self.steps] * len(self.fragments)
        self._turn = self.outer_steps % len(self.fragments)
        self._due = self.steps + min(loaded.counts.due_in, self._settings.interval)

    def _residuals(self) -> Iterator[tuple[str, int, Tensor]]:
        """What encoding has lost: names of parameters, the first element, and memory of the store."""
        for key, piece in self.store.residuals().items():
            name, first = key.rsplit("/", 1)
            yield name, int(first), piece

    def recover(self, group: dist.ProcessGroup | None) -> NoReturn:
        raise RuntimeError(
            "recover: expected sites in a process group, got those of a store, which go on by themselves"
        )

    @property
    def group(self) -> None:
        return None

    @property
    def lost(self) -> None:
        return None

    @property
    def wire_bytes(self) -> int:
        return self._sent

    def close(self) -> None:
        self.store.close()
