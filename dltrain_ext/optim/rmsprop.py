"""RMSprop whose step updates a whole parameter group in one call."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dltrain_ext._arguments import check_numbers
from dltrain_ext.optim.fused import FusedStep
from dltrain_ext.optim.options import as_float
from dltrain_ext.optim.rule import RULES


class RMSprop(FusedStep, torch.optim.RMSprop):
    """``torch.optim.RMSprop``, in one pass over all parameters of a group.

    Arguments, behaviour and, for float32 parameters, ``state_dict`` are torch's (Hinton 2012; ``centered``: Graves
    2013). ``eps`` is added to the root; TensorFlow and Graves add it to the mean of the squares before the root is
    taken, and TensorFlow multiplies by the learning rate before the momentum.

    Dtypes, devices and ``master_weights`` are as in :class:`AdamW`; the states are float32, and gradients are only
    read. ``foreach`` and ``capturable`` are stored in the state and change nothing here. With a GradScaler
    the gradients are unscaled in the same pass, and a step with ``found_inf != 0`` is skipped as a whole.

    Raises:
        ValueError: ``differentiable=True``: the step is no autograd operation; a wrong ``master_weights``.
        TypeError, ValueError (from ``step``): a parameter, gradient or state tensor that does not fit, by index in
            its group; then no parameter has been changed.
    """

    _rule = RULES["rmsprop"]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        master_weights: str | bool = "auto",
    ) -> None:
        check_numbers(lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum)
        super().__init__(
            params,
            lr,
            alpha,
            eps,
            weight_decay,
            momentum,
            centered,
            capturable,
            foreach,
            maximize,
            differentiable,
            master_weights=master_weights,
        )

    def _optional_states(self, group: dict[str, Any]) -> Sequence[str]:
        buffer = ["momentum_buffer"] * (as_float(group, "momentum") != 0)
        return buffer + ["grad_avg"] * bool(group["centered"])
