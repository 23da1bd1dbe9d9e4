"""Adam whose step updates a whole parameter group in one call."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dltrain_ext._arguments import check_numbers
from dltrain_ext.optim.fused import FusedStep
from dltrain_ext.optim.options import check_betas
from dltrain_ext.optim.rule import RULES


class Adam(FusedStep, torch.optim.Adam):
    """``torch.optim.Adam``, in one pass over all parameters of a group.

    Arguments, behaviour and, for float32 parameters, ``state_dict`` are torch's (Kingma & Ba 2015; AMSGrad: Reddi, Kale
    & Kumar 2018). Weight decay is added to the gradient, or is applied as in :class:`AdamW` if
    ``decoupled_weight_decay`` is True.

    Dtypes, devices, ``master_weights``, ``state_codec``, ``rounding`` and ``seed`` are as in :class:`AdamW`. Gradients
    are only read. ``foreach``, ``fused`` and ``capturable`` are stored in the state and change nothing here. With a
    GradScaler the gradients are unscaled in the same pass, and a step with ``found_inf != 0`` is skipped as a whole.

    Raises:
        ValueError: ``differentiable=True``: the step is no autograd operation; a wrong ``master_weights``.
        TypeError, ValueError (from ``step``): a parameter, gradient or state tensor that does not fit, by index in
            its group; then no parameter has been changed.
    """

    _rule = RULES["adam"]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
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
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
            master_weights=master_weights,
            state_codec=state_codec,
            rounding=rounding,
            seed=seed,
        )

    def _optional_states(self, group: dict[str, Any]) -> Sequence[str]:
        return ["max_exp_avg_sq"] * bool(group["amsgrad"])
