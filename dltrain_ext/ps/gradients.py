"""What a worker has to know of its gradients before it pushes them."""

from collections.abc import Iterable

import torch
from torch import Tensor

from dltrain_ext import _ops


def are_finite(gradients: Iterable[Tensor]) -> bool:
    """Returns whether all elements are finite, in one pass over them."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient.detach())
    return all(bool(_ops.sum_squares(some).isfinite()) for some in by_device.values())
