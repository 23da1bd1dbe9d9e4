"""The compiled part: loads it, and is the only file that names it or torch.ops."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dltrain_ext._build_info import TORCH

if torch.__version__ != TORCH:
    raise ImportError(
        f"dltrain_ext was built against torch {TORCH}, and this is torch {torch.__version__}. Build it again, "
        "in its checkout: pip install --force-reinstall --no-deps --no-cache-dir ."
    )

from dltrain_ext._C import (
    AdamWGroup,
    Communicator,
    Plan,
    Step,
    algorithms,
    check_names,
    codecs,
    make_plan,
    timeout_of,
    verify,
)

__all__ = [
    "AdamWGroup",
    "Communicator",
    "Plan",
    "Step",
    "adamw_",
    "algorithms",
    "check_names",
    "codecs",
    "make_plan",
    "timeout_of",
    "verify",
]


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
    """One AdamW step over lists of float32 CPU tensors, in place; its meaning is :func:`dltrain_ext.reference.adamw_`.

    The lists run in parallel, one entry a parameter, equal shapes within an entry; ``steps`` are one-element tensors
    and advance by one. ``max_exp_avg_sqs`` is empty without AMSGrad. Gradients are divided by ``grad_scale`` on the
    way and not written.

    Raises:
        TypeError, ValueError: naming the list and the index, what was expected and what came.
    """
    torch.ops.dltrain_ext.adamw_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs,
        steps,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        maximize=maximize,
        grad_scale=grad_scale,
    )


@torch.library.register_fake("dltrain_ext::adamw_")
def _(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, **hyper) -> None:
    """Changes its arguments and returns nothing."""
