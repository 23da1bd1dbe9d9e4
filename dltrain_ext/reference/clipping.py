"""Defines the ops of unscaling and clipping in plain torch, as the reference of the tests."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def sum_squares(grads: Sequence[Tensor]) -> Tensor:
    """Returns the sum of squares of all gradients, a float64 number on their device. The gradients have any shapes and
    are float32, float16 or bfloat16 on one device; the op takes at least one. The sum is finite exactly if all
    gradients are. The op may add in another order, so the results may differ by rounding."""
    return torch.stack([grad.double().square().sum() for grad in grads]).sum()


def unscale_and_clip(
    sum_squares: Tensor,
    *,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    max_norm: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes what a step needs, from the sum of squares of gradients that are ``grad_scale`` times too large.

    Returns three numbers: the divisor that unscales the gradients and clips them to the 2-norm ``max_norm`` (float64);
    their norm, unscaled and before clipping (float32); and 1 if they are not all finite or ``found_inf`` is not 0, else
    0 (float32). The first and the last are ``grad_scale`` and ``found_inf`` of the optimizers' ops. The algorithm is
    Pascanu, Mikolov & Bengio 2013, Algorithm 1, in the form of ``torch.nn.utils.clip_grad_norm_``.
    """
    scale = torch.ones(()).double() if grad_scale is None else grad_scale.double().reshape(())
    norm = sum_squares.double().sqrt().reshape(()) / scale
    factor = (math.inf if max_norm is None else max_norm) / (norm + 1e-6)
    skip = ~sum_squares.isfinite().reshape(())
    if found_inf is not None:
        skip = skip | (found_inf.reshape(()) != 0)
    return torch.where(factor >= 1, scale, scale / factor), norm.float(), skip.float()
