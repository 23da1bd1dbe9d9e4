"""Adagrad whose step updates a whole parameter group in one call."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad

from dltrain_ext._arguments import as_number, check_numbers
from dltrain_ext.optim.fused import FusedStep
from dltrain_ext.optim.options import as_float
from dltrain_ext.optim.rule import RULES


class Adagrad(FusedStep, torch.optim.Adagrad):
    """``torch.optim.Adagrad``, in one pass over all parameters of a group.

    Arguments, behaviour and, for float32 parameters, ``state_dict`` are torch's (Duchi, Hazan & Singer 2011). Dtypes,
    devices and ``master_weights`` are as in :class:`AdamW`. Sums are float32. Gradients are only read. Sparse
    gradients (COO, of float32 parameters, without weight decay) go through torch's own function. ``foreach`` and
    ``fused`` are stored in the groups and have no effect.

    With a GradScaler the gradients are unscaled in the same pass, and a step with ``found_inf != 0`` is skipped.

    Raises:
        ValueError: ``differentiable=True``, as the step is no autograd operation, or a wrong ``master_weights``.
        TypeError, ValueError (from ``step``): a parameter, gradient or state tensor is invalid. The message has its
            index in the group, and no parameter has been changed.
    """

    _rule = RULES["adagrad"]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: str | bool = "auto",
    ) -> None:
        check_numbers(
            lr=lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
        )
        try:
            super().__init__(
                params,
                lr,
                lr_decay,
                weight_decay,
                as_number(initial_accumulator_value, "initial_accumulator_value"),
                eps,
                foreach,
                maximize=maximize,
                differentiable=differentiable,
                fused=fused,
                master_weights=master_weights,
            )
        except RuntimeError as error:
            if "overflow" not in str(error):
                raise
            text = f"expected one that params can represent, got {initial_accumulator_value}"
            raise ValueError(f"initial_accumulator_value: {text}") from error
        for p, entry in self.state.items():  # torch creates it with the parameter's dtype
            if p.dtype != torch.float32:
                entry["sum"] = entry["sum"].float()

    def _initial(self, group: dict[str, Any]) -> Mapping[str, float]:
        return {"sum": as_float(group, "initial_accumulator_value")}

    def _update_sparse(self, params: Sequence[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        sums, steps = ([self.state[p][name] for p in params] for name in ("sum", "step"))
        options = ("weight_decay", "lr_decay", "eps", "maximize")
        given = {name: group[name] for name in options}
        adagrad(
            list(params), grads, sums, steps, has_sparse_grad=True, foreach=False, lr=as_float(group, "lr"), **given
        )
