"""Reads and checks the options and arguments of optimizers."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from dltrain_ext._arguments import as_number, check_number, check_numbers

Preset = TypeVar("Preset")
_SEEDS = 2**53


def as_float(group: dict[str, Any], name: str) -> float:
    """Returns a hyper-parameter; raises TypeError that names it if it is not a number."""
    return as_number(group.get(name), name)


def is_on_cuda(lr: Any) -> bool:
    return isinstance(lr, Tensor) and lr.is_cuda


def seed_of(group: Mapping[str, Any]) -> int:
    """Returns the seed of the group, or 0; raises TypeError or ValueError if it is not one."""
    seed: int = group.get("seed", 0)
    check_number(seed, "seed", _SEEDS)
    return seed


def check_betas(betas: Any) -> None:
    """Raises TypeError if these are not two numbers."""
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise TypeError(f"betas: expected two numbers, got {betas!r}")
    check_numbers(betas=betas[0])
    check_numbers(betas=betas[1])


def betas_of(group: dict[str, Any]) -> tuple[float, float]:
    """Raises TypeError or ValueError if these are not two numbers >= 0 and < 1."""
    betas: Any = group.get("betas")
    check_betas(betas)
    beta1, beta2 = (as_number(beta, "betas") for beta in betas)
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(f"betas: expected two numbers >= 0 and < 1, got {betas!r}")
    return beta1, beta2


def preset_of(group: dict[str, Any], presets: Mapping[str, Preset]) -> Preset:
    """Returns the form of LARS or LAMB that the group names; raises ValueError if there is none."""
    preset = group["preset"]
    if not isinstance(preset, str) or preset not in presets:
        raise ValueError(f"preset: expected one of {', '.join(presets)}, got {preset!r}")
    return presets[preset]


def adapt_of(group: dict[str, Any]) -> str | bool:
    """Returns which tensors of the group have a trust ratio; raises ValueError if it is no such choice."""
    adapt: str | bool = group["adapt"]
    if not isinstance(adapt, int | str) or adapt not in ("auto", True, False):
        raise ValueError(f"adapt: expected 'auto', True or False, got {adapt!r}")
    return adapt


def check_nonnegative(group: dict[str, Any], *names: str) -> None:
    """Checks the learning rate and these other options of an optimizer that torch does not have.

    Raises TypeError or ValueError naming the option that is not a number >= 0, or not one number.
    """
    for name in ("lr", *names):
        value = group[name]
        check_numbers(**{name: value})
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"{name}: expected a tensor of one number, got shape {list(value.shape)}")
        is_on_device = isinstance(value, Tensor) and not value.is_cpu  # reading it would wait for the device
        if not is_on_device and not 0 <= value < math.inf:
            raise ValueError(f"{name}: expected a number >= 0, got {value!r}")


def evaluated(closure: Any) -> Any:
    """Returns the result of the closure of a step, which is called with grad mode enabled, or None if there is none."""
    if closure is None:
        return None
    if not callable(closure):
        raise TypeError(f"closure: expected a callable or None, got {type(closure).__name__}")
    with torch.enable_grad():
        return closure()


def check_iterable(params: Any) -> None:
    if not isinstance(params, Iterable):
        raise TypeError(f"params: expected an iterable of tensors or of groups, got {type(params).__name__}")


def check_finite(numbers: Mapping[str, float]) -> None:
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise ValueError(f"{name}: expected a finite number, got {number}")
