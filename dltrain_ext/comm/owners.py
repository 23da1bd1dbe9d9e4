"""Items that have owners, such as the matrices of a model: each is reduced to one rank, worked on, and gathered."""

import collections
import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dltrain_ext._arguments import as_number, check_dense
from dltrain_ext.comm.arguments import check_names, check_tensors
from dltrain_ext.comm.communicator import Communicator
from dltrain_ext.comm.groups import device_of, group_of, ranks_of

Items = Mapping[str, Tensor]
Shapes = Mapping[str, Sequence[int]]


class Owners:
    """Divides items among the ranks of a group by their cost, and carries the items' tensors.

    Each item has an owner. An owner is one of ``workers`` consecutive ranks that share their results. With 4 ranks, 2
    workers, and one item for each rank::

        reduce   0: a b c d   1: a b c d   2: a b c d   3: a b c d     ->   0: a      1: b      2: c      3: d
        share    0: a         1: b         2: c         3: d           ->   0: a b    1: a b    2: c d    3: c d
        gather   0: a b       1: a b       2: c d       3: c d         ->   0 to 3: a b c d

    The tensors of a rank travel as one message, without padding. With one worker, ``reduce`` and ``gather`` together
    send as many bytes as an all-reduce; and so do ``reduce`` and ``share`` if all ranks are workers.

    Items are assigned in the order of their costs, the largest first, each to the rank that has least to do: the most
    that a rank has to do is at most 4/3 of the optimum (Graham 1969, Bounds on multiprocessing timing anomalies).
    ``print(owners)`` shows the result.

    Making it is a collective call, and so are the methods that carry tensors. They accept the tensors of some items
    only, if these are the same on all ranks.

    Args:
        costs: the items by name, each with a number that is proportional to its work; the same on all ranks.
        workers: the number of ranks that share the results of an owner: a divisor of the number of ranks.
        group: the process group; if None, the default group or, if there is none, this process alone.
        timeout: as for :class:`Communicator`.
        device: where the tensors are, which are float32; if None, on the device of the group's backend.

    Attributes:
        world_size: the number of ranks.
        owner: the rank, within the group, that owns an item, by the item's name.
        owned: the names of the items that this rank owns.
        worked_on: the names of the items that this rank and its fellow workers own.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
        torch.distributed.DistBackendError: as for :class:`Communicator`.
    """

    def __init__(
        self,
        costs: Mapping[str, float],
        *,
        workers: int = 1,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        device: torch.device | None = None,
    ):
        alone = group is None and not dist.is_initialized()
        ranks = ranks_of(group)
        rank = 0 if alone else ranks.index(dist.get_rank())
        if type(workers) is not int or workers < 1 or len(ranks) % workers:
            raise ValueError(f"workers: expected a divisor of the number of ranks, {len(ranks)}, got {workers!r}")
        self._costs = _checked(costs)
        if not isinstance(device, torch.device | None):
            raise TypeError(f"device: expected a torch.device or None, got {device!r}")
        if device is None:
            device = torch.device("cpu") if alone else device_of(group_of(group))
        self._nothing = torch.empty(0, device=device)
        self._by_rank = balanced(self._costs, len(ranks))
        self.owner = {name: owner for owner, names in enumerate(self._by_rank) for name in names}
        self.world_size, self._workers = len(ranks), workers
        self.owned, self.worked_on = self._by_rank[rank], self._names_of_workers(rank)

        everyone = None if alone else Communicator(group, timeout=timeout, ranks_per_host=1)

        def connected(members: range) -> Communicator | None:
            if len(members) in (1, len(ranks)):
                return everyone if len(members) > 1 else None
            some = [ranks[member] for member in members]
            return Communicator(group, timeout=timeout, ranks_per_host=1, ranks=some)

        first = rank - rank % workers
        fellows, counterparts = range(first, first + workers), range(rank % workers, len(ranks), workers)
        self._everyone = _Exchange(everyone, rank, self._by_rank)
        self._fellows = _Exchange(connected(fellows), rank - first, self._by_rank[first : first + workers])
        names = [self._names_of_workers(counterpart) for counterpart in counterparts]
        self._counterparts = _Exchange(connected(counterparts), rank // workers, names)

    def _names_of_workers(self, rank: int) -> list[str]:
        first = rank - rank % self._workers
        return [name for names in self._by_rank[first : first + self._workers] for name in names]

    def __str__(self) -> str:
        shares, ranks = self.loads(), len(self._by_rank)
        total = sum(shares) or 1.0
        lines = [
            f"{len(self.owner)} items on {ranks} ranks, {self._workers} of which share their results; the busiest rank "
            f"has {max(shares) / total * ranks:.2f} times the mean cost"
        ]
        for rank, (names, share) in enumerate(zip(self._by_rank, shares, strict=True)):
            lines.append(f"rank {rank}: {share / total:6.1%}  {', '.join(names)}")
        return "\n".join(lines)

    def loads(self) -> list[float]:
        """Returns the sum of the costs of each rank's items."""
        return [math.fsum(self._costs[name] for name in names) for names in self._by_rank]

    def sum(self, tensor: Tensor) -> Tensor:
        """Adds up a tensor over all ranks, in place and uncompressed, and returns it. Every rank gets the same bits."""
        check_tensors(tensor=tensor)
        if self._everyone.communicator is not None:
            self._everyone.communicator.all_reduce(tensor, algorithm="direct")
        return tensor

    def reduce(self, tensors: Items, codec: str = "raw") -> dict[str, Tensor]:
        """Averages the tensors of all ranks for their owners.

        Args:
            tensors: the tensors by the names of their items; the same names and shapes on all ranks.
            codec: one of ``codecs.CODECS``, in which the tensors are sent.

        Returns:
            The means that belong to this rank, by name. They are computed in fp32 in the order of the ranks.
        """
        check_names("direct", codec)
        self._check_tensors(tensors, self.owner)
        everyone = self._everyone
        if everyone.communicator is None:
            return dict(tensors)
        parts = [self._joined([tensors[name] for name in names if name in tensors]) for names in everyone.names]
        mine = torch.empty_like(parts[everyone.place])
        everyone.communicator.reduce_scatter(mine, parts, "avg", algorithm="direct", codec=codec)
        return _divided(mine, {name: tensors[name].shape for name in self.owned if name in tensors})

    def share(self, tensors: Items, shapes: Shapes, codec: str = "raw") -> dict[str, Tensor]:
        """Gives each owner's tensors to its fellow workers.

        Args:
            tensors: those of the items that this rank owns, by name.
            shapes: the shapes of the tensors of all ranks, by name.
            codec: one of ``codecs.CODECS``, in which the tensors are sent.

        Returns:
            The tensors of the items that the workers own, by name, the same bits on all of them: with a lossy codec
            also the owner gets what it has sent.
        """
        return self._exchanged(self._fellows, tensors, shapes, codec)

    def gather(self, tensors: Items, shapes: Shapes, codec: str = "raw") -> dict[str, Tensor]:
        """Gives the tensors of all workers to all ranks: like :meth:`share`, from the items that the workers own to all
        items."""
        return self._exchanged(self._counterparts, tensors, shapes, codec)

    def _exchanged(self, over: "_Exchange", tensors: Items, shapes: Shapes, codec: str) -> dict[str, Tensor]:
        check_names("direct", codec)
        sizes = _sizes(shapes)
        _check_known(sizes, "shapes", self.owner)
        own = [name for name in over.names[over.place] if name in sizes]
        self._check_tensors(tensors, own)
        for name in own:
            found = list(tensors[name].shape) if name in tensors else "none"
            if found != list(sizes[name]):
                raise ValueError(f"tensors: expected one of shape {list(sizes[name])} for {name!r}, got {found}")
        if over.communicator is None:
            return dict(tensors)
        mine = self._joined([tensors[name] for name in own])
        groups = [{name: sizes[name] for name in names if name in sizes} for names in over.names]
        whole = [mine.new_empty(sum(shape.numel() for shape in group.values())) for group in groups]
        over.communicator.all_gather(whole, mine, algorithm="direct", codec=codec)
        return {
            name: found
            for part, group in zip(whole, groups, strict=True)
            for name, found in _divided(part, group).items()
        }

    def _check_tensors(self, tensors: Items, known: Collection[str]) -> None:
        if not isinstance(tensors, Mapping):
            raise TypeError(f"tensors: expected a mapping from names to tensors, got {type(tensors).__name__}")
        _check_known(tensors, "tensors", known)
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(f"tensors: expected a tensor for {name!r}, got {type(tensor).__name__}")
            check_dense(tensor, f"tensors: {name!r}")
            if tensor.dtype != torch.float32 or tensor.device != self._nothing.device:
                raise TypeError(
                    f"tensors: expected float32 on {self._nothing.device} for {name!r}, got {tensor.dtype} on "
                    f"{tensor.device}"
                )

    def _joined(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([self._nothing, *(tensor.detach().flatten() for tensor in tensors)])

    def stats(self) -> dict[str, int]:
        """Returns the sums of :meth:`Communicator.stats` over all connections."""
        total = collections.Counter(calls=0, wire_bytes=0, inside_bytes=0)
        for communicator in self._communicators():
            total.update(communicator.stats())
        return dict(total)

    def _communicators(self) -> set[Communicator]:
        exchanges = self._everyone, self._fellows, self._counterparts
        return {exchange.communicator for exchange in exchanges if exchange.communicator is not None}

    def close(self) -> None:
        """Closes the connections when the calls that were enqueued on CUDA devices are done; later calls fail."""
        for communicator in self._communicators():
            with contextlib.suppress(dist.DistBackendError):  # there is no result that could be spoilt
                communicator.drain()
            communicator.close()


class _Exchange(NamedTuple):
    """Ranks that are connected, which of them this one is, and the names of the items that each contributes or gets."""

    communicator: Communicator | None  # None for one rank
    place: int
    names: list[list[str]]


def _checked(costs: Mapping[str, float]) -> dict[str, float]:
    if not isinstance(costs, Mapping):
        raise TypeError(f"costs: expected a mapping from names to numbers, got {type(costs).__name__}")
    for name, cost in costs.items():
        if not isinstance(name, str):
            raise TypeError(f"costs: expected names, got {name!r}")
        if not 0 <= as_number(cost, f"costs: {name!r}") < math.inf:
            raise ValueError(f"costs: expected finite numbers of at least 0, got {cost!r} for {name!r}")
    return {name: float(cost) for name, cost in costs.items()}


def _sizes(shapes: Shapes) -> dict[str, torch.Size]:
    if not isinstance(shapes, Mapping):
        raise TypeError(f"shapes: expected a mapping from names to shapes, got {type(shapes).__name__}")
    for name, shape in shapes.items():
        if not isinstance(shape, list | tuple) or not all(type(size) is int and 0 <= size < 2**31 for size in shape):
            raise TypeError(f"shapes: expected a sequence of sizes for {name!r}, got {shape!r}")
    return {name: torch.Size(shape) for name, shape in shapes.items()}


def _check_known(given: Mapping[str, object], argument: str, known: Collection[str]) -> None:
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{argument}: expected names out of {', '.join(known)}, got {unknown[0]!r}")


def balanced(costs: Mapping[str, float], ranks: int) -> list[list[str]]:
    """Returns the names of each rank."""
    loads = [0.0] * ranks
    names: list[list[str]] = [[] for _ in range(ranks)]
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        least = loads.index(min(loads))
        loads[least] += costs[name]
        names[least].append(name)
    return names


def _divided(whole: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    parts = torch.split(whole, [shape.numel() for shape in shapes.values()])
    return {name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}
