"""The connections of a communicator's own: who stands where, and what carries the messages."""

import contextlib
import ctypes
import functools
import itertools
import os
import socket
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dltrain_ext import _ops
from dltrain_ext.comm.meeting import Meetings, Part, Work, comes

TRANSPORTS = ("auto", "nccl", "c10d")
_CONNECTING = timedelta(minutes=5)  # is enough for NCCL
Make = Callable[[Part, torch.device], "_ops.Level"]
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
        self._store, self._members, self._timeout, self._transport = store, members, timeout, transport
        self._ranks, self._rank = members.ranks, members.rank
        self._answer_timeout, self._measures = answer_timeout, measures
        self._patience = min(timeout, _CONNECTING)
        self.meetings = Meetings(dist.PrefixStore("meetings", store), members.ranks, members.rank, timeout)
        said = [each.split(" ", 1) for each in self.meetings.share(f"{_trip_to(store)} {host_id()}")]
        self._round_trip = max(float(trip) for trip, _ in said)
        hosts = [host for _, host in said]
        self._layout = layout(hosts, self._rank, ranks_per_host)
        self._number = itertools.count()
        self._gloo_devices: list[Any] = []

    @property
    def ranks_per_host(self) -> int:
        """Of the largest host; 1 where all-reduces go in one level."""
        return 1 if self._layout is None else self._layout.largest

    def connect(self, device: torch.device) -> "_ops.Communicator":
        """For tensors on a device, whose number may differ between the ranks."""
        communicator, said = None, "connected"
        with self.meetings.at_work() as work:
            levels = None if device.type == "cpu" else self._over_nccl_if_all_can(work, device)
            try:
                if levels is None:
                    levels = self._levels(work, device, self._over_gloo if device.type == "cpu" else self._over_torch)
                # Of all, on any device: where they ask each other why a call has failed.
                control = self._gloo(work.part("control"), threads=0) if len(self._ranks) > 1 else None
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
        self._gloo_devices = []

    def _levels(self, work: Work, device: torch.device, make: Make) -> Levels:
        """Of all ranks, and none, where there is one level."""
        if self._layout is None:
            return make(work.part(f"{make.__name__}/all"), device), None, (1, 1)
        neighbours, counterparts, hosts, shares, _ = self._layout
        inside = make(work.part(f"{make.__name__}/inside/{neighbours[0]}", neighbours), device)
        across = make(work.part(f"{make.__name__}/across/{counterparts[0]}", counterparts), device)
        return across, inside, (hosts, shares)

    def _over_gloo(self, part: Part, device: torch.device) -> "_ops.Level":
        return _ops.Level.over_backend(self._gloo(part, threads=1), device, part.ranks)

    def _gloo(self, part: Part, threads: int) -> Any:
        """Its all-reduces, but not its messages, need a thread."""
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._threads, options._timeout = threads, self._timeout

        def make() -> Any:
            options._devices = self._gloo_devices = gloo_devices()
            return gloo(part.store, part.rank, len(part.ranks), options)

        return _in_time(make, 2 * self._timeout)

    def _over_torch(self, part: Part, device: torch.device) -> "_ops.Level":
        # The backend's watchdog ends the process, so that comes last.
        timeout: Any = self._timeout + timedelta(minutes=5)
        store = dist.PrefixStore(f"{part.name} {next(self._number)}", self._store)  # which it uses in its calls, too
        backend: Any = dist.ProcessGroupNCCL(store, part.rank, len(part.ranks), timeout)
        return _ops.Level.over_backend(backend, device, part.ranks)

    def _over_nccl(self, part: Part, device: torch.device) -> "_ops.Level":
        if part.rank == 0:
            part.store.set("id", _ops.nccl_unique_id().hex())
        if not comes(part.store, "id", self._patience, time.monotonic()):
            raise RuntimeError(f"rank {part.ranks[0]} has given no id of a communicator in {self._patience}")
        unique_id = bytes.fromhex(part.store.get("id").decode())
        return _ops.Level.over_nccl(unique_id, part.rank, device, part.ranks, self._patience.total_seconds())

    def _all_have_nccl(self, work: Work) -> bool:
        if self._transport == "c10d":
            return False
        try:
            answer = f"version {_ops.nccl_version()}"
        except RuntimeError as error:
            answer = str(error)
        return self._all_say(lambda said: said.startswith("version "), work.part("nccl"), answer)

    def _over_nccl_if_all_can(self, work: Work, device: torch.device) -> Levels | None:
        if not self._all_have_nccl(work):
            return None
        levels, answer = None, "connected"
        try:
            levels = self._levels(work, device, self._over_nccl)
        except RuntimeError as error:
            answer = str(error)
        can = self._all_say(lambda said: said == "connected", work.part("connected over nccl"), answer)
        return levels if can else None

    def _all_say(self, yes: Callable[[str], bool], part: Part, answer: str) -> bool:
        """Whether all ranks say yes; where not, whoever does not is why NCCL itself is done without."""
        answers = zip(part.ranks, part.agree(answer), strict=True)
        no = [f"rank {rank}: {said}" for rank, said in answers if not yes(said)]
        if not no:
            return True
        reasons = "; ".join(no[:4])  # some are but consequences of others
        if self._transport == "nccl":
            raise dist.DistBackendError(f"transport: nccl cannot be had: {reasons}")
        tell_once(f"messages of CUDA tensors go by torch.distributed, not by NCCL itself: {reasons}")
        return False


