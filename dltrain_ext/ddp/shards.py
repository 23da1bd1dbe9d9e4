"""The shards of a model's parameters that an optimizer updates, and how all ranks get the results (ZeRO stage 1)."""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dltrain_ext.comm import Communicator
from dltrain_ext.compress.layout import EXACT, Layout, Region, divided, rows_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_CACHE_LINE = 64  # bytes


class Shards:
    """Gives an optimizer the part of each parameter that belongs to this rank, its rows as ``torch.distributed.tensor``
    cuts them for ``Shard(0)``: DTensors, whose parts are views of the parameters.

    The parameters move to one tensor for each dtype and device, so that one all-gather after each step brings the parts
    of the other ranks.

    Args:
        parameters: the trained parameters of a model by name.
        optimizer: one of these parameters, with the same state on all ranks. Its groups and state get the shards.
        group: the ranks.
        communicator: gathers the parameters.

    Attributes:
        module: a module that has the shards as parameters, by the names of the model's.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup,
        communicator: Communicator,
    ):
        if any(_is_coded(value) for p in parameters.values() for value in optimizer.state.get(p, {}).values()):
            raise ValueError("shard: expected an optimizer whose state is float32 until it is registered, got bytes")
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self._communicator, self._parameters = communicator, dict(parameters)
        alike: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
        for name, parameter in parameters.items():
            alike.setdefault((parameter.dtype, parameter.device), {})[name] = parameter
        self._flats = [_flattened(some, EXACT[dtype], ranks) for (dtype, _), some in alike.items()]
        self._places = {name: parameter.data_ptr() for name, parameter in parameters.items()}
        self._mesh = DeviceMesh.from_group(group, next(iter(parameters.values())).device.type)
        self._rows = {name: rows_of(len(parameter), ranks)[rank] for name, parameter in parameters.items()}
        parts = {name: self._cut(name, parameter.detach()) for name, parameter in parameters.items()}
        self._shards = {name: nn.Parameter(self._distributed(name, part)) for name, part in parts.items()}
        self._gradients = {name: self._distributed(name, torch.zeros_like(part)) for name, part in parts.items()}
        self._give_to(optimizer)
        self.module = _nested(self._shards)
        self.take_gradients()

    def _cut(self, name: str, tensor: Tensor) -> Tensor:
        """Returns the rows that belong to this rank."""
        return tensor.narrow(0, *self._rows[name])

    def _distributed(self, name: str, rows: Tensor) -> "DTensor":
        from torch.distributed.tensor import DTensor, Shard  # importing it takes as long as importing torch

        like = self._parameters[name]
        return DTensor.from_local(rows, self._mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride())

    def _give_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Replaces the parameters in the optimizer's groups and state, and gathers after its steps."""
        shard_of = {parameter: self._shards[name] for name, parameter in self._parameters.items()}
        for options in optimizer.param_groups:
            options["params"][:] = [shard_of[parameter] for parameter in options["params"]]
        for name, parameter in self._parameters.items():
            if (entry := optimizer.state.pop(parameter, None)) is not None:
                optimizer.state[self._shards[name]] = {
                    key: self._distributed(name, self._cut(name, value).clone())
                    if _is_like(value, parameter)
                    else value
                    for key, value in entry.items()
                }
        optimizer.register_step_post_hook(lambda *_: self.gather())
        self._clear_with(optimizer)

    def _clear_with(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes ``zero_grad`` also clear gradients that no reduction has taken from the model yet."""
        zero_grad = optimizer.zero_grad

        @functools.wraps(zero_grad)
        def clear(set_to_none: bool = True) -> None:
            zero_grad(set_to_none)
            for parameter in self._parameters.values():
                parameter.grad = None

        optimizer.zero_grad = clear  # type: ignore[method-assign]

    def take_gradients(self) -> None:
        """Moves what a backward pass has left for this rank to the shards, and clears the gradients of the model."""
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            rows = self._cut(name, parameter.grad)
            shard, gradient = self._shards[name], self._gradients[name]
            if shard.grad is None:
                gradient.to_local().copy_(rows)
                shard.grad = gradient
            else:
                shard.grad.to_local().add_(rows)  # type: ignore[attr-defined]
            parameter.grad = None

    def gather(self) -> None:
        """Gives all ranks the parameters that each has updated, bit for bit."""
        for name, parameter in self._parameters.items():
            if parameter.data_ptr() != self._places[name]:
                raise RuntimeError(
                    f"shard: expected {name} to stay where register has put it, but it has been moved or replaced; "
                    "move and load the model before, or copy into its parameters"
                )
        works = [
            self._communicator.submit_bucket(flat, layout.handle, collective="all_gather", codec=layout.codec)
            for flat, layout in self._flats
        ]
        for work in works:
            work.wait()
        torch.autograd.graph.increment_version(list(self._parameters.values()))

    @property
    def wire_bytes(self) -> int:
        """The bytes that this rank has sent for parameters."""
        return int(sum(layout.handle.stats()["wire_bytes"] for _, layout in self._flats))


def check_shardable(parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Raises TypeError or ValueError unless the optimizer is one of these parameters, and they can be divided."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"shard: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    given = [parameter for options in optimizer.param_groups for parameter in options["params"]]
    known = set(map(id, given))
    if missing := [name for name, parameter in parameters.items() if id(parameter) not in known]:
        raise ValueError(f"shard: expected an optimizer of all trained parameters, got one without {missing[0]}")
    if len(given) != len(parameters):
        raise ValueError(
            f"shard: expected an optimizer of the model's {len(parameters)} trained parameters only, got {len(given)}"
        )
    for name, parameter in parameters.items():
        rows = len(parameter) if parameter.dim() else 0
        if not rows or not parameter.numel():
            raise ValueError(
                f"shard: expected parameters of at least one element and dimension, got {name} of shape "
                f"{tuple(parameter.shape)}"
            )
        if not _has_no_gaps(parameter) or (rows > 1 and parameter.stride(0) != parameter.numel() // rows):
            raise ValueError(
                f"shard: expected parameters whose rows are adjacent in memory, got {name} of shape "
                f"{tuple(parameter.shape)} and strides {parameter.stride()}"
            )


def _is_like(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _is_coded(value: object) -> bool:
    """Returns whether it is a state of an optimizer with a ``state_codec``."""
    return isinstance(value, Tensor) and value.dtype == torch.uint8


def _has_no_gaps(tensor: Tensor) -> bool:
    """Returns whether the elements are adjacent in memory, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _flattened(parameters: Mapping[str, Tensor], codec: str, ranks: int) -> tuple[Tensor, Layout[str]]:
    """Moves the parameters to one tensor. Returns it, and the regions that belong to the ranks."""
    regions: list[Region[str]] = []
    begin = 0
    for name, parameter in parameters.items():
        regions += divided(Region(name, begin, parameter.numel(), codec, 0), len(parameter), ranks)
        line = _CACHE_LINE // parameter.element_size()
        begin += -(-parameter.numel() // line) * line
    flat = next(iter(parameters.values())).detach().new_empty(begin)
    for parameter, region in zip(parameters.values(), regions[::ranks], strict=True):
        place = flat.as_strided(parameter.shape, parameter.stride(), region.first)
        parameter.data = place.copy_(parameter.detach())
    return flat, Layout(flat, regions, None, by_parameter=True)


def _nested(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """Returns a module that has the parameters by these names, whose dots separate modules."""
    root = nn.Module()
    for name, parameter in parameters.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, parameter)
    return root
