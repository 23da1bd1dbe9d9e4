"""What every op means, in plain torch: the yardstick of the tests, in whatever precision its arguments have."""

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    tensor_lr: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Loshchilov & Hutter 2019, Algorithm 2; with ``max_exp_avg_sqs`` AMSGrad (Reddi, Kale & Kumar 2018)."""
    if found_inf is not None and found_inf.item() != 0:
        return
    lr = lr if tensor_lr is None else tensor_lr.item()
    for i, (p, g, m, v, step) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True)):
        step += 1
        t = step.item()
        g = (-g if maximize else g) / (1.0 if grad_scale is None else grad_scale)
        p.mul_(1 - lr * weight_decay)
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).add_(g * g, alpha=1 - beta2)
        if max_exp_avg_sqs:
            v = torch.maximum(max_exp_avg_sqs[i], v, out=max_exp_avg_sqs[i])
        p.sub_(lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps))


def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    first: bool = False,
    tensor_lr: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Momentum with the learning rate outside of it (Polyak 1964; Nesterov's form: Sutskever et al. 2013)."""
    if found_inf is not None and found_inf.item() != 0:
        return
    lr = lr if tensor_lr is None else tensor_lr.item()
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        d = (-g if maximize else g) / (1.0 if grad_scale is None else grad_scale)
        if weight_decay:
            d = d + weight_decay * p
        if momentum:
            b = momentum_buffers[i]
            b.copy_(d if first else momentum * b + (1 - dampening) * d)
            d = d + momentum * b if nesterov else b
        p.sub_(lr * d)
