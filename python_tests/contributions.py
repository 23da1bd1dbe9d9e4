"""Inputs of the ranks for all-reduces in tests, and comparisons of their results."""

import torch
import torch.distributed as dist

from dltrain_ext import codecs, comm

LOSSY = [codec for codec in codecs.CODECS if codecs.error_bound(codec).max > 0]


def fitting(codec: str) -> list[str]:
    """Return the algorithms that accept a codec; those that encode more than once accept only lossless codecs."""
    return [name for name in comm.ALGORITHMS if codec not in LOSSY or not comm.plan(name, 0, 1).exact]


def whole(rank: int, numel: int) -> torch.Tensor:
    """Return small integers, whose sums are exact in any order."""
    return _periodic((torch.arange(31) * 7 + rank * 13) % 31 - 15, numel)


def whole_total(world_size: int, numel: int) -> torch.Tensor:
    """Return the sum of the integers of all ranks."""
    return _periodic(sum((whole(rank, 31) for rank in range(world_size)), torch.zeros(31)), numel)


def _periodic(values: torch.Tensor, numel: int) -> torch.Tensor:
    return values.float().repeat(numel // len(values) + 1)[:numel].clone()


def normal(rank: int, numel: int, step: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + rank))


def same_everywhere(tensor: torch.Tensor) -> bool:
    """Return whether all ranks have the same bits as rank 0."""
    first = tensor.clone()
    dist.broadcast(first, 0)
    return torch.equal(first.view(torch.uint8), tensor.view(torch.uint8))


def assert_same(one, other):
    """Assert that two nested states are equal, bit by bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other
