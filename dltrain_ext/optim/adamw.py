"""AdamW whose step updates a whole parameter group in one call."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dltrain_ext import _ops


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW``, in one pass over all parameters of a group.

    Arguments, behaviour and ``state_dict`` are torch's (Loshchilov & Hutter 2019; AMSGrad: Reddi, Kale & Kumar 2018),
    so checkpoints go both ways. Parameters and gradients are float32 on the CPU, of any shape and stride; gradients
    are only read. ``foreach``, ``fused`` and ``capturable`` are kept in the state and change nothing here.

    With a GradScaler the gradients are unscaled on the way, and a step with ``found_inf != 0`` is skipped whole.

    Raises:
        ValueError: ``differentiable=True``: the step is no autograd operation.
        TypeError, ValueError (from ``step``): a parameter, gradient or state tensor that does not fit, by index in
            its group; no parameter has been changed then.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prepare()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._prepare()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            if group["differentiable"]:
                raise ValueError(
                    "differentiable: expected False, got True; torch.optim.AdamW has a differentiable step"
                )
            if len(set(group["params"])) < len(group["params"]):
                raise ValueError("params: expected each parameter once, got one that is twice in the group")
        except ValueError:
            self.param_groups.pop()
            raise

    def _prepare(self) -> None:
        self._fused: list[_ops.AdamWGroup] = []
        self._step_supports_amp_scaling = True  # asks GradScaler to hand grad_scale and found_inf to step()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what ``closure`` returned, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.item() != 0:
            return loss
        grad_scale = getattr(self, "grad_scale", None)

        while len(self._fused) < len(self.param_groups):
            self._fused.append(_ops.AdamWGroup())
        # All groups are read before the first is changed, so that an error leaves everything as it was.
        steps = []
        for fused, group in zip(self._fused, self.param_groups, strict=False):
            if incomplete := fused.gather(self.state, group["params"], group["amsgrad"]):
                self._complete_state(incomplete, group["amsgrad"])
                fused.gather(self.state, group["params"], group["amsgrad"])
            beta1, beta2 = group["betas"]
            hyper = {
                "lr": float(group["lr"]),
                "beta1": float(beta1),
                "beta2": float(beta2),
                "eps": float(group["eps"]),
                "weight_decay": float(group["weight_decay"]),
                "maximize": bool(group["maximize"]),
                "grad_scale": 1.0 if grad_scale is None else float(grad_scale),
            }
            steps.append((fused, hyper))
        for fused, hyper in steps:
            fused.step(**hyper)
        return loss

    def _complete_state(self, params: Sequence[Tensor], amsgrad: bool) -> None:
        """Gives each parameter what its state lacks: views of flat tensors, since thousands of small ones would lie
        all over memory, and large ones of equal alignment get in each other's way in the cache.
        """
        moments = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * amsgrad
        total = sum(p.numel() for p in params)
        plain = {"dtype": torch.float32, "device": "cpu"}
        arena, steps = torch.zeros(len(moments) * total, **plain), torch.zeros(len(params), **plain)
        offset = 0
        for index, p in enumerate(params):
            state = self.state[p]
            step = state.get("step")
            state["step"] = steps[index] if step is None else torch.as_tensor(step, **plain)
            dense = torch.empty_like(p, device="meta", dtype=torch.float32)  # p's strides, if they leave no holes
            for place, name in enumerate(moments):
                if name in state and not isinstance(state[name], Tensor):
                    kind, shape = type(state[name]).__name__, list(p.shape)
                    raise TypeError(f"state[{name!r}] of a parameter of shape {shape}: expected a tensor, got {kind}")
                if name not in state:
                    state[name] = arena.as_strided(p.shape, dense.stride(), place * total + offset)
            offset += p.numel()
