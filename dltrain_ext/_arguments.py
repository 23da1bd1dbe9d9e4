"""Checks of arguments, for all modules."""

import math
from typing import Any, SupportsFloat, SupportsIndex

import torch
from torch import Tensor

# The dtypes that torch can compare; there are few others.
_ORDERED = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}


def check_number(number: int, name: str, bound: int) -> None:
    if not isinstance(number, int):
        raise TypeError(f"{name}: expected an int, got {number!r}")
    if not 0 <= number < bound:
        raise ValueError(f"{name}: expected 0 to {bound - 1}, got {number}")


def as_number(value: Any, name: str) -> float:
    try:
        if isinstance(value, str) or not isinstance(value, SupportsFloat | SupportsIndex):
            raise TypeError  # float() would parse a str
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"{name}: expected a number, got {value!r}") from error


def is_dense(tensor: Tensor) -> bool:
    """Returns whether the elements are plain numbers in memory: the tensor is not sparse, nested or quantized."""
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized


def check_dense(given: Tensor, name: str) -> None:
    if not is_dense(given):
        kind = (
            "a nested one" if given.is_nested else "a quantized one" if given.is_quantized else f"layout {given.layout}"
        )
        raise TypeError(f"{name}: expected a plain dense tensor, got {kind}")


def check_numbers(**given: Any) -> None:
    """Checks numbers before torch compares them. Torch itself checks that a tensor has one element."""
    for name, value in given.items():
        if isinstance(value, Tensor):
            check_dense(value, name)
            if value.dtype not in _ORDERED:
                raise TypeError(f"{name}: expected a number, got a tensor of {value.dtype}")
        elif math.isnan(as_number(value, name)):
            raise ValueError(f"{name}: expected a number, got {value!r}")


def check_schedule(sync_every: int, fragments: int, delay: int) -> None:
    """Checks when the fragments of a model are averaged, for local SGD and for its simulation."""
    for name, value in (("sync_every", sync_every), ("fragments", fragments), ("delay", delay)):
        check_number(value, name, 2**31)
    if fragments < 1:
        raise ValueError(f"fragments: expected at least 1, got {fragments}")
    if sync_every < 1 or sync_every % fragments:
        raise ValueError(f"sync_every: expected a multiple of fragments, {fragments}, got {sync_every}")
    if delay >= sync_every // fragments:
        raise ValueError(
            f"delay: expected less than sync_every / fragments, {sync_every // fragments}, so that one fragment is "
            f"under way at a time, got {delay}"
        )
