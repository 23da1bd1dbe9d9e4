"""Contributions of ranks whose sum is known, and the number of wrong elements of a result."""

import ctypes
import hashlib
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dltrain_ext import codecs


class Data(NamedTuple):
    """A rank's contribution, the sum over all ranks, and the sum of their largest magnitudes."""

    own: Tensor
    total: Tensor
    magnitudes: float

    @classmethod
    def of(cls, part: Callable[[int], Tensor], rank: int, ranks: int, device: "str | torch.device" = "cpu") -> "Data":
        total, magnitudes = torch.zeros_like(part(0), dtype=torch.float64), 0.0
        for contributor in range(ranks):
            values = part(contributor)
            total += values
            magnitudes += values.abs().max().item()
        return cls(part(rank).to(device), total.float().to(device), magnitudes)


def whole_numbers(n: int) -> Callable[[int], Tensor]:
    """Returns contributions whose sum is exact in any order."""
    return lambda rank: ((torch.arange(n) * 7 + 13 * rank) % 251 - 125).float()


def normal(n: int) -> Callable[[int], Tensor]:
    return lambda rank: torch.randn(n, generator=torch.Generator().manual_seed(rank))


def tolerance(codec: str, ranks: int, magnitudes: float) -> float:
    """Returns the largest error of an element: each of p contributions, and the result, is encoded once."""
    if codec == "raw":
        return 0.0
    return (codecs.error_bound(codec).max * (ranks + 1) + 1e-5) * magnitudes


def has_feedback(codec: str, rounding: str) -> bool:
    """Returns whether a residual is possible: not if the error can exceed what is encoded."""
    return codec != "sign" or rounding == "nearest"


def count_wrong(result: Tensor, exact: Tensor, tolerance: float, first: Tensor | None = None) -> int:
    """Counts the elements beyond the tolerance, NaN, or with other bits than rank 0's result ``first`` (None: the
    same)."""
    right = (result - exact).abs_() <= tolerance
    if first is not None:
        right &= result.view(torch.int32) == first.view(torch.int32)
    return result.numel() - int(torch.count_nonzero(right))


def first_if_unlike(result: Tensor) -> Tensor | None:
    """Returns rank 0's result if those of the ranks differ in a bit, else None."""
    held = result.cpu().contiguous()
    digest = hashlib.sha256(ctypes.string_at(held.data_ptr(), held.nbytes)).digest()  # works without NumPy
    own = torch.tensor(list(digest), dtype=torch.uint8)
    digests = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, own)
    if all(torch.equal(digests[0], other) for other in digests):
        return None
    first = result.cpu().clone()
    dist.broadcast(first, 0)
    return first.to(result.device)


def relative_error(result: Tensor, exact: Tensor) -> float:
    """Returns the rms of the error divided by that of the exact result."""
    norm = torch.linalg.vector_norm
    return float(norm(result - exact, dtype=torch.float64) / norm(exact, dtype=torch.float64))
