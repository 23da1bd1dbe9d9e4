"""The connections of a communicator's own: who stands where, and what carries the messages."""

import functools
import os
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dltrain_ext import _ops

TRANSPORTS = ("auto", "nccl", "c10d")


class Connections:
    """Makes them for one communicator; making is collective, in the order of the calls.

    Args:
        store: the group's, under a prefix that belongs to the communicator.
        ranks: the group's members, as the world knows them.
        timeout: how long the peers may take to come.
        transport: one of ``TRANSPORTS``; what carries the messages of CUDA tensors.
        ranks_per_host: that many neighbours of the group form a host; where None, hosts are looked up.
    """

    def __init__(
        self, store: dist.Store, ranks: list[int], timeout: timedelta, transport: str, ranks_per_host: int | None
    ):
        self._store, self._ranks, self._timeout, self._transport = store, ranks, timeout, transport
        self._rank = ranks.index(dist.get_rank())
        self._layout = layout(self._meet("host", host_id()), self._rank, ranks_per_host)

    def connect(self, device: torch.device) -> "_ops.Communicator":
        """For tensors on a device. In two levels where several ranks stand on each of several hosts."""
        carrier = self._carrier(device)
        if self._layout is None:
            across, inside = self._level(device, carrier, "all", range(len(self._ranks))), None
        else:
            neighbours, counterparts = self._layout
            inside = self._level(device, carrier, f"inside/{neighbours[0]}", neighbours)
            across = self._level(device, carrier, f"across/{counterparts[0]}", counterparts)
        return _ops.Communicator(across, inside, device, self._timeout.total_seconds())

    def _carrier(self, device: torch.device) -> str:
        """gloo, nccl or c10d; all ranks come to the same."""
        if device.type == "cpu":
            return "gloo"
        if self._transport == "c10d":
            return "c10d"
        try:
            mine = f"version {_ops.nccl_version()}"
        except RuntimeError as error:
            mine = str(error)
        missing = {
            rank: answer
            for rank, answer in zip(self._ranks, self._meet(f"nccl/{device}", mine), strict=True)
            if not answer.startswith("version ")
        }
        if not missing:
            return "nccl"
        rank, reason = next(iter(missing.items()))
        self._fall_back(f"rank {rank}: {reason}")
        return "c10d"

    def _fall_back(self, reason: str) -> None:
        if self._transport == "nccl":
            raise dist.DistBackendError(f"transport: nccl cannot be had: {reason}")
        tell_once(f"messages of CUDA tensors go by torch.distributed, not by NCCL itself: {reason}")

    def _level(self, device: torch.device, carrier: str, name: str, members: Sequence[int]) -> "_ops.Level":
        """Connects some of the group's ranks."""
        store = dist.PrefixStore(f"{device}/{carrier}/{name}", self._store)
        ranks = [self._ranks[member] for member in members]
        index = members.index(self._rank)
        if carrier == "nccl":
            level = self._nccl_level(store, device, ranks, index)
            if level is not None:
                return level
            return self._level(device, "c10d", name, members)
        try:
            backend = self._backend(carrier, store, index, len(ranks))
        except RuntimeError as error:
            raise dist.DistBackendError(
                f"communicator of ranks {ranks}: could not connect in {self._timeout}: {error}"
            ) from error
        return _ops.Level.over_backend(backend, device, ranks)

    def _backend(self, carrier: str, store: dist.Store, rank: int, size: int) -> Any:
        if carrier == "gloo":
            return dist.ProcessGroupGloo(store, rank, size, self._timeout)
        # Its own watchdog ends the process, so that comes last.
        timeout: Any = self._timeout + timedelta(minutes=5)
        return dist.ProcessGroupNCCL(store, rank, size, timeout)

    def _nccl_level(self, store: dist.Store, device: torch.device, ranks: list[int], index: int) -> "_ops.Level | None":
        """None where it failed on one of the ranks, and so on all."""
        level, answer = None, "connected"
        try:
            if index == 0:
                store.set("id", _ops.nccl_unique_id().hex())
            store.wait(["id"], self._timeout)
            seconds = self._timeout.total_seconds()
            unique_id = bytes.fromhex(store.get("id").decode())
            level = _ops.Level.over_nccl(unique_id, index, device, ranks, seconds)
        except RuntimeError as error:
            answer = str(error)
        for rank, what in zip(ranks, meet(store, "connected", ranks, index, answer, 2 * self._timeout), strict=True):
            if what != "connected":
                self._fall_back(f"rank {rank}: {what}")
                return None
        return level

    def _meet(self, about: str, answer: str) -> list[str]:
        return meet(self._store, about, self._ranks, self._rank, answer, self._timeout)


def meet(store: dist.Store, about: str, ranks: list[int], index: int, answer: str, timeout: timedelta) -> list[str]:
    """Tells all ranks one's answer and returns those of all, in their order. A rank that does not come is named."""
    deadline = time.monotonic() + timeout.total_seconds()
    keys = [f"{about}/{member}" for member in range(len(ranks))]
    store.set(keys[index], answer)
    for rank, key in zip(ranks, keys, strict=True):
        left = max(0.001, deadline - time.monotonic())
        try:
            store.wait([key], timedelta(seconds=left))
        except RuntimeError as error:
            raise dist.DistBackendError(
                f"communicator of ranks {ranks}: rank {rank} did not come in {timeout}"
            ) from error
    return [store.get(key).decode() for key in keys]


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


@functools.cache
def tell_once(text: str) -> None:
    warnings.warn(f"dltrain_ext: {text}", RuntimeWarning, stacklevel=2)
