"""Codecs encode tensors into the messages of an all-reduce.

``CODECS`` lists their names. The arithmetic is in fp32. The elements of a block share a scale. A message is
little-endian and consists of::

    scales   float32, one per block (none in raw, fp16, bf16)
    words    of one code or several; word j of a block of W words holds those of elements j, j + W, j + 2W, ... of the
             block, the first of them in its lowest bits. The last block ends with the last word that holds an element.

===== ===== ============= ============================== ========================= =========================
codec block bytes/element an element is                  error, nearest (max, rms) error, stochastic
===== ===== ============= ============================== ========================= =========================
raw       1 4             float32                        0                         0
fp16      1 2             IEEE 754 half                  2^-11, 2^-11              2^-10, 2^-11
bf16      1 2             bfloat16                       2^-8, 2^-8                2^-7, 2^-8
fp8     128 1.03125       e4m3fn times absmax / 448      1/28, 1/28                1/14, 1/28
int8    256 1.015625      -127..127 times absmax / 127   1/254, 1/254              1/127, 1/254
int4    128 0.53125       -7..7 times absmax / 7         1/14, 1/14                1/7, 1/14
sign    256 0.140625      a bit, set for minus, times    1, 1/2                    2, 1
                          the block's mean magnitude
===== ===== ============= ============================== ========================= =========================

Errors are bounds relative to the largest magnitude of the block, as :func:`error_bound` returns them. fp32 rounding may
exceed them by a factor of 1 + 1e-4, and the rms error of stochastic rounding is an expected value. fp16 and bf16, with
blocks of one element, have these relative errors down to 2^-14 and 2^-126, and below the same absolute error as there.
In fp8 the error is also relative to the element, at most 2^-4 of it (stochastic 2^-3), down to 2^-6 / 448 of the
largest.

- The codes of int8 are in two's complement; those of int4 are stored plus 8, as 1 to 15.
- Rounding is to nearest even, or stochastic, which is unbiased. Its Philox stream (Salmon et al., 2011) is keyed by
  (seed, step) and counted by (element, rank), so it does not depend on the number of threads or the device.
  Stochastic sign uses the largest magnitude as the scale. raw does not round.
- A NaN or an infinity makes its whole block NaN. So does a finite number that rounds beyond the range of fp16 or bf16.
- A block whose largest magnitude (for sign to nearest: mean magnitude) is below 2^-117, about 6e-36, becomes zero,
  because 127 / absmax would overflow near 4e-37. raw, fp16 and bf16 have no such threshold.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dltrain_ext import _ops
from dltrain_ext._arguments import as_number, check_number
from dltrain_ext.codecs.arguments import as_tensor, check_tensor, dtype_of_feedback, is_stochastic
from dltrain_ext.codecs.message import DecodeStats, Encoded, ErrorBound, check_message

CODECS: tuple[str, ...] = tuple(codec.name for codec in _ops.codecs())

__all__ = [
    "CODECS",
    "DecodeStats",
    "Encoded",
    "ErrorBound",
    "block_size",
    "decode",
    "empty",
    "encode",
    "error_bound",
    "nbytes",
    "reduce",
    "zero_residual",
]


def __getattr__(name: str) -> Any:
    if name == "GradStats":
        warnings.warn("codecs.GradStats is deprecated: use codecs.DecodeStats", DeprecationWarning, stacklevel=2)
        return DecodeStats
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def block_size(codec: str) -> int:
    """Returns the number of elements of a block, which share a scale; 1 for codecs without scales."""
    return _find(codec).block


def error_bound(codec: str, rounding: str = "nearest") -> ErrorBound:
    """Returns the bound of the codec's error; ``rounding`` is ``"nearest"`` or ``"stochastic"``."""
    return ErrorBound(*_find(codec).error(is_stochastic(rounding)))


def nbytes(codec: str, numel: int) -> int:
    """Returns the size in bytes of the message of ``numel`` elements."""
    check_number(numel, "numel", 2**60 + 1)
    return _find(codec).bytes(numel)


def empty(tensor: Any, codec: str) -> Encoded:
    """Returns an uninitialized message for a tensor or an array, to be used as ``out`` of :func:`encode`."""
    given, in_kind = as_tensor(tensor, "tensor")
    message = _empty(given, codec)
    return replace(message, wire=in_kind(message.wire))


