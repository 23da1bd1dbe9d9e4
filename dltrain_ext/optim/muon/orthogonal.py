"""Newton-Schulz iterations, which bring the singular values of a matrix close to 1."""

import math

import torch
from torch import Tensor

# For how many iterations a Gram matrix may be followed before it is computed anew. Rounding makes some eigenvalues of
# a singular one negative. Each iteration multiplies these by up to 12, and where they have become large, X diverges.
# float32 may mean products in TF32.
LONGEST = {torch.float32: 3, torch.bfloat16: 2}

Coefficients = tuple[float, float, float]


def orthogonalized(matrix: Tensor, coefficients: Coefficients, steps: int, eps: float, dtype: torch.dtype) -> Tensor:
    """Returns the matrix after ``steps`` iterations X <- P X with P = a I + b X X' + c (X X')^2, from X divided by its
    Frobenius norm, or by eps if that is larger (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

    Args:
        matrix: (rows, columns), of any floating type.
        dtype: one of ``LONGEST``, that of the products and of the result.
    """
    x = matrix.to(dtype)
    x = x / x.norm().clamp(min=eps)
    period = _period(min(x.shape), max(x.shape), dtype)
    for begin in range(0, steps, period):
        x = _advanced(x, coefficients, min(period, steps - begin))
    return x


def _advanced(x: Tensor, coefficients: Coefficients, steps: int) -> Tensor:
    """Returns X after these iterations. They follow its Gram matrix, as that of P X is P (X X') P, and multiply X at
    the end by the product of all P. If X has more rows than columns, they do so with X' X and X P, which is the same.
    """
    a, b, c = coefficients

    def factor_of(gram: Tensor) -> Tensor:
        factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal().add_(a)
        return factor

    is_tall = x.size(0) > x.size(1)
    gram = x.T @ x if is_tall else x @ x.T
    product = factor = factor_of(gram)
    for _ in range(steps - 1):
        gram = factor @ gram @ factor
        factor = factor_of(gram)
        product = factor @ product
    return x @ product if is_tall else product @ x


def _period(short: int, long: int, dtype: torch.dtype) -> int:
    """Returns for how many iterations Gram matrices are followed. From one to the next, n iterations take as long as
    2 long / short - 3 + 4 n products of square matrices (short, short)."""
    return LONGEST[dtype] if 2 * long > 3 * short else 1


def usual_dtype(matrix: Tensor) -> torch.dtype:
    """Returns the dtype with which the iterations are faster: bfloat16 where there are instructions for its products,
    unless the matrix is small and on the CPU."""
    if matrix.device.type != "cpu":
        return torch.bfloat16
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    is_supported = any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16"))
    return torch.bfloat16 if is_supported and min(matrix.shape) > 128 else torch.float32


def cost(matrix: Tensor, steps: int, dtype: torch.dtype) -> float:
    """Returns how many multiplications the iterations take."""
    short, long = min(matrix.shape), max(matrix.shape)
    periods = math.ceil(steps / _period(short, long, dtype))
    return short**2 * (periods * (2 * long - 3 * short) + 4 * steps * short)
