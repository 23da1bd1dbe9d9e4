"""Inverses of damped matrices, by Cholesky factorization."""

from collections.abc import Sequence

import torch
from torch import Tensor

GROWTH = 10.0  # of the damping, where a factorization has failed
MOST = 30  # times that it may grow


def cost(size: int) -> float:
    """Returns a number proportional to the time in which a matrix (size, size) is inverted and sent: about 1,000
    multiplications take as long as it takes to move an element."""
    return float(size**3 + 1024 * size**2)


def damped_inverses(matrices: Sequence[Tensor], dampings: Sequence[float]) -> tuple[list[Tensor], list[int]]:
    """Inverts ``matrix + damping * I`` for symmetric matrices (n, n) and dampings > 0.

    The error of an inverse is of the order of its condition number times the dtype's eps. A matrix that rounding, such
    as that of a codec, has made indefinite gets ten times the damping until it can be factorized. The host waits for
    the device once, and once more for each time that some damping grows.

    Returns:
        The inverses, and how many times the damping of each has grown. An inverse is NaN if 30 times were not enough.
    """
    triangles, growths = list(matrices), [0] * len(matrices)
    waiting = list(range(len(matrices)))
    while waiting:
        infos = []
        for index in waiting:
            damped = matrices[index].clone()
            damped.diagonal().add_(dampings[index] * GROWTH ** growths[index])
            triangles[index], info = torch.linalg.cholesky_ex(damped)
            infos.append(info)
        failed = torch.stack(infos).tolist()
        waiting = [index for index, code in zip(waiting, failed, strict=True) if code]
        for index in waiting:
            growths[index] += 1
        for index in (index for index in waiting if growths[index] > MOST):
            triangles[index] = matrices[index].new_full(matrices[index].shape, torch.nan)
        waiting = [index for index in waiting if growths[index] <= MOST]
    return [torch.cholesky_inverse(triangle) for triangle in triangles], growths
