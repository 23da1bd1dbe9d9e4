"""AdamW whose step updates a whole parameter group in one call."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dltrain_ext import _ops
from dltrain_ext.optim.fused import FusedStep


class AdamW(FusedStep, torch.optim.AdamW):
    """``torch.optim.AdamW``, in one pass over all parameters of a group.

    Arguments, behaviour and ``state_dict`` are torch's (Loshchilov & Hutter 2019; AMSGrad: Reddi, Kale & Kumar 2018),
    so checkpoints go both ways. Parameters and gradients are float32, of any shape and stride, on the CPU or, where
    the build has it, on CUDA devices; gradients are only read. ``foreach``, ``fused`` and ``capturable`` are kept in
    the state and change nothing here: on CUDA the step can always be captured in a graph, once the state exists.

    With a GradScaler the gradients are unscaled on the way, and a step with ``found_inf != 0`` is skipped whole.

    Raises:
        ValueError: ``differentiable=True``: the step is no autograd operation.
        TypeError, ValueError (from ``step``): a parameter, gradient or state tensor that does not fit, by index in
            its group; no parameter has been changed then.
    """

    def _make_fused(self) -> _ops.AdamWGroup:
        return _ops.AdamWGroup()

    def _gather(self, fused: _ops.AdamWGroup, group: dict[str, Any], completed: Sequence[Tensor] = ()) -> list[Tensor]:
        return fused.gather(self.state, group["params"], group["amsgrad"])

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {
            "beta1": float(beta1),
            "beta2": float(beta2),
            "eps": float(group["eps"]),
            "weight_decay": float(group["weight_decay"]),
        }

    def _complete_state(self, params: Sequence[Tensor], group: dict[str, Any]) -> None:
        plain: dict[str, Any] = {"dtype": torch.float32, "device": params[0].device}
        # One counter each, although all are equal at first: torch's step would add to a shared one once a parameter.
        steps = torch.zeros(len(params), **plain)
        for index, p in enumerate(params):
            step = self.state[p].get("step")
            self.state[p]["step"] = steps[index] if step is None else torch.as_tensor(step, **plain)
        self._lay_out(params, ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"])