def zero_residual(tensor: Any, *, feedback_dtype: str = "fp32") -> Tensor:
    """Returns a residual of zeros for :func:`encode`.

    Args:
        tensor: the tensor or array that will be encoded; the residual has its shape and device.
        feedback_dtype: ``"fp32"``, or ``"bf16"`` for half the memory and less exact feedback.
    """
    dtype = dtype_of_feedback(feedback_dtype)
    given, _ = as_tensor(tensor, "tensor")
    return torch.zeros(given.shape, dtype=dtype, device=given.device)


def encode(
    tensor: Any,
    codec: str,
    *,
    residual: Tensor | None = None,
    scale: float = 1.0,
    loss_scale: Tensor | None = None,
    rounding: str = "nearest",
    seed: int = 0,
    step: int = 0,
    rank: int = 0,
    first: int = 0,
    decoded: Tensor | None = None,
    out: Encoded | None = None,
) -> Encoded:
    """Encodes ``tensor * scale + residual * loss_scale``, and stores the encoding error in ``residual``.

    Args:
        tensor: a tensor of float32, float16 or bfloat16 of any shape, on the CPU or a CUDA device, or an array with
            ``__dlpack__`` of a library with ``from_dlpack`` (NumPy, CuPy, JAX). An array on a device is used on torch's
            current stream.
        codec: one of ``CODECS``.
        residual: error feedback (Seide et al., 2014; Karimireddy et al., 2019), float32 or bfloat16 of the tensor's
            shape, in units of the unscaled, averaged gradient. It becomes the encoding error divided by ``loss_scale``,
            and does not change in blocks that are not finite. Stochastic sign takes none: its error can exceed what it
            encodes, so feedback would make it grow.
        scale: a factor of the tensor, for example 1 / world size for contributions that will be averaged.
        loss_scale: a one-element float32 tensor above 0, on the tensor's device: the factor by which the tensor is
            larger than the residual. None is 1.
        rounding: ``"nearest"`` (ties to even) or ``"stochastic"``.
        seed, step, rank, first: key and counter of the stochastic rounding, at least 0; step and rank are below 2^32.
            ``first``, a multiple of 4, is the number of the tensor's first element. Tensors of one step with the same
            numbers get the same random numbers, so give them separate ranges, or different seeds.
        decoded: a tensor for the decoded message, float32, float16 or bfloat16 of the tensor's shape, or the tensor
            itself. Apart from this, written tensors must not share memory with others; ``out`` may be a received
            message.
        out: an ``Encoded`` whose wire is written and which is returned; None makes a new one.

    Returns:
        The message, whose wire is of the same library as the tensor, or ``out``.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
    """
    return reduce(
        tensor,
        (),
        codec=codec,
        residual=residual,
        scale=scale,
        loss_scale=loss_scale,
        rounding=rounding,
        seed=seed,
        step=step,
        rank=rank,
        first=first,
        decoded=decoded,
        out=out,
    )


def reduce(
    tensor: Any,
    received: Sequence[Encoded],
    *,
    codec: str | None = None,
    position: int = 0,
    residual: Tensor | None = None,
    scale: float = 1.0,
    loss_scale: Tensor | None = None,
    rounding: str = "nearest",
    seed: int = 0,
    step: int = 0,
    rank: int = 0,
    first: int = 0,
    decoded: Tensor | None = None,
    out: Encoded | None = None,
) -> Encoded:
    """Does one hop of an all-reduce in one pass: encodes the sum of received messages and of this rank's contribution.

    The terms are added in fp32 in this order: ``received[:position]``, ``tensor * scale``, ``received[position:]``,
    ``residual * loss_scale``.

    Args:
        tensor: this rank's contribution, as for :func:`encode`.
        received: a sequence of messages in one codec, each of as many elements as the tensor.
        codec: the codec of ``received`` and of the result; None only if ``received`` is not empty.
        position: the number of received messages that come before the tensor in the sum.
        residual, scale, loss_scale, rounding, seed, step, rank, first, decoded, out: as for :func:`encode`.

    Returns:
        The message, as for :func:`encode`.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
    """
    stochastic = is_stochastic(rounding)
    if not isinstance(received, Sequence):
        raise TypeError(f"received: expected a sequence of messages, got {type(received).__name__}")
    for name, number, bound in (
        ("seed", seed, 2**63),
        ("step", step, 2**32),
        ("rank", rank, 2**32),
        ("first", first, 2**63),
        ("position", position, len(received) + 1),
    ):
        check_number(number, name, bound)
    own, in_kind = as_tensor(tensor, "tensor")
    if codec is None:
        if not received:
            raise ValueError("codec: expected one of " + ", ".join(CODECS) + " where nothing is received, got None")
        codec = getattr(received[0], "codec", CODECS[0])
    else:
        _find(codec)
    messages = []
    for index, message in enumerate(received):
        messages.append(_wire_of(message, f"received[{index}]", codec, own.numel())[0])
        check_tensor(messages[-1], f"received[{index}]", own)
    check_tensor(residual, "residual", own, own.shape, written=True)
    check_tensor(decoded, "decoded", own, own.shape, written=True)
    check_tensor(loss_scale, "loss_scale", own)
    result = _empty(own, codec) if out is None else out
    wire, _ = _wire_of(result, "out", codec, own.numel(), written=True)
    check_tensor(wire, "out", own)
    if (result.shape, result.dtype) != (own.shape, own.dtype):
        raise ValueError(
            f"out: expected a message of {own.dtype} {tuple(own.shape)}, got one of {result.dtype} {result.shape}"
        )
    _ops.encode_sum_(
        own.resolve_neg().contiguous(),
        messages,
        codec,
        position=position,
        scale=as_number(scale, "scale"),
        residual=residual,
        loss_scale=loss_scale,
        wire=wire,
        decoded=decoded,
        stochastic=stochastic,
        seed=seed,
        step=step,
        rank=rank,
        first=first,
    )
    return replace(result, wire=in_kind(wire)) if out is None else out


