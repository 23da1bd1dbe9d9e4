"""Transports carry messages between ranks: for which devices they are, what they require, and how they connect.

To add one, add a line to :data:`REGISTRY` and a class to ``csrc/comm/transport``, or use a backend of
torch.distributed.
"""

import ctypes
import itertools
import json
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dltrain_ext import _ops
from dltrain_ext.comm.groups import Members
from dltrain_ext.comm.rendezvous import SILENCE, SubWork, wait_for_key

_CONNECTING = timedelta(minutes=5)  # enough for NCCL


@dataclass
class Site:
    """What the connections of a communicator are made with.

    Attributes:
        store: that of the group, under the communicator's prefix.
        timeout: how long the peers are waited for.
        patience: how long Gloo may take to connect.
        hosts: an id of the host of each rank.
    """

    store: dist.Store
    timeout: timedelta
    patience: timedelta
    hosts: dict[int, str] = field(default_factory=dict)
    _number: "itertools.count[int]" = field(default_factory=itertools.count)
    _gloo_devices: list[Any] = field(default_factory=list)  # kept alive while connections are made

    @classmethod
    def of(cls, members: Members, timeout: timedelta) -> "Site":
        if members.beats is None:
            return cls(members.store, timeout, 2 * timeout)
        # One that was alive may die before it connects. Gloo blocks the connection to the store in which it waits.
        own_connection: dist.Store = members.store.clone()  # type: ignore[attr-defined]
        return cls(own_connection, timeout, SILENCE)

    @property
    def connect_timeout(self) -> timedelta:
        return min(self.timeout, _CONNECTING)

    def why_without_gloo(self) -> str:
        """Makes Gloo's devices. Returns what prevents it, or nothing."""
        try:
            self._gloo_devices = gloo_devices()
        except RuntimeError as error:
            return str(error)
        return ""

    def gloo(self, part: SubWork, threads: int) -> Any:
        """Returns a backend. Its all-reduces need a thread, but its messages do not."""
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._threads, options._timeout = threads, self.timeout

        def make() -> Any:
            options._devices = self._gloo_devices = gloo_devices()
            return gloo(part.store, part.rank, len(part.ranks), options)

        return _in_time(make, self.patience)

    def nccl_of_torch(self, part: SubWork) -> Any:
        """Returns a backend. It is tried last, because its watchdog ends the process."""
        timeout: Any = self.timeout + timedelta(minutes=5)
        store = dist.PrefixStore(f"{part.name} {next(self._number)}", self.store)  # also used by its calls
        backend: Any = dist.ProcessGroupNCCL(store, part.rank, len(part.ranks), timeout)
        return backend

    def close(self) -> None:
        self._gloo_devices = []


def _over_gloo(site: Site, part: SubWork, device: torch.device) -> _ops.Level:
    return _ops.Level.over_backend(site.gloo(part, threads=1), device, part.ranks)


def _over_memory(site: Site, part: SubWork, device: torch.device) -> _ops.Level:
    """Between hosts over Gloo."""
    if len(part.ranks) == 1 or len({site.hosts[rank] for rank in part.ranks}) > 1:
        return _over_gloo(site, part, device)
    gloo: Any = None
    memory, problem = None, ""
    try:
        gloo = site.gloo(part, threads=1)
        memory = _ops.SharedMemory.make(len(part.ranks)) if part.rank == 0 else None
    except RuntimeError as error:
        problem = str(error)
    # A rank that has failed answers too: the others wait for it as long as it is alive.
    told = {"process": os.getpid(), "address": memory.address if memory else None, "problem": problem}
    answers = [json.loads(answer) for answer in part.agree(json.dumps(told))]
    for rank, answer in zip(part.ranks, answers, strict=True):
        if answer["problem"]:
            raise RuntimeError(f"rank {rank}: {answer['problem']}")
    if memory is None:
        memory = _ops.SharedMemory.open(answers[0]["address"], len(part.ranks))
    processes = [answer["process"] for answer in answers]
    return _ops.Level.over_shared_memory(memory, part.rank, processes, gloo, part.ranks)


