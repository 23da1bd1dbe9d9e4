"""AdamW whose step updates a whole parameter group in one call."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dltrain_ext._arguments import as_number, check_numbers
from dltrain_ext.optim.fused import FusedStep, as_float
from dltrain_ext.optim.rule import RULES


class AdamW(FusedStep, torch.optim.AdamW):
    """``torch.optim.AdamW``, in one pass over all parameters of a group.

    Arguments, behaviour and, for float32 parameters, ``state_dict`` are torch's (Loshchilov & Hutter 2019; AMSGrad:
    Reddi, Kale & Kumar 2018), so checkpoints go both ways. Parameters and gradients are float32, float16 or bfloat16 in
    any mix, of any shape and stride, on the CPU or, where the build has it, on CUDA devices; gradients are only read.
    Moments are float32 always. ``foreach``, ``fused`` and ``capturable`` are kept in the state and change nothing here:
    on CUDA the step can always be captured in a graph, once the state exists.

    ``master_weights="auto"`` keeps a float32 master of each float16 or bfloat16 parameter in its state
    (``"master_param"``), made of the parameter at its first step; the step updates the master and writes the parameter
    as its copy. Who writes to such a parameter by hand later deletes the master from its state: the next step makes it
    anew. With False the parameter itself is updated, rounded at every step.

    With a GradScaler the gradients are unscaled on the way, and a step with ``found_inf != 0`` is skipped whole.

    Raises:
        ValueError: ``differentiable=True``: the step is no autograd operation; a wrong ``master_weights``.
        TypeError, ValueError (from ``step``): a parameter, gradient or state tensor that does not fit, by index in
            its group; no parameter has been changed then.
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
    ) -> None:
        check_numbers(lr=lr, eps=eps, weight_decay=weight_decay)
        _check_betas(betas)
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
        )

    def _optional_states(self, group: dict[str, Any]) -> Sequence[str]:
        return ["max_exp_avg_sq"] * bool(group["amsgrad"])

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        betas: Any = group.get("betas")
        _check_betas(betas)
        beta1, beta2 = (as_number(beta, "betas") for beta in betas)
        if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
            raise ValueError(f"betas: expected two numbers >= 0 and < 1, got {betas!r}")
        return {
            "beta1": beta1,
            "beta2": beta2,
            "eps": as_float(group, "eps"),
            "weight_decay": as_float(group, "weight_decay"),
        }


def _check_betas(betas: Any) -> None:
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise TypeError(f"betas: expected two numbers, got {betas!r}")
    check_numbers(betas=betas[0])
    check_numbers(betas=betas[1])
