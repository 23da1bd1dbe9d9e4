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
    grad_scale: float = 1.0,
) -> None:
    """Loshchilov & Hutter 2019, Algorithm 2; with ``max_exp_avg_sqs`` AMSGrad (Reddi, Kale & Kumar 2018)."""
    for i, (p, g, m, v, step) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True)):
        step += 1
        t = step.item()
        g = (-g if maximize else g) / grad_scale
        p.mul_(1 - lr * weight_decay)
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).add_(g * g, alpha=1 - beta2)
        if max_exp_avg_sqs:
            v = torch.maximum(max_exp_avg_sqs[i], v, out=max_exp_avg_sqs[i])
        p.sub_(lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps))
