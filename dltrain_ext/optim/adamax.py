"""Adamax whose step updates a whole parameter group in one call."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dltrain_ext._arguments import check_numbers
from dltrain_ext.optim.fused import FusedStep
from dltrain_ext.optim.options import check_betas
from dltrain_ext.optim.rule import RULES


class Adamax(FusedStep, torch.optim.Adamax):
    """``torch.optim.Adamax``, in one pass over all parameters of a group.

    Arguments, behaviour and, for float32 parameters, ``state_dict`` are torch's (Kingma & Ba 2015, Algorithm 2): Adam
    with the largest magnitude of the gradients so far, decayed, in place of their second moment.

    Dtypes, devices and ``master_weights`` are as in :class:`AdamW`; the states are float32, and gradients are only
    read. ``foreach`` and ``capturable`` are stored in the state and change nothing here. With a GradScaler
    the gradients are unscaled in the same pass, and a step with ``found_inf != 0`` is skipped as a whole.

    Raises:
        ValueError: ``differentiable=True``: the step is no autograd operation; a wrong ``master_weights``.
        TypeError, ValueError (from ``step``): a parameter, gradient or state tensor that does not fit, by index in
            its group; then no parameter has been changed.
    """

    _rule = RULES["adamax"]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        master_weights: str | bool = "auto",
    ) -> None:
        check_numbers(lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas(betas)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            foreach,
            maximize=maximize,
            differentiable=differentiable,
            capturable=capturable,
            master_weights=master_weights,
        )
