"""Steps for parameters that are DTensors, as fully_shard makes them: a step updates their parts on this rank."""

import functools
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dltrain_ext import _ops

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

Groups = tuple[dist.ProcessGroup, ...]
Sharding = tuple[Groups, torch.device]
"""The groups over whose ranks a tensor is sharded, none for a tensor that each rank has whole, and its device."""


def _dtensor() -> Any:
    """Returns the class if it has been imported: importing it takes as long as importing torch."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def any_sharded(params: Iterable[Tensor]) -> bool:
    return (dtensor := _dtensor()) is not None and dtensor in map(type, params)


def whole(number: Tensor) -> Tensor:
    """Returns the full number, which every rank has, also if it is a DTensor."""
    full: Tensor = number.full_tensor() if any_sharded([number]) else number  # type: ignore[attr-defined]
    return full


def _groups_of(tensor: "DTensor") -> Groups:
    """Returns the groups over whose ranks the tensor is sharded."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"params: expected sharded or replicated ones, got a DTensor of {tensor.placements}")
    placements = enumerate(tensor.placements)
    return tuple(tensor.device_mesh.get_group(dim) for dim, placement in placements if not placement.is_replicate())


@functools.lru_cache(maxsize=4096)
def _cut(
    shape: tuple[int, ...],
    placements: tuple["Placement", ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> tuple[tuple[int, ...], Tensor]:
    """Returns the shape of the part of a tensor that a rank has, and the runs of its elements: int64, [runs, 2], the
    index in the whole tensor of a run's first element, and how many they are."""
    indices = [torch.arange(size) for size in shape]
    for placement, ranks, rank in zip(placements, mesh_shape, coordinate, strict=True):
        if placement.is_replicate():
            continue
        dim: int = placement.dim  # type: ignore[attr-defined]
        # A split factor stands for a dimension of the mesh that comes later, but has been cut first.
        pieces = indices[dim].chunk(getattr(placement, "split_factor", 1))
        sizes = [-(-len(piece) // ranks) for piece in pieces]
        parts = [piece[rank * size : (rank + 1) * size] for piece, size in zip(pieces, sizes, strict=True)]
        indices[dim] = torch.cat(parts)
    own = tuple(map(len, indices))
    last = max((dim for dim, size in enumerate(shape) if own[dim] < size), default=None)
    if last is None or not math.prod(own):
        return own, torch.tensor([[0, math.prod(own)]])
    starts = torch.zeros(1, dtype=torch.int64)
    for dim, index in enumerate(indices[:last]):
        starts = (starts[:, None] + index * math.prod(shape[dim + 1 :])).flatten()
    index, inner = indices[last], math.prod(shape[last + 1 :])
    ends = [*(index.diff() != 1).nonzero().flatten().add(1).tolist(), len(index)]
    runs = torch.tensor([(int(index[begin]), end - begin) for begin, end in itertools.pairwise([0, *ends])]) * inner
    return own, torch.stack([(starts[:, None] + runs[:, 0]).flatten(), runs[:, 1].repeat(len(starts))], dim=1)


class Shards:
    """Replaces an optimizer's groups and state during a step: each DTensor becomes its part on this rank.

    There is a group for each way in which parameters of a group are sharded, so that one sum over ranks makes its sums
    of squares those of the whole tensors.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], state: dict[Tensor, dict[str, Any]]) -> None:
        """Needs grad mode to be disabled, since a part would otherwise be a copy."""
        self.groups: list[dict[str, Any]] = []
        self.state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        self._whole: dict[Tensor, DTensor] = {}  # by their part
        self._sharding: list[Sharding] = []  # of each group
        for group in groups:
            by_sharding: dict[Sharding, list[Tensor]] = {}
            for p in group["params"]:
                part, sharded_over = (self._enter(p), _groups_of(p)) if any_sharded([p]) else (p, ())
                by_sharding.setdefault((sharded_over, part.device), []).append(part)
                if p in state:
                    self.state[part] = {name: local(value) for name, value in state[p].items()}
            for sharding, params in by_sharding.items():
                self.groups.append({**group, "params": params})
                self._sharding.append(sharding)

    def _enter(self, p: "DTensor") -> Tensor:
        part: Tensor = local(p)
        self._whole[part] = p
        grad: Any = p.grad
        if grad is not None and grad.placements != p.placements:  # for example partial, in tensor parallelism
            grad = grad.redistribute(placements=p.placements)
        part.grad = local(grad)
        return part

    def whole(self, p: Tensor) -> Tensor:
        """Returns the DTensor of a part, or a plain parameter itself."""
        return self._whole.get(p, p)

    def runs(self, params: Sequence[Tensor]) -> list[Tensor | None]:
        """Returns for each part of a DTensor where its elements are in the whole tensor, as
        :meth:`FusedGroup.gather` takes it; None for plain parameters."""
        found: list[Tensor | None] = []
        for part in params:
            if (p := self._whole.get(part)) is None:
                found.append(None)
                continue
            mesh = p.device_mesh
            shape, runs = _cut(tuple(p.shape), p.placements, tuple(mesh.shape), tuple(mesh.get_coordinate() or ()))
            if part.shape != shape:
                raise ValueError(
                    f"params: expected parts as torch cuts a tensor of shape {list(p.shape)} for {p.placements}, "
                    f"here of shape {list(shape)}, got shape {list(part.shape)}"
                )
            found.append(runs)
        return found

    def leave(self, state: dict[Tensor, dict[str, Any]]) -> None:
        """Writes new and changed entries back to the optimizer's state."""
        for part, entry in self.state.items():
            p = self._whole.get(part)
            own = state[part if p is None else p]
            for name, value in entry.items():
                if name not in own or local(own[name]) is not value:
                    own[name] = value if p is None or value.shape != part.shape else like(p, value)
        for part in self._whole:
            part.grad = None

    def sum_squares(self, groups: Sequence[_ops.FusedGroup]) -> list[Tensor]:
        """Returns sums of squares of the whole gradients that the groups have read, the same on every rank, to be
        added."""
        sums = []
        for fused, (sharded_over, device) in zip(groups, self._sharding, strict=True):
            found = _ops.sum_squares_of([fused])
            if sharded_over:
                found = found or [torch.zeros((), dtype=torch.float64, device=device)]
                _all_reduce(found[0], sharded_over)
            sums += found
        return sums

    def take_norms(
        self,
        groups: Sequence[_ops.FusedGroup],
        arguments: Sequence[_ops.StepArguments],
        hypers: Sequence[dict[str, Any]],
        norms: int,
    ) -> None:
        """Computes the norms of the whole tensors, of which the groups have read the parts on this rank, for their next
        step. Groups that are sharded alike share an all-reduce. ``norms`` is how many a tensor has."""
        alike: defaultdict[Sharding, list[int]] = defaultdict(list)
        for index, sharding in enumerate(self._sharding):
            alike[sharding].append(index)
        for (sharded_over, device), indices in alike.items():
            if not sharded_over:
                continue
            sizes = [len(self.groups[index]["params"]) for index in indices]
            sums = torch.zeros(sum(sizes), norms, dtype=torch.float64, device=device)
            for index, part in zip(indices, torch.split(sums, sizes), strict=True):
                groups[index].take_norms(arguments[index], hypers[index], part)
            _all_reduce(sums, sharded_over)


def _all_reduce(sums: Tensor, sharded_over: Groups) -> None:
    for ranks in sharded_over:
        dist.all_reduce(sums, group=ranks)


def local(value: Any) -> Any:
    """Returns the part on this rank, the same object each time; other values than DTensors are returned as they are."""
    return value.to_local() if any_sharded([value]) else value


def like(p: Any, part: Tensor) -> Tensor:
    """Returns a tensor like ``p`` whose part on this rank has these values."""
    if not any_sharded([p]):
        return part
    # The copy has no storage offset, with which a DTensor could be neither deep-copied nor saved alone.
    kept = part.clone()
    if kept.device.type == p.device_mesh.device_type:
        whole: Tensor = _dtensor().from_local(
            kept, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )
    else:  # offloaded to the CPU, from where from_local would move it
        whole = torch.empty_like(p, dtype=kept.dtype)
        whole._local_tensor = kept  # type: ignore[attr-defined]
    return whole
