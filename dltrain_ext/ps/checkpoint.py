"""The state of all servers as that of one optimizer, in torch's form, and back."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dltrain_ext.optim.fused import FusedStep
from dltrain_ext.optim.state.masters import MASTER
from dltrain_ext.ps.layout import Block
from dltrain_ext.ps.serving import optimizer_named
from dltrain_ext.ps.settings import Settings


class Whole(NamedTuple):
    """The numbers of all keys, by name: their float32 values, and their entries of the optimizer's state."""

    versions: tuple[int, int]
    values: dict[str, Tensor]
    entries: dict[str, dict[str, Tensor]]


def local_optimizer(settings: Settings, values: Mapping[str, Tensor]) -> tuple[FusedStep, dict[str, nn.Parameter]]:
    """Returns an optimizer like that of the servers, with float32 parameters of its own, which have these values."""
    params = {name: nn.Parameter(value.detach().to("cpu", torch.float32, copy=True)) for name, value in values.items()}
    groups: list[dict[str, Any]] = [{"params": [], **options} for options in settings.groups]
    for key in settings.keys:
        groups[key.group]["params"].append((key.name, params[key.name]))
    return optimizer_named(settings.optimizer)(groups, lr=settings.groups[0]["lr"]), params


def complete(optimizer: FusedStep) -> None:
    """Creates the state that a step would create."""
    for group in optimizer.param_groups:
        if group["params"]:
            optimizer._complete_state(group["params"], group)


def _parts(settings: Settings) -> list[tuple[list[str], list[str]]]:
    """Returns the keys of the states and of the counters that a parameter of each group has."""
    parts = []
    for options in settings.groups:
        optimizer = optimizer_named(settings.optimizer)([{"params": [nn.Parameter(torch.zeros(1))], **options}], lr=1.0)
        (group,) = optimizer.param_groups
        states = [state.key for state in optimizer._states_of(group)]
        parts.append((states, [counter.key for counter in optimizer._rule.counters]))
    return parts


def assemble(settings: Settings, blocks: Sequence[Block], states: Sequence[tuple[int, Sequence[int], Tensor]]) -> Whole:
    """Makes the whole of what each server has sent: its number, the versions of its blocks, and their numbers."""
    values = {key.name: torch.zeros(key.shape) for key in settings.keys}
    entries: dict[str, dict[str, Tensor]] = {key.name: {} for key in settings.keys}
    parts = _parts(settings)
    versions = [version for _, some, _ in states for version in some]
    for server, _, numbers in states:
        at = 0
        for block in blocks:
            if block.server != server:
                continue
            key = settings.keys[block.key]
            kept, counters = parts[key.group]
            entry = entries[key.name]
            for name, whole in [("", values[key.name]), *((name, entry.get(name)) for name in kept)]:
                if whole is None:
                    whole = entry[name] = torch.zeros(key.shape)
                whole.view(-1)[block.first : block.first + block.numel].copy_(numbers[at : at + block.numel])
                at += block.numel
            for name in counters:
                entry[name] = numbers[at].clone()
                at += 1
    return Whole((min(versions, default=0), max(versions, default=0)), values, entries)


def divide(
    settings: Settings, blocks: Sequence[Block], optimizer: FusedStep, params: Mapping[str, Tensor]
) -> list[Tensor]:
    """Returns what each server needs of an optimizer that :func:`local_optimizer` has made: as in :func:`assemble`."""
    parts = _parts(settings)
    numbers: list[list[Tensor]] = [[] for _ in settings.servers]
    for block in blocks:
        key = settings.keys[block.key]
        param = params[key.name]
        entry = optimizer.state[param]
        kept, counters = parts[key.group]
        for whole in (entry.get(MASTER, param).detach(), *(entry[name] for name in kept)):
            numbers[block.server].append(whole.reshape(-1)[block.first : block.first + block.numel].float())
        numbers[block.server] += [torch.as_tensor(entry[name], dtype=torch.float32).reshape(1) for name in counters]
    return [torch.cat(some) if some else torch.zeros(0) for some in numbers]