class Layout(NamedTuple):
    """Of two levels, as one member of the group sees it.

    Attributes:
        neighbours: the members on its host.
        counterparts: those that stand for the same share of each host; itself alone where it has no share.
        hosts: how many there are.
        shares: of each host: as many as the smallest has members. The first members have one each.
        largest: how many members are on the largest host.
    """

    neighbours: list[int]
    counterparts: list[int]
    hosts: int
    shares: int
    largest: int


def layout(hosts: Sequence[str], rank: int, ranks_per_host: int | None) -> Layout | None:
    """None for one level: where there is one host, or one member on each.

    hosts: where each member is.
    """
    if ranks_per_host is not None:
        if len(hosts) % ranks_per_host:
            raise ValueError(
                f"ranks_per_host: expected a divisor of the group's size, {len(hosts)}, got {ranks_per_host}"
            )
        hosts = [str(member // ranks_per_host) for member in range(len(hosts))]
    members = {host: [m for m, its in enumerate(hosts) if its == host] for host in dict.fromkeys(hosts)}
    sizes = [len(some) for some in members.values()]
    shares, largest = min(sizes), max(sizes)
    if len(members) == 1 or largest == 1:
        return None
    neighbours = members[hosts[rank]]
    place = neighbours.index(rank)
    counterparts = [some[place] for some in members.values()] if place < shares else [rank]
    return Layout(neighbours, counterparts, len(members), shares, largest)


def _trip_to(store: dist.Store) -> float:
    """Seconds there and back."""
    began = time.monotonic()
    with contextlib.suppress(dist.DistNetworkError):  # whoever meets there says that it is gone
        store.check(["round trip"])
    return time.monotonic() - began


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


_devices: "weakref.WeakValueDictionary[str, Any]" = weakref.WeakValueDictionary()


def gloo_devices() -> list[Any]:
    """What listens on each interface that was chosen, or at the address of the host's name: one for all connections of
    a process, with one thread."""
    return [_gloo_device(interface) for interface in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")]


def _gloo_device(interface: str) -> Any:
    device = _devices.get(interface)
    if device is None:
        gloo = dist.ProcessGroupGloo
        device = gloo.create_device(interface=interface) if interface else gloo.create_default_device()
        device = _devices.setdefault(interface, device)
    return device


def _keep_devices() -> None:
    """In a forked process for ever: whoever destroys one waits for its thread, which is not there."""
    for device in _devices.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(device))
    _devices.clear()


os.register_at_fork(after_in_child=_keep_devices)


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
