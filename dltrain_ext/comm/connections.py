"""Makes the connections of a communicator: which ranks are connected, and by which transport."""

import contextlib
import functools
import json
import time
import warnings
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from dltrain_ext import _ops
from dltrain_ext.comm.groups import Members
from dltrain_ext.comm.hosts import host_id, layout
from dltrain_ext.comm.rendezvous import JointWork, Rendezvous, SubWork
from dltrain_ext.comm.transports import Site, Transport, candidates

# The level between hosts, that within a host, and the numbers of hosts and shards.
Levels = tuple["_ops.Level", "_ops.Level | None", tuple[int, int]]


class Connections:
    """Makes the connections of one communicator. Making them is collective, in the order of the calls.

    Args:
        members: the ranks that are connected.
        timeout: how long the peers are waited for.
        transport: one of ``TRANSPORTS``.
        ranks_per_host: the number of consecutive ranks of the group that form a host; None detects hosts.
        answer_timeout: the least time that a rank has to answer what it waits for, when a call has failed.
        measures: whether the first all-reduce by ``"auto"`` may time some plans.
    """

    def __init__(
        self,
        members: Members,
        timeout: timedelta,
        transport: str,
        ranks_per_host: int | None,
        answer_timeout: timedelta,
        measures: bool,
    ):
        self._timeout, self._transport = timeout, transport
        self._ranks, self._rank = members.ranks, members.index
        self._members = _ops.Ranks(members.name, members.description, members.ranks, members.index)
        self._answer_timeout, self._measures = answer_timeout, measures
        self._site = Site.of(members, timeout)
        store = dist.PrefixStore("rendezvous", self._site.store)
        self.rendezvous = Rendezvous(store, members.ranks, members.index, timeout, members.beats)
        told = self.rendezvous.exchange(json.dumps((_trip_to(store), host_id(), self._site.why_without_gloo())))
        trips, hosts, problems = zip(*map(json.loads, told), strict=True)
        if (without := self._unlike("", problems)) and len(members.ranks) > 1:  # the others would wait for it
            rank, problem = without[0]
            raise dist.DistBackendError(f"communicator of ranks {members.ranks}: rank {rank} has no Gloo: {problem}")
        self._round_trip = max(trips)
        self._site.hosts = dict(zip(members.ranks, hosts, strict=True))
        self._layout = layout([*hosts], self._rank, ranks_per_host)

    @property
    def ranks_per_host(self) -> int:
        """The number of ranks on the largest host; 1 if all-reduces have one level."""
        return 1 if self._layout is None else self._layout.largest

    def connect(self, device: torch.device) -> "_ops.Communicator":
        """Connects for tensors on a device, whose index may differ between the ranks."""
        communicator, answer = None, "connected"
        with self.rendezvous.at_work() as work:
            some = candidates(device.type, self._transport)
            tried = (self._levels_if_all_can(work, device, over) for over in some if over.without)
            levels = next((found for found in tried if found is not None), None)
            try:
                if levels is None:
                    levels = self._levels(work, device, some[-1])
                # All ranks, on any device, are connected by the control channel, to find out why a call has failed.
                control = self._site.gloo(work.part("control"), threads=0) if len(self._ranks) > 1 else None
                times = self._timeout.total_seconds(), self._answer_timeout.total_seconds(), self._round_trip
                communicator = _ops.Communicator(*levels, control, self._members, device, *times, self._measures)
            except RuntimeError as error:
                answer = str(error)
            # No rank returns, and makes a call, before all ranks can take part and answer.
            if failed := self._unlike("connected", work.part("made").agree(answer)):
                work.part("failed").agree("")  # one that has died after its answer is the reason
                rank, outcome = failed[0]
                raise dist.DistBackendError(
                    f"communicator of ranks {self._ranks}: rank {rank} could not connect: {outcome}"
                )
        assert communicator is not None
        return communicator

    def close(self) -> None:
        """Makes no more connections. Those that were made belong to the communicators."""
        self._site.close()

    def _unlike(self, expected: str, answers: Iterable[str]) -> list[tuple[int, str]]:
        """Returns the ranks whose answers are others than expected, and these."""
        return [each for each in zip(self._ranks, answers, strict=True) if each[1] != expected]

    def _levels(self, work: JointWork, device: torch.device, over: Transport) -> Levels:
        """The first level has all ranks, and there is no second one, if there is one level."""
        if self._layout is None:
            return over.make(self._site, work.part(f"{over.name}/all"), device), None, (1, 1)
        neighbours, counterparts, hosts, shards, _ = self._layout
        intra_host, answer = None, "connected"
        try:
            intra_host = over.make(self._site, work.part(f"{over.name}/intra/{neighbours[0]}", neighbours), device)
        except RuntimeError as error:
            answer = str(error)
        # On all hosts: otherwise the counterparts of those that have failed would wait for them.
        for rank, outcome in self._unlike("connected", work.part(f"{over.name}/intra").agree(answer)):
            raise RuntimeError(f"rank {rank}: {outcome}")
        inter_host = over.make(self._site, work.part(f"{over.name}/inter/{counterparts[0]}", counterparts), device)
        return inter_host, intra_host, (hosts, shards)

    def _levels_if_all_can(self, work: JointWork, device: torch.device, over: Transport) -> Levels | None:
        if not self._all_have(work, over):
            return None
        levels, answer = None, "connected"
        try:
            levels = self._levels(work, device, over)
        except RuntimeError as error:
            answer = str(error)
        can = self._all_answer("connected", work.part(f"connected over {over.name}"), answer, over)
        return levels if can else None

    def _all_have(self, work: JointWork, over: Transport) -> bool:
        if over.version is None:
            return True
        try:
            answer = f"version {over.version()}"
        except RuntimeError as error:
            answer = str(error)
        return self._all_answer("version ", work.part(over.name), answer, over)

    def _all_answer(self, yes: str, part: SubWork, answer: str, over: Transport) -> bool:
        """Returns whether the answers of all ranks begin with ``yes``. If not, the others are reported as reasons."""
        answers = zip(part.ranks, part.agree(answer), strict=True)
        no = [f"rank {rank}: {text}" for rank, text in answers if not text.startswith(yes)]
        if not no:
            return True
        reasons = "; ".join(no[:4])  # some are only consequences of others
        if self._transport == over.name:
            raise dist.DistBackendError(f"transport: {over.name} cannot be used: {reasons}")
        tell_once(f"{over.without}: {reasons}")
        return False


def _trip_to(store: dist.Store) -> float:
    """Returns the seconds of one round trip to the store."""
    began = time.monotonic()
    with contextlib.suppress(dist.DistNetworkError):  # the exchange reports that the store is gone
        store.check(["round trip"])
    return time.monotonic() - began


@functools.cache
def tell_once(text: str) -> None:
    warnings.warn(f"dltrain_ext: {text}", RuntimeWarning, stacklevel=2)
