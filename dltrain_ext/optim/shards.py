"""Parameters that are DTensors, as of fully_shard: a step works on the parts of them that lie on this rank."""

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
    """The class, if anybody has imported it: that takes as long as all of torch."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def any_sharded(params: Iterable[Tensor]) -> bool:
    return (dtensor := _dtensor()) is not None and dtensor in map(type, params)


def whole(number: Tensor) -> Tensor:
    """As every rank has it, also where it is a DTensor."""
    full: Tensor = number.full_tensor() if any_sharded([number]) else number  # type: ignore[attr-defined]
    return full


def _groups_of(tensor: "DTensor") -> Groups:
    """Those whose ranks have other elements of it."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"params: expected sharded or replicated ones, got a DTensor of {tensor.placements}")
    placements = enumerate(tensor.placements)
    return tuple(tensor.device_mesh.get_group(dim) for dim, placement in placements if not placement.is_replicate())


class Shards:
    """What stands in for an optimizer's groups and state during a step: of each DTensor the part on this rank.

    There is a group for each way in which parameters of a group are sharded, so that its sum of squares becomes that of
    the whole by one sum over ranks.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], state: dict[Tensor, dict[str, Any]]) -> None:
        """Without grad mode, in which a part would be a copy."""
        self.groups: list[dict[str, Any]] = []
        self.state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        self._whole: dict[Tensor, DTensor] = {}  # by its part
        self._across: list[Groups] = []
        for group in groups:
            by_groups: dict[Groups, list[Tensor]] = {}
            for p in group["params"]:
                part, across = (self._enter(p), _groups_of(p)) if any_sharded([p]) else (p, ())
                by_groups.setdefault(across, []).append(part)
                if p in state:
                    self.state[part] = {name: local(value) for name, value in state[p].items()}
            for across, params in by_groups.items():
                self.groups.append({**group, "params": params})
                self._across.append(across)

    def _enter(self, p: "DTensor") -> Tensor:
        part: Tensor = local(p)
        self._whole[part] = p
        grad: Any = p.grad
        if grad is not None and grad.placements != p.placements:  # of tensor parallelism, yet to be summed, say
            grad = grad.redistribute(placements=p.placements)
        part.grad = local(grad)
        return part

    def leave(self, state: dict[Tensor, dict[str, Any]]) -> None:
        """Gives the state what has come to it, or changed."""
        for part, entry in self.state.items():
            p = self._whole.get(part)
            own = state[part if p is None else p]
            for name, value in entry.items():
                if name not in own or local(own[name]) is not value:
                    own[name] = value if p is None or name == "step" else _like(p, value)
        for part in self._whole:
            part.grad = None

    def sum_squares(self, groups: Sequence[_ops.FusedGroup]) -> list[Tensor]:
        """Of the gradients that these have read, whole ones, the same on every rank: numbers to be added up."""
        sums = []
        for fused, group, across in zip(groups, self.groups, self._across, strict=True):
            found = _ops.sum_squares_of([fused])
            if across:
                total = torch.zeros((), dtype=torch.float64, device=group["params"][0].device)
                for number in found:
                    total += number.to(total.device, non_blocking=True)
                for ranks in across:
                    dist.all_reduce(total, group=ranks)
                found = [total]
            sums += found
        return sums


def local(value: Any) -> Any:
    """The part on this rank, the same object each time; what is no DTensor, itself."""
    return value.to_local() if any_sharded([value]) else value


def _like(p: "DTensor", part: Tensor) -> Tensor:
    # Memory of its own: a DTensor takes over the offset, and can then be neither deep-copied nor saved by itself.
    like: Tensor = _dtensor().from_local(
        part.clone(), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
    return like
