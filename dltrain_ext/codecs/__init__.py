"""Codecs: what the messages of an all-reduce carry.

``CODECS`` lists their names. The arithmetic is fp32. Elements share a scale in blocks. A message, little-endian, is::

    scales   float32, one a block (not raw, fp16, bf16)
    units    of one code or several; unit j of a block of U units holds those of elements j, j + U, j + 2U, ... of the
             block, in its lowest bits first. The last block ends with the last unit that holds an element.

===== ===== ============= ============================== ========================= =========================
codec block bytes/element an element is                  error, nearest (max, rms) error, stochastic
===== ===== ============= ============================== ========================= =========================
raw       1 4             float32                        0                         0
fp16      1 2             IEEE 754 half                  2^-11, 2^-11              2^-10, 2^-11
bf16      1 2             bfloat16                       2^-8, 2^-8                2^-7, 2^-8
fp8     128 1.03125       e4m3fn times absmax / 448      1/28, 1/28                1/14, 1/28
int8    256 1.015625      -127..127 times absmax / 127   1/254, 1/254              1/127, 1/254
int4    128 0.53125       -7..7 times absmax / 7         1/14, 1/14                1/7, 1/14
sign    256 0.140625      a bit, set: minus, times the   1, 1/2                    2, 1
                          block's mean magnitude
===== ===== ============= ============================== ========================= =========================

Errors are bounds relative to the block's largest magnitude, as :func:`error_bound` has them, up to fp32 rounding (a
factor of 1 + 1e-4); the rms of stochastic rounding is an expectation. fp16 and bf16, blocks of one element, keep them
down to 2^-14 and 2^-126, and the absolute error below. In fp8 the error is also relative to the element (2^-4,
stochastic 2^-3) down to 2^-6 / 448 of the largest.

- int8's numbers are in two's complement; int4's are stored 8 larger, as 1 to 15.
- Rounding is to nearest even, or stochastic: unbiased, with a Philox stream (Salmon et al., 2011) keyed by (seed, step)
  and counted by (element, rank), so the same on any number of threads and on any device. Stochastic sign takes the
  largest magnitude for the scale. raw rounds nothing.
- A NaN or an infinity makes its whole block NaN; so does a finite number that rounds beyond fp16's or bf16's range.
- A block whose largest (sign to nearest: mean) magnitude is below 2^-117, about 6e-36, becomes zero: 127 / absmax would
  overflow near 4e-37. raw, fp16 and bf16 have no such threshold.
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
    """The elements of a block, which share a scale; 1 where there is none."""
    return _find(codec).block


def error_bound(codec: str, rounding: str = "nearest") -> ErrorBound:
    """The bound of the codec's error with that rounding, "nearest" or "stochastic"."""
    return ErrorBound(*_find(codec).error(is_stochastic(rounding)))


def nbytes(codec: str, numel: int) -> int:
    """Bytes of the message of ``numel`` elements."""
    check_number(numel, "numel", 2**60 + 1)
    return _find(codec).bytes(numel)


def empty(tensor: Any, codec: str) -> Encoded:
    """A message for that tensor, or array, that is still to be written: ``out`` of :func:`encode`."""
    given, in_kind = as_tensor(tensor, "tensor")
    message = _empty(given, codec)
    return replace(message, wire=in_kind(message.wire))


def zero_residual(tensor: Any, *, feedback_dtype: str = "fp32") -> Tensor:
    """A residual for :func:`encode` that holds nothing yet.

    Args:
        tensor: what will be encoded; the residual has its shape and device.
        feedback_dtype: "fp32", or "bf16" for half the memory and less exact feedback.
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
    """Encode ``tensor * scale + residual * loss_scale``, and keep in ``residual`` what that lost.

    Args:
        tensor: float32, float16 or bfloat16 of any shape, on the CPU or a CUDA device; or an array with
            ``__dlpack__`` of a library with ``from_dlpack`` (NumPy, CuPy, JAX); one on a device is used on torch's
            current stream.
        codec: one of ``CODECS``.
        residual: error feedback (Seide et al., 2014; Karimireddy et al., 2019), float32 or bfloat16 of the tensor's
            shape, updated in place. In units of the unscaled, averaged gradient. Where a block is not finite it stays
            as it is. Not with stochastic sign, whose error can exceed what it encodes: feedback would make it grow.
        scale: what the tensor is multiplied by first: 1 / world size where contributions will be averaged.
        loss_scale: a float32 tensor of one number above 0, where the tensor lies: so many times larger than the
            residual is the tensor. 1 where None.
        rounding: "nearest" (ties to even) or "stochastic".
        seed, step, rank, first: key and counter of the stochastic rounding; at least 0, step and rank below 2^32.
            ``first``, a multiple of 4, is the number of the tensor's first element: tensors of one step that share it
            are rounded alike, so give them ranges, or seeds, of their own.
        decoded: written with what the message stands for; float32, float16 or bfloat16 of the tensor's shape, or the
            tensor itself. Otherwise what is written shares no memory with anything else; ``out`` may be a received
            message.
        out: an ``Encoded`` whose wire is written and which is returned, in the place of a new one.

    Returns:
        The message; its wire is of the tensor's kind, or ``out``.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
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
    """A hop of an all-reduce in one pass: encode the sum of messages and of one's own contribution.

    The sum is taken in fp32, in this order: ``received[:position]``, ``tensor * scale``, ``received[position:]``,
    ``residual * loss_scale``.

    Args:
        tensor: one's own contribution, as for :func:`encode`.
        received: messages of one codec, each of as many elements.
        codec: that of ``received``, and of the result; needed where ``received`` is empty.
        position: how many of the received come before one's own in the sum.
        residual, scale, loss_scale, rounding, seed, step, rank, first, decoded, out: as for :func:`encode`.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    stochastic = is_stochastic(rounding)
    for name, number, bound in (("seed", seed, 2**63), ("step", step, 2**32), ("rank", rank, 2**32)):
        check_number(number, name, bound)
    if not isinstance(received, Sequence):
        raise TypeError(f"received: expected a sequence of messages, got {type(received).__name__}")
    own, in_kind = as_tensor(tensor, "tensor")
    if codec is None:
        if not received:
            raise ValueError("codec: expected one of " + ", ".join(CODECS) + " where nothing is received, got None")
        codec = getattr(received[0], "codec", CODECS[0])
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
    """What a message stands for.

    Args:
        encoded: the message.
        out: where to write it; float32, float16 or bfloat16, of as many elements as were encoded. A new tensor or
            array of the kind, shape and dtype that was encoded where None.
        return_stats: also return the sum of squares and the non-finite flag of what is written, found in the same pass.

    Returns:
        ``out``, or ``(out, DecodeStats)``.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
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
    if codec not in CODECS:  # which is no text that C++ could take, maybe
        raise ValueError(f"codec: expected one of {', '.join(CODECS)}, got {codec!r}")
    return _ops.find_codec(codec)


def _wire_of(
    given: Any, name: str, codec: str | None, numel: int | None, *, written: bool = False
) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """As :func:`as_tensor` of a message that is checked; None: whatever it says of itself."""
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
