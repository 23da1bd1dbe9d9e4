"""Steps for parameters that are DTensors, as fully_shard makes them: a step updates their parts on this rank."""

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

Groups = tuple[dist.ProcessGroup, ...]


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


class Shards:
    """Replaces an optimizer's groups and state during a step: each DTensor becomes its part on this rank.

    There is a group for each way in which parameters of a group are sharded, so that one sum over ranks makes its sum
    of squares that of the whole tensors.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], state: dict[Tensor, dict[str, Any]]) -> None:
        """Needs grad mode to be disabled, since a part would otherwise be a copy."""
        self.groups: list[dict[str, Any]] = []
        self.state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        self._whole: dict[Tensor, DTensor] = {}  # by their part
        self._sharded_over: list[Groups] = []
        for group in groups:
            by_groups: dict[Groups, list[Tensor]] = {}
            for p in group["params"]:
                part, sharded_over = (self._enter(p), _groups_of(p)) if any_sharded([p]) else (p, ())
                by_groups.setdefault(sharded_over, []).append(part)
                if p in state:
                    self.state[part] = {name: local(value) for name, value in state[p].items()}
            for sharded_over, params in by_groups.items():
                self.groups.append({**group, "params": params})
                self._sharded_over.append(sharded_over)

    def _enter(self, p: "DTensor") -> Tensor:
        part: Tensor = local(p)
        self._whole[part] = p
        grad: Any = p.grad
        if grad is not None and grad.placements != p.placements:  # for example partial, in tensor parallelism
            grad = grad.redistribute(placements=p.placements)
        part.grad = local(grad)
        return part

    def leave(self, state: dict[Tensor, dict[str, Any]]) -> None:
        """Writes new and changed entries back to the optimizer's state."""
        for part, entry in self.state.items():
            p = self._whole.get(part)
            own = state[part if p is None else p]
            for name, value in entry.items():
                if name not in own or local(own[name]) is not value:
                    own[name] = value if p is None or value.shape != part.shape else _like(p, value)
        for part in self._whole:
            part.grad = None

    def sum_squares(self, groups: Sequence[_ops.FusedGroup]) -> list[Tensor]:
        """Returns sums of squares of the whole gradients that the groups have read, the same on every rank, to be
        added."""
        sums = []
        for fused, group, sharded_over in zip(groups, self.groups, self._sharded_over, strict=True):
            found = _ops.sum_squares_of([fused])
            if sharded_over:
                total = torch.zeros((), dtype=torch.float64, device=group["params"][0].device)
                for number in found:
                    total += number.to(total.device, non_blocking=True)
                for ranks in sharded_over:
                    dist.all_reduce(total, group=ranks)
                found = [total]
            sums += found
        return sums


def local(value: Any) -> Any:
    """Returns the part on this rank, the same object each time; other values than DTensors are returned as they are."""
    return value.to_local() if any_sharded([value]) else value


def _like(p: "DTensor", part: Tensor) -> Tensor:
    # The copy has no storage offset, with which a DTensor could be neither deep-copied nor saved alone.
    like: Tensor = _dtensor().from_local(
        part.clone(), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
    return like
