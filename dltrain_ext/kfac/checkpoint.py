"""The factors in checkpoints: the means over all ranks, so that any number of ranks can load them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dltrain_ext._arguments import as_number
from dltrain_ext.comm import Owners
from dltrain_ext.kfac.layers import Layer, Moment

KEYS = ("A", "G", "A_weight", "G_weight")


def collect(layers: Mapping[str, Layer], owners: Owners) -> dict[str, dict[str, Any]]:
    """Returns the factors A and G of each layer, and their mean weights over the ranks. This is a collective call."""
    return {
        name: {
            key: entry
            for letter, moment in zip("AG", layer.moments, strict=True)
            for key, entry in _mean(moment, letter, owners).items()
        }
        for name, layer in layers.items()
    }


def _mean(moment: Moment, letter: str, owners: Owners) -> dict[str, Any]:
    weight = owners.sum(moment.weight.clone().view(1))
    total = owners.sum(moment.sum.tril())
    factor = torch.where(weight > 0, total / weight, 0).cpu()
    return {letter: factor + factor.tril(-1).t(), f"{letter}_weight": weight.item() / owners.world_size}


def load(state_dict: Any, layers: Mapping[str, Layer]) -> int:
    """Loads the factors into the layers, all or none, and returns the number of steps."""
    if not isinstance(state_dict, Mapping) or not isinstance(state_dict.get("layers"), Mapping):
        raise TypeError(f"state_dict: expected that of a KFAC, got {type(state_dict).__name__}")
    steps, saved = state_dict.get("steps"), state_dict["layers"]
    if type(steps) is not int or steps < 0:
        raise ValueError(f"state_dict: expected a whole number >= 0 as its steps, got {steps!r}")
    if saved.keys() != layers.keys():
        unlike = sorted(map(str, saved.keys() ^ layers.keys()))
        raise ValueError(f"state_dict: expected the layers of this model, but {unlike[0]!r} is only in one of both")
    found = [_checked(name, saved[name], layer) for name, layer in layers.items()]
    for layer, factors in zip(layers.values(), found, strict=True):
        for moment, (factor, weight) in zip(layer.moments, factors, strict=True):
            moment.sum.copy_(factor * weight)
            moment.weight.fill_(weight)
    return steps


def _checked(name: str, entries: Any, layer: Layer) -> list[tuple[Tensor, float]]:
    if not isinstance(entries, Mapping) or entries.keys() != set(KEYS):
        raise ValueError(f"state_dict: expected {', '.join(KEYS)} for layer {name!r}, got {entries!r}")
    found = []
    for letter, moment in zip("AG", layer.moments, strict=True):
        factor, weight = entries[letter], as_number(entries[f"{letter}_weight"], f"{letter}_weight of {name!r}")
        shape = [moment.size, moment.size]
        if not isinstance(factor, Tensor) or list(factor.shape) != shape or factor.dtype != torch.float32:
            raise ValueError(f"state_dict: expected a float32 tensor of shape {shape} as {letter} of {name!r}")
        if not factor.isfinite().all() or (factor.diagonal() < 0).any() or not torch.equal(factor, factor.t()):
            raise ValueError(f"state_dict: expected a second moment, symmetric and finite, as {letter} of {name!r}")
        if not 0 <= weight < float("inf") or not (factor.diagonal() * weight).isfinite().all():
            raise ValueError(f"state_dict: expected a number >= 0 as {letter}_weight of {name!r}, got {weight!r}")
        found.append((factor, weight))
    return found
