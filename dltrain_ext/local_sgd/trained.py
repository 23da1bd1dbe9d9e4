"""The parameters of a model that are trained, as outer steps read and write them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dltrain_ext._arguments import is_dense
from dltrain_ext.optim.shards import local
from dltrain_ext.optim.state.masters import MASTER

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def in_memory_order(tensor: Tensor) -> Tensor:
    """Returns a flat view of a tensor that leaves no gaps in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


class Trained:
    """A trained parameter: its name, and the shape and number of elements that this rank has of it."""

    def __init__(self, name: str, parameter: Tensor):
        own = local(parameter).detach()
        if not is_dense(own) or own.dtype not in _FLOATS or own.device.type not in ("cpu", "cuda"):
            raise TypeError(
                f"model: expected parameters of float32, float16 or bfloat16 on the CPU or on CUDA, dense, got "
                f"{own.dtype} on {own.device} for {name}"
            )
        if torch.empty_like(own, device="meta").stride() != own.stride():  # which keeps strides that leave no gaps
            raise ValueError(
                f"model: expected parameters without gaps in their memory, got strides {own.stride()} for {name}"
            )
        self.name, self.parameter = name, parameter
        self.shape, self._stride, self.numel = own.shape, own.stride(), own.numel()
        self.device = own.device

    def view(self, flat: Tensor, first: int) -> Tensor:
        """Returns a part of a flat tensor in the shape and the order in memory of the parameter."""
        return flat[first : first + self.numel].as_strided(self.shape, self._stride)

    @property
    def layout(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """What all sites must have in common: the name, the shape, and the order of the elements in memory."""
        return self.name, tuple(self.shape), _order(self.shape, self._stride)

    def _master(self, inner: Optimizer) -> Tensor | None:
        found = inner.state.get(self.parameter, {}).get(MASTER)  # only torch's state_dict makes missing entries
        # Eight bits that extend the parameter change it by half a unit in the last place, which may as well be lost.
        return None if found is None or found.dtype == torch.uint8 else local(found).detach()

    def value(self, inner: Optimizer) -> Tensor:
        """Returns the tensor that the inner optimizer updates: the fp32 master if there is one."""
        return self._checked(self._master(inner), local(self.parameter).detach())

    def copy(self, inner: Optimizer) -> Tensor | None:
        """Returns the parameter if it is only a copy of its master."""
        return None if self._master(inner) is None else local(self.parameter).detach()

    def _checked(self, master: Tensor | None, own: Tensor) -> Tensor:
        value = own if master is None else master
        if any(
            (each.shape, _order(each.shape, each.stride())) != (self.shape, self.layout[2]) for each in (value, own)
        ):
            raise RuntimeError(
                f"{self.name}: expected the shape and strides that it had when the outer optimizer was made, "
                f"{tuple(self.shape)} and {self._stride}, got {tuple(value.shape)} and {value.stride()}"
            )
        return value

    def write(self, inner: Optimizer, value: Tensor, weight: float = 1.0) -> None:
        """Moves the parameter, its master and its copy to a value; with a weight below 1 only a part of the way, as
        ``mixed`` in csrc/math/outer_step.h does."""
        target, copy = self.value(inner), self.copy(inner)
        given = value.to(target.device, non_blocking=True)
        if weight == 1.0:
            target.copy_(given)
        else:
            moved = target.float().lerp_(given.float(), weight)
            target.copy_(moved.where(moved.isfinite(), given.float()))
        if copy is not None:
            copy.copy_(target)
        torch.autograd.graph.increment_version(self.parameter)


def _order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    return tuple(step for size, step in zip(shape, stride, strict=True) if size > 1)


def trained(model: nn.Module) -> list[Trained]:
    """Returns the parameters of the model that require gradients, by the names that they have without DDP."""
    module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    found = [Trained(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    if not any(each.parameter.numel() for each in found):
        raise ValueError("model: expected parameters that require gradients, got none")
    if len({each.device.type for each in found}) > 1:
        raise ValueError("model: expected all trained parameters on one type of device, got CPU and CUDA")
    return found
