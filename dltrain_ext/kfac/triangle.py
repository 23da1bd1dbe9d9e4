"""Symmetric matrices of n x n elements as n (n + 1) / 2, in rectangular full packed format.

The format (Gustavson et al. 2010, ACM TOMS 37, 2) keeps the lower triangle. Its left half lacks a corner above the
diagonal, which has room for the right half, transposed::

    00                                22 32
    10 11                             00 33            of 5 x 5:    00 33 43
    20 21 22         of 4 x 4:        10 11                         10 11 44
    30 31 32 33                       20 21                         20 21 22
                                      30 31                         30 31 32
                                                                    40 41 42

Packing copies blocks, so it needs no table of indices.
"""

from torch import Tensor


def packed_numel(size: int) -> int:
    """Returns the number of elements of a packed matrix."""
    return size * (size + 1) // 2


def pack(matrix: Tensor) -> Tensor:
    """Returns the lower triangle of a matrix (n, n) as a new tensor (n (n + 1) / 2)."""
    n = len(matrix)
    columns, even = (n + 1) // 2, 1 - n % 2
    packed = matrix.new_empty(n + even, columns)
    packed[even:] = matrix[:, :columns]
    _corner(packed).tril_(-1).add_(matrix[columns:, columns:].tril().t())
    return packed.flatten()


def unpack(packed: Tensor, size: int) -> Tensor:
    """Returns the symmetric matrix (size, size) of a packed one, as a new tensor."""
    columns, even = (size + 1) // 2, 1 - size % 2
    packed = packed.view(size + even, columns)
    matrix = packed.new_empty(size, size)
    matrix[:, :columns] = packed[even:]
    matrix[columns:, columns:] = _corner(packed).t()
    return matrix.tril_().add_(matrix.tril(-1).t())


def _corner(packed: Tensor) -> Tensor:
    """Returns the square in and above whose diagonal the right half of the triangle is."""
    rows, columns = packed.shape
    half = columns if rows > 2 * columns else columns - 1
    return packed[:half, columns - half :]
