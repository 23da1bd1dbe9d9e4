"""Checks of the codecs' arguments, and conversion of arrays of other libraries to tensors."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dltrain_ext._arguments import check_dense


def is_stochastic(rounding: str) -> bool:
    if not isinstance(rounding, str) or rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding: expected 'nearest' or 'stochastic', got {rounding!r}")
    return rounding == "stochastic"


def dtype_of_feedback(feedback_dtype: str) -> torch.dtype:
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if not isinstance(feedback_dtype, str) or feedback_dtype not in dtypes:
        raise ValueError(f"feedback_dtype: expected one of {', '.join(dtypes)}, got {feedback_dtype!r}")
    return dtypes[feedback_dtype]


def check_tensor(
    given: Tensor | None, name: str, like: Tensor, shape: torch.Size | None = None, *, written: bool = False
) -> None:
    """Checks what the op cannot check: it is not called if a tensor is on the meta device."""
    if given is None:
        return
    if not isinstance(given, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(given).__name__}")
    check_dense(given, name)
    if written:
        _check_written(given, name)
    if given.device != like.device:
        raise ValueError(f"{name}: expected a tensor on {like.device}, got one on {given.device}")
    if shape is not None and given.shape != shape:
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(given.shape)}")


def _check_written(given: Tensor, name: str) -> None:
    if any(stride == 0 and size > 1 for stride, size in zip(given.stride(), given.shape, strict=True)):
        raise ValueError(
            f"{name}: expected elements that each have a place of their own, got shape {tuple(given.shape)} with "
            f"strides {given.stride()}"
        )
    if given.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: expected a tensor that requires no grad, got one that does; call under torch.no_grad()"
        )


def as_tensor(given: Any, name: str, *, written: bool = False) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Returns the memory of an array as a tensor, and a function that makes arrays of its library from tensors."""
    if isinstance(given, Tensor):
        check_dense(given, name)
        if written:
            _check_written(given, name)
        return given.detach(), lambda tensor: tensor
    if not hasattr(given, "__dlpack__"):
        raise TypeError(f"{name}: expected a tensor or an object with __dlpack__, got {type(given).__name__}")
    if hasattr(given, "__array_namespace__"):
        library = given.__array_namespace__()
    else:
        library = sys.modules.get(type(given).__module__.partition(".")[0])
    if not written and not hasattr(library, "from_dlpack"):
        raise TypeError(f"{name}: expected an array of a library with from_dlpack, got {type(given).__name__}")
    # torch.from_dlpack does not check for negative strides, which would abort the process, and for read-only memory.
    if any(stride < 0 for stride in getattr(given, "strides", None) or ()):
        raise ValueError(f"{name}: expected strides of at least 0, got {given.strides}; make a copy of the array")
    immutable = hasattr(given, "at") or not getattr(getattr(given, "flags", None), "writeable", True)  # JAX, NumPy
    if written and immutable:
        raise ValueError(f"{name}: expected an array that can be written, got a {type(given).__name__} that cannot")
    try:
        return torch.from_dlpack(given), getattr(library, "from_dlpack", lambda tensor: tensor)
    except (AttributeError, BufferError, RuntimeError, TypeError) as error:
        raise ValueError(f"{name}: expected an array that torch.from_dlpack accepts, got the error: {error}") from None