def _over_torch(site: Site, part: SubWork, device: torch.device) -> _ops.Level:
    return _ops.Level.over_backend(site.nccl_of_torch(part), device, part.ranks)


def _over_nccl(site: Site, part: SubWork, device: torch.device) -> _ops.Level:
    if part.rank == 0:
        part.store.set("id", _ops.nccl_unique_id().hex())
    if not wait_for_key(part.store, "id", site.connect_timeout, time.monotonic()):
        raise RuntimeError(f"rank {part.ranks[0]} has published no NCCL id within {site.connect_timeout}")
    unique_id = bytes.fromhex(part.store.get("id").decode())
    return _ops.Level.over_nccl(unique_id, part.rank, device, part.ranks, site.connect_timeout.total_seconds())


class Transport(NamedTuple):
    """A way to carry messages.

    Attributes:
        name: its name in the argument ``transport``.
        device: the type of the device of the tensors whose messages it carries.
        make: connects some ranks. It is a collective call, and raises RuntimeError.
        version: returns the version of what it requires on this rank; raises RuntimeError that says what is missing.
            None if it requires nothing, or if only a trial shows whether it can be used.
        without: the text of the warning if the next transport replaces it; empty if every rank can use it.
    """

    name: str
    device: str
    make: Callable[[Site, SubWork, torch.device], _ops.Level]
    version: Callable[[], str] | None = None
    without: str = ""


# Of several for one device the first that all ranks have is used; every rank has the last one.
REGISTRY = (
    Transport(
        "shm",
        "cpu",
        _over_memory,
        without="messages between the processes of a host are sent over Gloo, not through memory that they share",
    ),
    Transport("gloo", "cpu", _over_gloo),
    Transport(
        "nccl",
        "cuda",
        _over_nccl,
        lambda: _ops.nccl_version(),
        "messages of CUDA tensors are sent by torch.distributed, not by NCCL directly",
    ),
    Transport("c10d", "cuda", _over_torch),
)
# The names of those for whose device there are several.
TRANSPORTS = (
    "auto",
    *(each.name for each in REGISTRY if sum(other.device == each.device for other in REGISTRY) > 1),
)


def check_transport(name: object, argument: str) -> None:
    """Raises ValueError that names the argument, or the environment variable."""
    if not isinstance(name, str) or name not in TRANSPORTS:
        raise ValueError(f"{argument}: expected one of {', '.join(TRANSPORTS)}, got {name!r}")


def candidates(device: str, wanted: str) -> list[Transport]:
    """Returns transports in the order of their trial; only the wanted one, if it is for this type of device."""
    there = [each for each in REGISTRY if each.device == device]
    return [each for each in there if each.name == wanted] or there


_devices: "weakref.WeakValueDictionary[str, Any]" = weakref.WeakValueDictionary()


def gloo_devices() -> list[Any]:
    """Returns Gloo's device for each selected interface, or for the address of the host's name. All connections of a
    process share a device and its thread."""
    return [_gloo_device(interface) for interface in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")]


def _gloo_device(interface: str) -> Any:
    device = _devices.get(interface)
    if device is None:
        gloo = dist.ProcessGroupGloo
        device = gloo.create_device(interface=interface) if interface else gloo.create_default_device()
        device = _devices.setdefault(interface, device)
    return device


def _keep_devices() -> None:
    """Keeps devices alive in a forked process: their destructors would wait for a thread that does not exist there."""
    for device in _devices.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(device))
    _devices.clear()


os.register_at_fork(after_in_child=_keep_devices)


def _in_time(make: Callable[[], Any], timeout: timedelta) -> Any:
    """Returns what ``make`` returns. A signal or the timeout abandons it: Gloo only has a timeout for each of its
    steps."""
    made: Future[Any] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=run, name="dltrain_ext: connecting", daemon=True).start()
    if wait([made], timeout.total_seconds()).not_done:
        raise RuntimeError(f"not connected in {timeout}")
    return made.result()
