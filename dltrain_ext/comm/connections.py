"""The connections of a communicator's own: who stands where, and what carries the messages."""

import functools
import itertools
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dltrain_ext import _ops
from dltrain_ext.comm.meeting import Meetings, comes

TRANSPORTS = ("auto", "nccl", "c10d")
_CONNECTING = timedelta(minutes=5)  # is enough for NCCL
Make = Callable[[str, torch.device, list[int], int], "_ops.Level"]  # the first is its own place at the store


class Connections:
    """Makes them for one communicator; making is collective, in the order of the calls.

    Args:
        store: the group's, under a prefix that belongs to the communicator.
        members: of the group.
        timeout: how long the peers may take to come.
        transport: one of ``TRANSPORTS``; what carries the messages of CUDA tensors.
        ranks_per_host: that many neighbours of the group form a host; where None, hosts are looked up.
        answer_timeout: how long a rank may take to say what it waits for, when a call has failed.
    """

    def __init__(
        self,
        store: dist.Store,
        members: _ops.Ranks,
        timeout: timedelta,
        transport: str,
        ranks_per_host: int | None,
        answer_timeout: timedelta,
    ):
        self._store, self._members, self._timeout, self._transport = store, members, timeout, transport
        self._ranks, self._rank = members.ranks, members.rank
        self._answer_timeout = answer_timeout
        self._patience = min(timeout, _CONNECTING)
        self.meetings = Meetings(dist.PrefixStore("meetings", store), members.ranks, members.rank, timeout)
        self._layout = layout(self.meetings.share(host_id()), self._rank, ranks_per_host)
        self._number = itertools.count()

    @property
    def ranks_per_host(self) -> int:
        """1 where all-reduces go in one level."""
        return 1 if self._layout is None else len(self._layout[0])

    def connect(self, device: torch.device) -> "_ops.Communicator":
        """For tensors on a device, whose number may differ between the ranks."""
        place, levels, control = f"{device.type} {next(self._number)}", None, None
        with self.meetings.at_work():
            if device.type == "cpu":
                levels = self._levels(place, device, self._over_gloo)
            elif self._all_have_nccl():
                levels = self._over_nccl_if_all_can(place, device)
            if levels is None:
                levels = self._levels(place, device, self._over_torch)
            if len(self._ranks) > 1:  # of all, on any device: where they ask each other why a call has failed
                control = self._gloo(f"{place}/control", self._ranks, self._rank)
        timeouts = self._timeout.total_seconds(), self._answer_timeout.total_seconds()
        return _ops.Communicator(*levels, control, self._members, device, *timeouts)

    def _levels(self, place: str, device: torch.device, make: Make) -> tuple["_ops.Level", "_ops.Level | None"]:
        """Across the hosts and inside this one; of all ranks, and none, where there is one level."""

        def level(name: str, members: Sequence[int]) -> "_ops.Level":
            own = f"{place}/{make.__name__}/{name}"
            return make(own, device, [self._ranks[member] for member in members], members.index(self._rank))

        if self._layout is None:
            return level("all", range(len(self._ranks))), None
        neighbours, counterparts = self._layout
        inside = level(f"inside/{neighbours[0]}", neighbours)
        return level(f"across/{counterparts[0]}", counterparts), inside

    def _over_gloo(self, place: str, device: torch.device, ranks: list[int], rank: int) -> "_ops.Level":
        return _ops.Level.over_backend(self._gloo(place, ranks, rank), device, ranks)

    def _gloo(self, place: str, ranks: list[int], rank: int) -> Any:
        connected, store, patience = "connected", self._store_at(place), 2 * self._timeout
        make = functools.partial(dist.ProcessGroupGloo, store, rank, len(ranks), self._timeout)
        try:
            backend, said = _in_time(make, patience), connected
        except RuntimeError as error:
            backend, said = None, str(error)
        # Who is done first may leave, and break the last ones.
        outcomes = self.meetings.agree(place, ranks, rank, said)
        for member, outcome in zip(ranks, outcomes, strict=True):
            if outcome != connected:
                raise dist.DistBackendError(
                    f"communicator of ranks {ranks}: rank {member} could not connect: {outcome}"
                )
        return backend

    def _over_torch(self, place: str, device: torch.device, ranks: list[int], rank: int) -> "_ops.Level":
        # The backend's watchdog ends the process, so that comes last.
        timeout: Any = self._timeout + timedelta(minutes=5)
        backend: Any = dist.ProcessGroupNCCL(self._store_at(place), rank, len(ranks), timeout)
        return _ops.Level.over_backend(backend, device, ranks)

    def _over_nccl(self, place: str, device: torch.device, ranks: list[int], rank: int) -> "_ops.Level":
        store = self._store_at(place)
        if rank == 0:
            store.set("id", _ops.nccl_unique_id().hex())
        if not comes(store, "id", self._patience, time.monotonic()):
            raise RuntimeError(f"rank {ranks[0]} has given no id of a communicator in {self._patience}")
        unique_id = bytes.fromhex(store.get("id").decode())
        return _ops.Level.over_nccl(unique_id, rank, device, ranks, self._patience.total_seconds())

    def _store_at(self, place: str) -> dist.Store:
        return dist.PrefixStore(place, self._store)

    def _all_have_nccl(self) -> bool:
        if self._transport == "c10d":
            return False
        try:
            answer = f"version {_ops.nccl_version()}"
        except RuntimeError as error:
            answer = str(error)
        return self._all_say(lambda said: said.startswith("version "), "nccl", answer)

    def _over_nccl_if_all_can(
        self, place: str, device: torch.device
    ) -> tuple["_ops.Level", "_ops.Level | None"] | None:
        levels, answer = None, "connected"
        try:
            levels = self._levels(place, device, self._over_nccl)
        except RuntimeError as error:
            answer = str(error)
        return levels if self._all_say(lambda said: said == "connected", "connected over nccl", answer) else None

    def _all_say(self, yes: Callable[[str], bool], about: str, answer: str) -> bool:
        """Whether all ranks say yes; where not, whoever does not is why NCCL itself is done without."""
        answers = self.meetings.agree(about, self._ranks, self._rank, answer)
        no = [f"rank {rank}: {said}" for rank, said in zip(self._ranks, answers, strict=True) if not yes(said)]
        if not no:
            return True
        reasons = "; ".join(no[:4])  # some are but consequences of others
        if self._transport == "nccl":
            raise dist.DistBackendError(f"transport: nccl cannot be had: {reasons}")
        tell_once(f"messages of CUDA tensors go by torch.distributed, not by NCCL itself: {reasons}")
        return False


