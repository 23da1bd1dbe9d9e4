"""The groups of which communicators can be made, and the device of their users' tensors."""

import collections
import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dltrain_ext import _ops


def group_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if _forked_groups:
        _check_own(dist.group.WORLD)
    if not dist.is_initialized():
        raise ValueError(
            "group: expected an initialized default group, call torch.distributed.init_process_group first"
        )
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a torch.distributed.ProcessGroup that this rank belongs to, got {group!r}")
    return group


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Returns the ranks of a group; without a group, and without a default group, those of this process alone."""
    if group is None and not dist.is_initialized():
        return [0]
    ranks: list[int] = dist.get_process_group_ranks(group_of(group))
    return ranks


@dataclass(frozen=True)
class Members:
    """The ranks that make a communicator, and where they find each other.

    Attributes:
        name, description: of their group.
        ranks: in their order.
        rank: this one, one of them.
        store: for this communicator alone.
        timeout: how long they wait for each other.
        device: that of their users' tensors.
        beats: returns how often the heart of a rank has beaten, where they have hearts; until they are connected, one
            that is silent is not waited for. It may raise DistBackendError, which ends the wait.
    """

    name: str
    description: str
    ranks: list[int]
    rank: int
    store: dist.Store
    timeout: timedelta
    device: torch.device
    beats: Callable[[int], int] | None = None

    @property
    def index(self) -> int:
        """The place of this rank."""
        return self.ranks.index(self.rank)


# How often members were made of a group and, by a name, of some of its ranks.
_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, itertools.count[int]]]" = weakref.WeakKeyDictionary()


def members_of(group: "dist.ProcessGroup | Members | None", ranks: Sequence[int] | None = None) -> Members:
    """Returns the members for the next communicator of a group, or of some of its global ranks. All of them call this,
    in the same order."""
    if isinstance(group, Members):
        return group
    group = group_of(group)
    ranks, of = _chosen(ranks, group)
    number = next(_made.setdefault(group, collections.defaultdict(itertools.count))[of])
    store = dist.PrefixStore(f"dltrain_ext/{group.group_name}/{of}{number}", group.get_group_store())
    timeout = timedelta(seconds=_ops.timeout_of(group))
    return Members(group.group_name, group.group_desc, ranks, dist.get_rank(), store, timeout, device_of(group))


def _chosen(ranks: Sequence[int] | None, group: dist.ProcessGroup) -> tuple[list[int], str]:
    """Returns the global ranks in the order of the group, and a name for them, which is empty if they are all."""
    members: list[int] = dist.get_process_group_ranks(group)
    if ranks is None:
        return members, ""
    if not isinstance(ranks, list | tuple) or len({*ranks}) != len(ranks) or not {*ranks} <= {*members}:
        raise ValueError(f"ranks: expected ranks of the group, each once, out of {members}, got {ranks!r}")
    if dist.get_rank() not in ranks:
        raise ValueError(f"ranks: expected this rank, {dist.get_rank()}, to be one of them, got {ranks!r}")
    found = [rank for rank in members if rank in ranks]
    return found, f"{','.join(map(str, found))}/"


def group_named(name: str) -> dist.ProcessGroup:
    """Returns the group with a ``group_name``, by which torch's functional collectives name groups."""
    resolve: Any = dist.distributed_c10d._resolve_process_group
    try:
        return group_of(resolve(name))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"group_name: expected the group_name of a group of this rank, got {name!r}") from error


_forked_groups: list[weakref.ref[Any]] = []  # in a forked child: its parent's default group


def _note_fork() -> None:
    if dist.is_initialized():
        _forked_groups.append(weakref.ref(dist.group.WORLD))


os.register_at_fork(after_in_child=_note_fork)


def _check_own(group: Any) -> None:
    if any(forked() is group and group is not None for forked in _forked_groups):
        raise RuntimeError(
            f"group: expected one that was made in process {os.getpid()}, got one that it has from process "
            f"{os.getppid()} by a fork; start processes by spawn, or make a group in each"
        )


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Returns the device on which the users of a group usually have their tensors."""
    backends = dist.get_backend_config(group)  # "cuda:nccl", and perhaps one for the CPU
    if _ops.built_with_cuda and f"cuda:{dist.Backend.NCCL}" in backends.split(","):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
