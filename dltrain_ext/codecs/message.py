"""What the codecs give: messages, and what is known of them."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Encoded:
    """A tensor as a codec's message.

    Attributes:
        wire: the message, uint8 of shape (nbytes,): a tensor, or an array of the kind that was encoded.
        codec: one of ``CODECS``.
        shape: of what was encoded.
        dtype: of what was encoded.
    """

    wire: Any
    codec: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements that were encoded."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return int(self.wire.shape[0])


def check_message(given: Encoded, name: str) -> None:
    """What a message says of itself, as somebody may have sent it."""
    if not isinstance(given.codec, str):
        raise TypeError(f"{name}: expected a message whose codec is a name, got {given.codec!r}")
    shape = given.shape
    if not isinstance(shape, tuple) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"{name}: expected a message whose shape is a tuple of ints of at least 0, got {shape!r}")
    if not isinstance(given.dtype, torch.dtype):
        raise TypeError(f"{name}: expected a message whose dtype is a torch.dtype, got {given.dtype!r}")


class DecodeStats(NamedTuple):
    """What decoding finds out about the values, as tensors of one number where the values lie.

    Attributes:
        sum_squares: float64, added in an order that depends on the number of values alone.
        found_inf: float32, 1 where a value is NaN or infinite, else 0.
    """

    sum_squares: Tensor
    found_inf: Tensor


class ErrorBound(NamedTuple):
    """Of a codec's error, relative to the largest magnitude of a block.

    Attributes:
        max: of an element.
        rms: root mean square over a block; of stochastic rounding an expectation.
    """

    max: float
    rms: float