def layout(hosts: Sequence[str], rank: int, ranks_per_host: int | None) -> tuple[list[int], list[int]] | None:
    """Who shares the host of a rank, and who has its place on each host, as members of the group; None for one level.

    hosts: where each member is. Two levels need as many ranks, and more than one, on each of several hosts.
    """
    if ranks_per_host is not None:
        if len(hosts) % ranks_per_host:
            raise ValueError(
                f"ranks_per_host: expected a divisor of the group's size, {len(hosts)}, got {ranks_per_host}"
            )
        hosts = [str(member // ranks_per_host) for member in range(len(hosts))]
    members = {host: [m for m, its in enumerate(hosts) if its == host] for host in dict.fromkeys(hosts)}
    per_host = {len(some) for some in members.values()}
    if len(members) == 1 or len(per_host) > 1 or per_host == {1}:
        return None
    neighbours = members[hosts[rank]]
    place = neighbours.index(rank)
    return neighbours, [some[place] for some in members.values()]


def host_id() -> str:
    """The same for processes that share a machine and its network interfaces."""
    parts = (
        socket.gethostname(),
        _read(lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip()),
        _read(lambda: os.readlink("/proc/self/ns/net")),
    )
    return " ".join(parts)


def _read(source: Callable[[], str]) -> str:
    try:
        return source()
    except OSError:
        return ""


def _in_time(make: Callable[[], Any], timeout: timedelta) -> Any:
    """What it makes. A signal, or the end of the time, leaves it behind: Gloo has a timeout for each step alone."""
    made: Future[Any] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if wait([made], timeout.total_seconds()).not_done:
        raise RuntimeError(f"not connected in {timeout}")
    return made.result()


@functools.cache
def tell_once(text: str) -> None:
    warnings.warn(f"dltrain_ext: {text}", RuntimeWarning, stacklevel=2)
