"""The connections of a communicator's own: who stands where, and what carries the messages."""

import contextlib
import functools
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from dltrain_ext import _ops
from dltrain_ext.comm.hosts import host_id, layout
from dltrain_ext.comm.rendezvous import JointWork, Rendezvous, SubWork
from dltrain_ext.comm.transports import Site, Transport, candidates

# Across the hosts, and inside one; how many hosts there are, and shares of each.
Levels = tuple["_ops.Level", "_ops.Level | None", tuple[int, int]]


class Connections:
    """Makes them for one communicator; making is collective, in the order of the calls.

    Args:
        store: the group's, under a prefix that belongs to the communicator.
        members: of the group.
        timeout: how long the peers may take to come.
        transport: one of ``TRANSPORTS``; what carries the messages of CUDA tensors.
        ranks_per_host: that many neighbours of the group form a host; where None, hosts are looked up.
        answer_timeout: how long a rank may at least take to say what it waits for, when a call has failed.
        measures: whether the first all-reduce by "auto" may take the time to see which plans are fast.
    """

    def __init__(
        self,
        store: dist.Store,
        members: _ops.Ranks,
        timeout: timedelta,
        transport: str,
        ranks_per_host: int | None,
        answer_timeout: timedelta,
        measures: bool,
    ):
        self._members, self._timeout, self._transport = members, timeout, transport
        self._ranks, self._rank = members.ranks, members.rank
        self._answer_timeout, self._measures = answer_timeout, measures
        self._site = Site(store, timeout)
        self.rendezvous = Rendezvous(dist.PrefixStore("meetings", store), members.ranks, members.rank, timeout)
        said = [each.split(" ", 1) for each in self.rendezvous.exchange(f"{_trip_to(store)} {host_id()}")]
        self._round_trip = max(float(trip) for trip, _ in said)
        hosts = [host for _, host in said]
        self._layout = layout(hosts, self._rank, ranks_per_host)

    @property
    def ranks_per_host(self) -> int:
        """Of the largest host; 1 where all-reduces go in one level."""
        return 1 if self._layout is None else self._layout.largest

    def connect(self, device: torch.device) -> "_ops.Communicator":
        """For tensors on a device, whose number may differ between the ranks."""
        communicator, said = None, "connected"
        with self.rendezvous.at_work() as work:
            some = candidates(device.type, self._transport)
            tried = (self._levels_if_all_can(work, device, over) for over in some if over.version is not None)
            levels = next((found for found in tried if found is not None), None)
            try:
                if levels is None:
                    levels = self._levels(work, device, some[-1])
                # Of all, on any device: where they ask each other why a call has failed.
                control = self._site.gloo(work.part("control"), threads=0) if len(self._ranks) > 1 else None
                times = self._timeout.total_seconds(), self._answer_timeout.total_seconds(), self._round_trip
                communicator = _ops.Communicator(*levels, control, self._members, device, *times, self._measures)
            except RuntimeError as error:
                said = str(error)
            # Nobody leaves, and makes a call, before all are there to take part and to answer.
            for rank, outcome in zip(self._ranks, work.part("made").agree(said), strict=True):
                if outcome != "connected":
                    raise dist.DistBackendError(
                        f"communicator of ranks {self._ranks}: rank {rank} could not connect: {outcome}"
                    )
        assert communicator is not None
        return communicator

    def close(self) -> None:
        """Makes no more; what was made belongs to the communicators."""
        self._site.close()

    def _levels(self, work: JointWork, device: torch.device, over: Transport) -> Levels:
        """Of all ranks, and none, where there is one level."""
        if self._layout is None:
            return over.make(self._site, work.part(f"{over.name}/all"), device), None, (1, 1)
        neighbours, counterparts, hosts, shares, _ = self._layout
        inside = over.make(self._site, work.part(f"{over.name}/inside/{neighbours[0]}", neighbours), device)
        across = over.make(self._site, work.part(f"{over.name}/across/{counterparts[0]}", counterparts), device)
        return across, inside, (hosts, shares)

    def _levels_if_all_can(self, work: JointWork, device: torch.device, over: Transport) -> Levels | None:
        if not self._all_have(work, over):
            return None
        levels, answer = None, "connected"
        try:
            levels = self._levels(work, device, over)
        except RuntimeError as error:
            answer = str(error)
        can = self._all_say("connected", work.part(f"connected over {over.name}"), answer, over)
        return levels if can else None

    def _all_have(self, work: JointWork, over: Transport) -> bool:
        assert over.version is not None
        try:
            answer = f"version {over.version()}"
        except RuntimeError as error:
            answer = str(error)
        return self._all_say("version ", work.part(over.name), answer, over)

    def _all_say(self, yes: str, part: SubWork, answer: str, over: Transport) -> bool:
        """Whether the answers of all ranks begin so; where not, whoever does not say so is why another is taken."""
        answers = zip(part.ranks, part.agree(answer), strict=True)
        no = [f"rank {rank}: {said}" for rank, said in answers if not said.startswith(yes)]
        if not no:
            return True
        reasons = "; ".join(no[:4])  # some are but consequences of others
        if self._transport == over.name:
            raise dist.DistBackendError(f"transport: {over.name} cannot be had: {reasons}")
        tell_once(f"{over.without}: {reasons}")
        return False


def _trip_to(store: dist.Store) -> float:
    """Seconds there and back."""
    began = time.monotonic()
    with contextlib.suppress(dist.DistNetworkError):  # whoever meets there says that it is gone
        store.check(["round trip"])
    return time.monotonic() - began


@functools.cache
def tell_once(text: str) -> None:
    warnings.warn(f"dltrain_ext: {text}", RuntimeWarning, stacklevel=2)
