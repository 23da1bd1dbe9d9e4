"""Sparse gradients, as embeddings with ``sparse=True`` have them: functions of torch update their parameters."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def has_sparse_grad(p: Tensor) -> bool:
    return p.grad is not None and p.grad.is_sparse


def check(group: dict[str, Any], params: Sequence[Tensor], optimizer: str, *, supported: bool) -> None:
    """Raises TypeError or ValueError, which names the parameter, if the step cannot take the sparse gradients of these
    parameters of the group."""
    index = {id(p): index for index, p in enumerate(group["params"])} if params else {}
    for p in params:
        if not supported:
            raise TypeError(
                f"grads[{index[id(p)]}]: expected a plain dense tensor for {optimizer}, got a sparse one; only "
                "Adagrad and SGD take sparse gradients"
            )
        if p.dtype != torch.float32:
            raise TypeError(f"params[{index[id(p)]}]: expected float32 with a sparse gradient, got {p.dtype}")
        if group.get("state_codec") is not None:
            raise ValueError(
                f"state_codec: expected None in the group of params[{index[id(p)]}], whose gradient is sparse, got "
                f"{group['state_codec']!r}"
            )
        if group["weight_decay"] != 0:
            raise ValueError(
                f"weight_decay: expected 0 in the group of params[{index[id(p)]}], whose gradient is sparse, got "
                f"{group['weight_decay']!r}"
            )


def grads_of(params: Iterable[Tensor], divisor: Tensor | None = None) -> list[Tensor]:
    """Returns the sparse gradients of the parameters, divided by a number."""
    grads = [p.grad for p in params if p.grad is not None]
    return grads if divisor is None else [grad / divisor.reshape(()).to(grad.device) for grad in grads]


def sum_squares(params: Iterable[Tensor]) -> list[Tensor]:
    """Returns the sum of squares of each sparse gradient, float64. The parts of an element are added up before."""
    return [
        torch.linalg.vector_norm(grad.coalesce().values(), dtype=torch.float64).square() for grad in grads_of(params)
    ]
