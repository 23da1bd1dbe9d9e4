"""The results of the codecs: messages, statistics and error bounds."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Encoded:
    """A tensor as a message of a codec.

    Attributes:
        wire: the message, uint8 of shape (nbytes,): a tensor, or an array of the library of what was encoded.
        codec: one of ``CODECS``.
        shape: the shape of what was encoded.
        dtype: the torch dtype of what was encoded.
    """

    wire: Any
    codec: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """The number of elements that were encoded."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the message in bytes."""
        return int(self.wire.shape[0])


def check_message(given: Encoded, name: str) -> None:
    """Checks the attributes of a message, which another process may have sent."""
    if not isinstance(given.codec, str):
        raise TypeError(f"{name}: expected a message whose codec is a name, got {given.codec!r}")
    shape = given.shape
    if not isinstance(shape, tuple) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"{name}: expected a message whose shape is a tuple of ints of at least 0, got {shape!r}")
    if not isinstance(given.dtype, torch.dtype):
        raise TypeError(f"{name}: expected a message whose dtype is a torch.dtype, got {given.dtype!r}")


class DecodeStats(NamedTuple):
    """Statistics of decoded values, as one-element tensors on the device of the values.

    Attributes:
        sum_squares: float64; the order of the additions depends only on the number of values.
        found_inf: float32, 1 if a value is NaN or infinite, else 0.
    """

    sum_squares: Tensor
    found_inf: Tensor


class ErrorBound(NamedTuple):
    """The bound of a codec's error, relative to the largest magnitude of a block.

    Attributes:
        max: the bound of an element's error.
        rms: the bound of the root mean square over a block; with stochastic rounding, of its expected value.
    """

    max: float
    rms: float
