"""The part of a server: the blocks that it has, as parameters of an optimizer of dltrain_ext.optim."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dltrain_ext import _ops, optim
from dltrain_ext.optim.fused import FusedStep
from dltrain_ext.optim.state.layout import ALIGNMENT
from dltrain_ext.ps.layout import Block, Key
from dltrain_ext.ps.settings import Settings

PLAIN = "SGD"  # with a rate of 1 and gradients that are added: what a store does without an optimizer
PLAIN_OPTIONS: dict[str, Any] = {"lr": 1.0, "maximize": True}


def optimizer_named(name: str) -> type[FusedStep]:
    """Returns a class of dltrain_ext.optim; raises ValueError that lists them."""
    found = getattr(optim, name, None)
    if name not in optim.__all__ or name == "SGLD":  # whose noise depends on the place of an element in its tensor
        names = ", ".join(each for each in optim.__all__ if each != "SGLD")
        raise ValueError(f"optimizer: expected one of {names} of dltrain_ext.optim, got {name}")
    assert isinstance(found, type) and issubclass(found, FusedStep)
    return found


def completed(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options with a learning rate, the optimizer's default if they have none. Raises TypeError or
    ValueError that names an option with which the optimizer cannot run on servers."""
    defaults = {each.name: each.default for each in inspect.signature(optimizer_named(name)).parameters.values()}
    options = {"lr": defaults["lr"], **options}
    if options["lr"] is inspect.Parameter.empty:
        raise TypeError(f"lr: expected a number for {name}, got none")
    if options.get("max_grad_norm", defaults.get("max_grad_norm")) is not None:
        raise ValueError("max_grad_norm: expected None, because no server has all gradients")
    if options.get("state_codec") is not None:
        raise ValueError(f"state_codec: expected None, because servers keep float32, got {options['state_codec']!r}")
    if options.get("rounding", "nearest") != "nearest":
        raise ValueError(f"rounding: expected 'nearest', because servers keep float32, got {options['rounding']!r}")
    return options


def needs_norms(name: str) -> bool:
    """Returns whether the optimizer's step needs norms of whole tensors."""
    return optimizer_named(name)._rule.norms > 0


class Shard:
    """The blocks of one server: their values in one flat float32 tensor, and the optimizer that updates them.

    Args:
        keys, blocks: all of the store, and those of this server.
        name: of the optimizer's class.
        groups: the options of each group of keys.
    """

    def __init__(self, keys: Sequence[Key], blocks: Sequence[Block], name: str, groups: Sequence[Mapping[str, Any]]):
        self.keys, self.blocks = keys, blocks
        starts, total = [], 0
        for block in blocks:
            starts.append(total)
            total += -(-block.numel // ALIGNMENT) * ALIGNMENT
        flat = torch.zeros(total)
        self.values = [flat[start : start + block.numel] for start, block in zip(starts, blocks, strict=True)]
        self.parameters = [nn.Parameter(self._shaped(v, b)) for v, b in zip(self.values, blocks, strict=True)]
        by_group: list[list[nn.Parameter]] = [[] for _ in groups]
        for parameter, block in zip(self.parameters, blocks, strict=True):
            by_group[keys[block.key].group].append(parameter)
        params = [{"params": some, **options} for some, options in zip(by_group, groups, strict=True)]
        defaults = {"lr": groups[0]["lr"]}  # some have none of their own
        self.optimizer = optimizer_named(name)(params, **defaults)
        self._group_of: dict[nn.Parameter, int] = {}
        for number, group in enumerate(self.optimizer.param_groups):
            self._group_of |= dict.fromkeys(group["params"], number)
            if group["params"]:
                self.optimizer._complete_state(group["params"], group)

    def _shaped(self, values: Tensor, block: Block) -> Tensor:
        key = self.keys[block.key]
        return values.view(key.shape) if block.numel == key.numel else values

    def tensors(self) -> Iterator[Tensor]:
        """Yields all numbers of this server: of each block its values, its states and its counters, as 1-dimensional
        tensors that can be written. It is the order in which servers send their state."""
        for parameter, values in zip(self.parameters, self.values, strict=True):
            yield values
            for each in self._kept(parameter):
                yield from each

    def is_updated(self) -> bool:
        """Returns whether some update has left a trace in the states or counters."""
        return any(bool(each.any()) for parameter in self.parameters for kept in self._kept(parameter) for each in kept)

    def _kept(self, parameter: nn.Parameter) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the states and the counters of a block."""
        group, state = self.optimizer.param_groups[self._group_of[parameter]], self.optimizer.state[parameter]
        states = [state[each.key].view(-1) for each in self.optimizer._states_of(group)]
        return states, [state[counter.key].view(1) for counter in self.optimizer._rule.counters]

    def settings(self, given: Settings, *, is_first: bool) -> "_ops.ServerSettings":
        """Returns what the compiled server is made of. is_first: no block has been updated before."""
        rule, rules = self.optimizer._rule, []
        for group in self.optimizer.param_groups:
            states = [each.key for each in self.optimizer._states_of(group)]
            hyper = {name: float(value) for name, value in self.optimizer._hyper(group).items()}
            rules.append(_ops.ServerRule(name=rule.name, hyper=hyper, states=states, maximize=bool(group["maximize"])))
        blocks = []
        for parameter, values in zip(self.parameters, self.values, strict=True):
            number = self._group_of[parameter]
            kept, counters = self._kept(parameter)

            def flag(starting: list[Tensor], parameter: nn.Parameter = parameter, number: int = number) -> bool:
                flagged, dimensions = self.optimizer._flagged(self.optimizer.param_groups[number], starting)
                return any(p is parameter for p in flagged) or parameter.dim() >= dimensions

            blocks.append(
                _ops.ServerBlock(
                    value=values,
                    group=number,
                    states=kept,
                    counters=counters,
                    flag_at_first=flag([parameter]),
                    flag=flag([]),
                    is_first=is_first,
                )
            )
        return _ops.ServerSettings(
            blocks=blocks,
            rules=rules,
            quorum=given.quorum,
            window=given.window,
            delay_compensation=given.delay_compensation,
            lockstep=given.lockstep,
            records=given.records,
            grace=given.grace,
        )
