"""AdamW whose step updates a whole parameter group in one call."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dltrain_ext._arguments import check_numbers
from dltrain_ext.optim.fused import FusedStep
from dltrain_ext.optim.options import check_betas
from dltrain_ext.optim.rule import RULES


class AdamW(FusedStep, torch.optim.AdamW):
    """``torch.optim.AdamW``, in one pass over all parameters of a group.

    Arguments, behaviour and, for float32 parameters, ``state_dict`` are torch's (Loshchilov & Hutter 2019; AMSGrad:
    Reddi, Kale & Kumar 2018), so checkpoints can be exchanged in both directions. Parameters and gradients are float32,
    float16 or bfloat16 in any mix, of any shape and strides, on the CPU or, in a build for CUDA, on CUDA devices.
    Gradients are only read. Moments are float32. ``foreach``, ``fused`` and ``capturable`` are stored in the
    groups and have no effect: on CUDA the step can always be captured in a graph, once the state exists.

    ``master_weights="auto"`` keeps a float32 master of each float16 or bfloat16 parameter in its state
    (``"master_param"``), which is created from the parameter in its first step. A step updates the master and copies it
    to the parameter. If you write to such a parameter later, delete the master from its state; the next step creates a
    new one. ``"8bit"``, for bfloat16 only, keeps eight more bits of each element instead (uint8, under the same key),
    which extend the parameter to 24 bits; ``state_dict()`` has them as a float32 master, and a parameter that you write
    to is taken over. With ``False`` the parameter itself is updated, and rounded in every step: to nearest, where
    bfloat16 loses updates below a 512th to a 256th of the element; or with ``rounding="stochastic"``, for bfloat16
    only, to one of its two neighbours, so that the expectation is that of float32 (Zamirai et al. 2021). The random
    numbers are functions of ``seed``, 0 to 2^53 - 1, of how often the group has taken or skipped a step
    (``"rounding_step"``), the number of the parameter in the optimizer, and the index of the element, so they are the
    same on all replicas, however a parameter is sharded.

    ``state_codec="int8"`` stores moments of parameters with at least 4,096 elements as codes of 8 bits, with a float32
    scale for each 128 elements: 2.06 bytes a parameter instead of 8. ``state_dict()`` has them in float32, or as codes
    with ``compressed=True``. A moment that is not finite makes its block of 128 elements not finite.

    With a GradScaler the gradients are unscaled in the same pass, and a step with ``found_inf != 0`` is skipped.

    Raises:
        ValueError: ``differentiable=True``, as the step is no autograd operation, or a wrong ``master_weights``,
            ``state_codec``, ``rounding`` or ``seed``.
        TypeError, ValueError (from ``step``): a parameter, gradient or state tensor is invalid. The message has its
            index in the group, and no parameter has been changed.
    """

    _rule = RULES["adamw"]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: str | bool = "auto",
        state_codec: str | None = None,
        rounding: str = "nearest",
        seed: int = 0,
    ) -> None:
        check_numbers(lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas(betas)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            master_weights=master_weights,
            state_codec=state_codec,
            rounding=rounding,
            seed=seed,
        )

    def _optional_states(self, group: dict[str, Any]) -> Sequence[str]:
        return ["max_exp_avg_sq"] * bool(group["amsgrad"])
