"""Checks of the arguments of the modules that send gradients."""

import torch

from dltrain_ext import _ops
from dltrain_ext._arguments import check_number
from dltrain_ext.codecs import CODECS
from dltrain_ext.codecs.arguments import dtype_of_feedback, is_stochastic
from dltrain_ext.comm.arguments import check_names


def check_codec(codec: object, name: str) -> None:
    """Raises ValueError unless it is the name of a codec; ``name`` is that of the argument."""
    if not isinstance(codec, str) or codec not in CODECS:
        raise ValueError(f"{name}: expected one of {', '.join(CODECS)}, or None, got {codec!r}")


def check_options(
    algorithm: str,
    codec: str,
    *,
    error_feedback: bool,
    feedback_dtype: str,
    scaler: torch.amp.GradScaler | None,
    min_compress_numel: int,
    rounding: str,
    seed: int,
) -> tuple[bool, torch.dtype | None]:
    """Returns whether rounding is stochastic, and the dtype of feedback, or None without feedback.

    Raises TypeError or ValueError that names the argument, the expected and the actual value.
    """
    check_names(algorithm, codec)
    dtype = dtype_of_feedback(feedback_dtype)
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler: expected a LossScaler or torch.amp.GradScaler, got {type(scaler).__name__}")
    check_number(min_compress_numel, "min_compress_numel", 2**63)
    check_number(seed, "seed", 2**63)
    stochastic = is_stochastic(rounding)
    if not error_feedback:
        return stochastic, None
    _ops.check_feedback(codec, stochastic, "error_feedback: expected False")
    return stochastic, dtype
