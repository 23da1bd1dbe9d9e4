"""What carries messages between ranks: for tensors of which devices, what a rank must have, and how it is made.

To add one is a line of :data:`REGISTRY`, behind a class of ``csrc/comm/transport`` or a backend of torch.distributed.
"""

import ctypes
import itertools
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
from dltrain_ext.comm.rendezvous import SubWork, wait_for_key

_CONNECTING = timedelta(minutes=5)  # is enough for NCCL


@dataclass
class Site:
    """Where a communicator's connections are made.

    Attributes:
        store: the group's, under a prefix that belongs to the communicator.
        timeout: how long the peers may take to come.
    """

    store: dist.Store
    timeout: timedelta
    _number: "itertools.count[int]" = field(default_factory=itertools.count)
    _gloo_devices: list[Any] = field(default_factory=list)  # kept as long as connections are made

    @property
    def patience(self) -> timedelta:
        return min(self.timeout, _CONNECTING)

    def gloo(self, part: SubWork, threads: int) -> Any:
        """A backend. Its all-reduces, but not its messages, need a thread."""
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._threads, options._timeout = threads, self.timeout

        def make() -> Any:
            options._devices = self._gloo_devices = gloo_devices()
            return gloo(part.store, part.rank, len(part.ranks), options)

        return _in_time(make, 2 * self.timeout)

    def nccl_of_torch(self, part: SubWork) -> Any:
        """A backend, whose watchdog ends the process, so it is tried last."""
        timeout: Any = self.timeout + timedelta(minutes=5)
        store = dist.PrefixStore(f"{part.name} {next(self._number)}", self.store)  # which it uses in its calls, too
        backend: Any = dist.ProcessGroupNCCL(store, part.rank, len(part.ranks), timeout)
        return backend

    def close(self) -> None:
        self._gloo_devices = []


def _over_gloo(site: Site, part: SubWork, device: torch.device) -> _ops.Level:
    return _ops.Level.over_backend(site.gloo(part, threads=1), device, part.ranks)


def _over_torch(site: Site, part: SubWork, device: torch.device) -> _ops.Level:
    return _ops.Level.over_backend(site.nccl_of_torch(part), device, part.ranks)


def _over_nccl(site: Site, part: SubWork, device: torch.device) -> _ops.Level:
    if part.rank == 0:
        part.store.set("id", _ops.nccl_unique_id().hex())
    if not wait_for_key(part.store, "id", site.patience, time.monotonic()):
        raise RuntimeError(f"rank {part.ranks[0]} has given no id of a communicator in {site.patience}")
    unique_id = bytes.fromhex(part.store.get("id").decode())
    return _ops.Level.over_nccl(unique_id, part.rank, device, part.ranks, site.patience.total_seconds())


class Transport(NamedTuple):
    """One of them.

    Attributes:
        name: as the argument ``transport`` has it.
        device: the type of the tensors whose messages it carries.
        make: the connections of some ranks. Collective; raises RuntimeError.
        version: what it has found of what it needs on this rank; raises RuntimeError, saying what is missing. None
            where every rank has it.
        without: what a warning says where the next one takes its place.
    """

    name: str
    device: str
    make: Callable[[Site, SubWork, torch.device], _ops.Level]
    version: Callable[[], str] | None = None
    without: str = ""


# Of several for one device the first that all ranks have is taken; every rank has the last.
REGISTRY = (
    Transport("gloo", "cpu", _over_gloo),
    Transport(
        "nccl",
        "cuda",
        _over_nccl,
        lambda: _ops.nccl_version(),
        "messages of CUDA tensors go by torch.distributed, not by NCCL itself",
    ),
    Transport("c10d", "cuda", _over_torch),
)
# Of those that there is a choice of.
TRANSPORTS = (
    "auto",
    *(each.name for each in REGISTRY if sum(other.device == each.device for other in REGISTRY) > 1),
)


def candidates(device: str, wanted: str) -> list[Transport]:
    """In the order in which they are tried: the one that is wanted, where it is for tensors on such a device."""
    there = [each for each in REGISTRY if each.device == device]
    return [each for each in there if each.name == wanted] or there


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