def decode(encoded: Encoded, out: Any = None, *, return_stats: bool = False) -> Any:
    """Decodes a message.

    Args:
        encoded: the message.
        out: a tensor or array to write to, float32, float16 or bfloat16 of as many elements as were encoded. None makes
            a new one of the library, shape and dtype of what was encoded.
        return_stats: also return the sum of squares and the non-finite flag of the values, computed in the same pass.

    Returns:
        ``out``, or ``(out, DecodeStats)`` with ``return_stats``.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
    """
    wire, in_kind = _wire_of(encoded, "encoded", None, None)
    if out is None:
        values = torch.empty(encoded.shape, dtype=encoded.dtype, device=wire.device)
    else:
        values, _ = as_tensor(out, "out", written=True)
        check_tensor(values, "out", wire)
        if values.numel() != encoded.numel:
            raise ValueError(f"out: expected {encoded.numel} elements, got {values.numel()}")
    dense = values if values.is_contiguous() else torch.empty_like(values, memory_format=torch.contiguous_format)
    stats = None
    if return_stats:
        stats = DecodeStats(
            torch.empty((), dtype=torch.float64, device=wire.device),
            torch.empty((), dtype=torch.float32, device=wire.device),
        )
    _ops.decode_(wire, encoded.codec, dense, **(stats._asdict() if stats else {}))
    if dense is not values:
        values.copy_(dense)
    result = in_kind(values) if out is None else out
    return (result, stats) if stats else result


def _empty(tensor: Tensor, codec: str) -> Encoded:
    wire = torch.empty(nbytes(codec, tensor.numel()), dtype=torch.uint8, device=tensor.device)
    return Encoded(wire, codec, tuple(tensor.shape), tensor.dtype)


def _find(codec: str) -> _ops.Codec:
    if not isinstance(codec, str):
        raise TypeError(f"codec: expected one of {', '.join(CODECS)}, got {codec!r}")
    if codec not in CODECS:  # checked here, because C++ does not accept every str
        raise ValueError(f"codec: expected one of {', '.join(CODECS)}, got {codec!r}")
    return _ops.find_codec(codec)


def _wire_of(
    given: Any, name: str, codec: str | None, numel: int | None, *, written: bool = False
) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Checks a message, and returns its wire as :func:`as_tensor` does; None stands for the message's own value."""
    if not isinstance(given, Encoded):
        raise TypeError(f"{name}: expected an Encoded, got {type(given).__name__}")
    check_message(given, name)
    if codec not in (None, given.codec):
        raise ValueError(f"{name}: expected a message in {codec}, got one in {given.codec}")
    if numel not in (None, given.numel):
        raise ValueError(f"{name}: expected a message of {numel} elements, got one of {given.numel}")
    wire, in_kind = as_tensor(given.wire, name, written=written)
    size = nbytes(given.codec, given.numel)
    if wire.numel() != size:
        raise ValueError(
            f"{name}: expected {size} bytes, which {given.numel} elements are in {given.codec}, got {wire.numel()}"
        )
    return wire, in_kind
