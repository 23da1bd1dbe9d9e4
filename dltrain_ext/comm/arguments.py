"""Checks of the arguments of collectives."""

import functools
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from dltrain_ext import _ops
from dltrain_ext._arguments import check_dense, check_number
from dltrain_ext.codecs.arguments import is_stochastic

IN_PLANS = (torch.float32, torch.float16, torch.bfloat16)  # the dtypes that plans add


def is_average(op: "str | dist.ReduceOp") -> bool:
    for name, reduce_op, average in (("sum", dist.ReduceOp.SUM, False), ("avg", dist.ReduceOp.AVG, True)):
        if isinstance(op, str | type(reduce_op) | dist.ReduceOp) and op in (name, reduce_op):
            return average
    raise ValueError(f"op: expected 'sum', 'avg', ReduceOp.SUM or ReduceOp.AVG, got {op!r}")


def check_timeout(timeout: object, name: str, or_none: bool = False) -> None:
    if or_none and timeout is None:
        return
    if not isinstance(timeout, timedelta) or not timedelta(milliseconds=1) <= timeout <= timedelta(days=365):
        others = ", or None" if or_none else ""
        raise ValueError(f"{name}: expected a datetime.timedelta of 1 ms to 365 days{others}, got {timeout!r}")


def _check_texts(**given: object) -> None:
    for name, text in given.items():
        if not isinstance(text, str):
            raise TypeError(f"{name}: expected a str, got {text!r}")
        if not text.isprintable():  # C++ would not accept it either
            raise ValueError(f"{name}: expected a name, got {text!r}")


def check_names(algorithm: str, codec: str, collective: str = "all_reduce") -> None:
    _check_texts(algorithm=algorithm, codec=codec, collective=collective)
    _ops.check_names(algorithm, codec, collective)


def check_tensors(**given: object) -> None:
    for name, value in given.items():
        if not isinstance(value, torch.Tensor) and not (name == "residual" and value is None):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")


def check_list(tensors: Sequence[torch.Tensor], name: str) -> None:
    """Checks a list that has one tensor for each rank, all of one dtype and device."""
    if not tensors:
        raise ValueError(f"{name}: expected a tensor for each rank, got none")
    for rank, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}[{rank}]: expected a torch.Tensor, got {type(tensor).__name__}")
        check_dense(tensor, f"{name}[{rank}]")
        for what, mine, theirs in (
            ("dtype", tensor.dtype, tensors[0].dtype),
            ("device", tensor.device, tensors[0].device),
        ):
            if mine != theirs:
                raise ValueError(f"{name}[{rank}]: expected the {what} of {name}[0], {theirs}, got {mine}")


def check_devices(tensors: Sequence[torch.Tensor], name: str) -> None:
    for rank, tensor in enumerate(tensors):
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(
                f"{name}[{rank}]: expected elements that each have a place of their own, got shape "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}"
            )


def how_to_add(
    op: "str | dist.ReduceOp", rounding: str, algorithm: str, codec: str, seed: int, segments: int | None
) -> tuple[bool, bool]:
    """Checks these options. Returns whether the sum is divided by the number of ranks, and whether roundings are
    stochastic."""
    try:
        return _how_to_add(op, rounding, algorithm, codec, seed, segments)
    except TypeError:  # also that of a key that cannot be one
        return _how_to_add.__wrapped__(op, rounding, algorithm, codec, seed, segments)


# What it has accepted is kept, because a call for a small tensor does not take longer than these checks.
@functools.lru_cache(maxsize=256, typed=True)
def _how_to_add(
    op: "str | dist.ReduceOp", rounding: str, algorithm: str, codec: str, seed: int, segments: int | None
) -> tuple[bool, bool]:
    _check_texts(algorithm=algorithm, codec=codec)
    check_number(seed, "seed", 2**63)
    if segments is not None:
        check_number(segments, "segments", 2**16)
    return is_average(op), is_stochastic(rounding)


def check_sent(nbytes: int, algorithm: str, dtype: torch.dtype) -> None:
    check_names(algorithm, "raw")
    check_number(nbytes, "nbytes", 2**65)
    if not isinstance(dtype, torch.dtype) or dtype not in IN_PLANS:
        raise ValueError(f"dtype: expected torch.float32, torch.float16 or torch.bfloat16, got {dtype!r}")


def checked_device(tensor: torch.Tensor, name: str = "tensor") -> torch.device:
    if not _ops.is_supported(tensor.device):
        raise ValueError(f"{name}: expected a tensor on {_ops.supported_devices}, got one on {tensor.device}")
    return tensor.device
