"""The compiled part: loads it, and is the only file that names it or torch.ops."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import register_fake

from dltrain_ext._build_info import TORCH

if torch.__version__ != TORCH:
    raise ImportError(
        f"dltrain_ext was built against torch {TORCH}, and this is torch {torch.__version__}. Build it again, "
        "in its checkout: pip install --force-reinstall --no-deps --no-cache-dir ."
    )

from dltrain_ext._C import (
    AdamWGroup,
    Codec,
    Communicator,
    Plan,
    SGDGroup,
    Step,
    algorithms,
    built_with_cuda,
    check_names,
    codecs,
    find_codec,
    instruction_set,
    instruction_sets,
    make_plan,
    timeout_of,
    verify,
)

__all__ = [
    "AdamWGroup",
    "Codec",
    "Communicator",
    "Plan",
    "SGDGroup",
    "Step",
    "adamw_",
    "algorithms",
    "built_with_cuda",
    "check_names",
    "codecs",
    "decode_",
    "encode_sum_",
    "find_codec",
    "instruction_set",
    "instruction_sets",
    "make_plan",
    "sgd_",
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
    tensor_lr: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One AdamW step over lists of float32 tensors, in place; its meaning is :func:`dltrain_ext.reference.adamw_`.

    The lists run in parallel, one entry a parameter, equal shapes within an entry; ``steps`` are one-element tensors
    and advance by one. ``max_exp_avg_sqs`` is empty without AMSGrad. Gradients are divided by ``grad_scale`` on the
    way and not written. One-element tensors on the device of the parameters: ``tensor_lr`` stands in for ``lr``, and
    where ``found_inf`` is not zero nothing changes.

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
        tensor_lr=tensor_lr,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )


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
    """One SGD step over lists of float32 tensors, in place; its meaning is :func:`dltrain_ext.reference.sgd_`.

    The lists run in parallel, one entry a parameter, equal shapes within an entry; ``momentum_buffers`` is empty
    without momentum. ``first``: the buffers hold nothing yet. The tensors of one number as in :func:`adamw_`.

    Raises:
        TypeError, ValueError: naming the list and the index, what was expected and what came.
    """
    torch.ops.dltrain_ext.sgd_(
        params,
        grads,
        momentum_buffers,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        maximize=maximize,
        first=first,
        tensor_lr=tensor_lr,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )


def encode_sum_(
    tensor: Tensor,
    received: Sequence[Tensor],
    codec: str,
    *,
    position: int = 0,
    scale: float = 1.0,
    residual: Tensor | None = None,
    loss_scale: Tensor | None = None,
    wire: Tensor | None = None,
    decoded: Tensor | None = None,
    stochastic: bool = False,
    seed: int = 0,
    step: int = 0,
    rank: int = 0,
    first: int = 0,
) -> None:
    """Encode a sum; its meaning is :func:`dltrain_ext.reference.encode_sum_`.

    Adds, in fp32 and in this order, what ``received[:position]`` stand for, ``tensor * scale + residual * loss_scale``,
    and what ``received[position:]`` stand for; encodes the sum into ``wire``, writes what ``wire`` stands for to
    ``decoded`` and what encoding lost, over ``loss_scale``, to ``residual``. Without ``wire`` nothing is encoded, and
    ``decoded`` is the sum. ``tensor`` begins at element ``first``, a multiple of 4, of what the rank encodes.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    torch.ops.dltrain_ext.encode_sum_(
        tensor,
        received,
        codec,
        position=position,
        scale=scale,
        residual=residual,
        loss_scale=loss_scale,
        wire=wire,
        decoded=decoded,
        stochastic=stochastic,
        seed=seed,
        step=step,
        rank=rank,
        first=first,
    )


def decode_(
    wire: Tensor, codec: str, out: Tensor, *, sum_squares: Tensor | None = None, found_inf: Tensor | None = None
) -> None:
    """Write what ``wire`` stands for to ``out``; its meaning is :func:`dltrain_ext.reference.decode_`.

    ``sum_squares`` (float64) becomes the sum of squares of ``out`` and ``found_inf`` (float32) 1 where it is not
    finite, else 0; both or neither.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    torch.ops.dltrain_ext.decode_(wire, codec, out, sum_squares=sum_squares, found_inf=found_inf)


@register_fake("dltrain_ext::adamw_")  # type: ignore[untyped-decorator]
@register_fake("dltrain_ext::decode_")  # type: ignore[untyped-decorator]
@register_fake("dltrain_ext::encode_sum_")  # type: ignore[untyped-decorator]
@register_fake("dltrain_ext::sgd_")  # type: ignore[untyped-decorator]
def _changes_its_arguments(*given: object, **options: object) -> None:
    """And returns nothing."""
