"""Adadelta whose step updates a whole parameter group in one call."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dltrain_ext._arguments import check_numbers
from dltrain_ext.optim.fused import FusedStep
from dltrain_ext.optim.rule import RULES


class Adadelta(FusedStep, torch.optim.Adadelta):
    """``torch.optim.Adadelta``, in one pass over all parameters of a group.

    Arguments, behaviour and, for float32 parameters, ``state_dict`` are torch's (Zeiler 2012): the learning rate
    of an element is the ratio of the root mean squares of its updates and of its gradients, times ``lr``.

    Dtypes, devices and ``master_weights`` are as in :class:`AdamW`; the states are float32, and gradients are only
    read. ``foreach`` and ``capturable`` are stored in the state and change nothing here. With a GradScaler
    the gradients are unscaled in the same pass, and a step with ``found_inf != 0`` is skipped as a whole.

    Raises:
        ValueError: ``differentiable=True``: the step is no autograd operation; a wrong ``master_weights``.
        TypeError, ValueError (from ``step``): a parameter, gradient or state tensor that does not fit, by index in
            its group; then no parameter has been changed.
    """

    _rule = RULES["adadelta"]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        capturable: bool = False,
        maximize: bool = False,
        differentiable: bool = False,
        master_weights: str | bool = "auto",
    ) -> None:
        check_numbers(lr=lr, rho=rho, eps=eps, weight_decay=weight_decay)
        super().__init__(
            params,
            lr,
            rho,
            eps,
            weight_decay,
            foreach,
            capturable=capturable,
            maximize=maximize,
            differentiable=differentiable,
            master_weights=master_weights,
        )
