"""SGD whose step updates a whole parameter group in one call."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from dltrain_ext._arguments import check_numbers
from dltrain_ext.optim.fused import NONE, FusedStep
from dltrain_ext.optim.options import as_float
from dltrain_ext.optim.rule import RULES
from dltrain_ext.optim.sparse import has_sparse_grad


class SGD(FusedStep, torch.optim.SGD):
    """``torch.optim.SGD``, in one pass over all parameters of a group.

    Arguments, behaviour and, for float32 parameters, ``state_dict`` are torch's: momentum whose buffer does not contain
    the learning rate (Polyak 1964), Nesterov's form (Sutskever et al. 2013), dampening, and weight decay that is added
    to the gradient. Dtypes, devices, ``master_weights``, ``state_codec``, ``rounding`` and ``seed`` are as in
    :class:`AdamW`. Gradients are only read. Sparse gradients (COO, of float32 parameters, without weight decay) go
    through torch's own function, whose momentum buffers are sparse for them. ``foreach`` and ``fused`` are stored in
    the groups and have no effect.

    With a GradScaler the gradients are unscaled in the same pass, and a step with ``found_inf != 0`` is skipped.

    Raises:
        ValueError: ``differentiable=True``, as the step is no autograd operation, or a wrong ``master_weights``.
        TypeError, ValueError (from ``step``): a parameter, gradient or state tensor is invalid. The message has its
            index in the group, and no parameter has been changed.
    """

    _rule = RULES["sgd"]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: str | bool = "auto",
        state_codec: str | None = None,
        rounding: str = "nearest",
        seed: int = 0,
    ) -> None:
        check_numbers(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay)
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
            master_weights=master_weights,
            state_codec=state_codec,
            rounding=rounding,
            seed=seed,
        )

    def _optional_states(self, group: dict[str, Any]) -> Sequence[str]:
        return ["momentum_buffer"] * (as_float(group, "momentum") != 0)

    def _flagged(self, group: dict[str, Any], starting: Sequence[Tensor]) -> tuple[Sequence[Tensor], int]:
        return starting, NONE

    def _complete_state(self, params: Sequence[Tensor], group: dict[str, Any]) -> Sequence[Tensor]:
        params = [p for p in params if not has_sparse_grad(p)]  # torch gives those a sparse buffer
        for p in params:
            if self.state[p].get("momentum_buffer", p) is None:  # some versions of torch write None
                del self.state[p]["momentum_buffer"]
        starting = [p for p in params if "momentum_buffer" not in self.state[p]]
        if params:
            super()._complete_state(params, group)
        return starting

    def _update_sparse(self, params: Sequence[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        has_momentum = as_float(group, "momentum") != 0
        buffers = [self.state[p].get("momentum_buffer") if has_momentum else None for p in params]
        options = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
        given = {name: group[name] for name in options}
        sgd(list(params), grads, buffers, has_sparse_grad=True, foreach=False, fused=False, **given)
        for p, buffer in zip(params, buffers, strict=True):
            if has_momentum:
                self.state[p]["momentum_buffer"] = buffer
