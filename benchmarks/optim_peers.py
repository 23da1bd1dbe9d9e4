"""Optimizers of other packages, which are all optional, and the formulas that their results are checked against."""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dltrain_ext import reference
from dltrain_ext.optim.rule import RULES

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
MOVING = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}


class LARSByHand(torch.optim.Optimizer):
    """LARS as in the paper (You, Gitman & Ginsburg 2017), written with torch's multi-tensor functions.

    `vectors`: parameters of one dimension have weight decay but no trust ratio ("decayed"), neither ("plain"), or both
    ("adapted").
    """

    def __init__(
        self,
        params: list[torch.nn.Parameter],
        lr: float,
        momentum: float,
        weight_decay: float,
        vectors: str = "decayed",
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "vectors": vectors})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            params, vectors = group["params"], group["vectors"]
            grads, decay = [p.grad for p in params], group["weight_decay"]
            for p in params:
                self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            buffers = [self.state[p]["momentum_buffer"] for p in params]
            norms, grad_norms = (torch.stack(torch._foreach_norm(tensors)) for tensors in (params, grads))
            ratios = torch.where((norms > 0) & (grad_norms > 0), 1e-3 * norms / (grad_norms + decay * norms), 1.0)
            flat = torch.tensor([p.ndim <= 1 and vectors != "adapted" for p in params], device=ratios.device)
            factors = torch.where(flat, 1.0, ratios) * group["lr"]
            if vectors == "plain":
                decays = [0.0 if p.ndim <= 1 else decay for p in params]
                updates = torch._foreach_add(grads, torch._foreach_mul(params, decays))
            else:
                updates = torch._foreach_add(grads, params, alpha=decay)
            torch._foreach_mul_(updates, list(factors.unbind()))
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, updates)
            torch._foreach_sub_(params, buffers)


class LangevinByHand(torch.optim.Optimizer):
    """SGLD (Welling & Teh 2011) with torch's noise."""

    def __init__(self, params: list[torch.nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "temperature": 1.0})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            params = group["params"]
            torch._foreach_add_(params, [p.grad for p in params], alpha=-group["lr"] / 2)
            noise = [torch.randn_like(p) for p in params]
            torch._foreach_add_(params, noise, alpha=group["temperature"] * group["lr"] ** 0.5)


class ByReference(torch.optim.Optimizer):
    """An optimizer that torch does not have, as one writes it with torch's functions for each parameter."""

    def __init__(self, params: list[torch.nn.Parameter], name: str, lr: float, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})
        self._rule, self._update = RULES[name], getattr(reference, f"{name}_")

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            options = {name: value for name, value in group.items() if name in ("lr", *self._rule.hyper)}
            for index, p in enumerate(group["params"]):
                state = self.state[p]
                for key, initial, is_state in self._entries:
                    if key not in state:
                        number = index if key == "number" else initial
                        state[key] = torch.full(p.shape if is_state else (), number, dtype=p.dtype, device=p.device)
                self._update([p], [p.grad], *([state[key]] for key, _, _ in self._entries), [], **options)

    @property
    def _entries(self) -> list[tuple[str, float, bool]]:
        states = [(state.key, state.initial, True) for state in self._rule.states]
        return states + [(counter.key, counter.initial, False) for counter in self._rule.counters]


class NormLimited(torch.optim.Optimizer):
    """SGD whose step is limited to a fraction of the norm of the parameter: what bitsandbytes calls LARS."""

    def __init__(self, params: list[torch.nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad).add_(p, alpha=group["weight_decay"])
                p.sub_(buffer * (group["lr"] * min(1.0, (0.02 * p.norm() / buffer.norm()).item())))


def of_package(package: str, name: str, **options: Any) -> Make:
    """Return a factory of the optimizer, which raises ModuleNotFoundError if the package is not installed."""
    return lambda params: getattr(importlib.import_module(package), name)(params, **options)


def unclamped(make: Make) -> Make:
    """LAMB of pytorch_optimizer without its limit of a parameter's norm, which the paper does not have."""

    def made(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = make(params)
        optimizer.clamp = math.inf  # type: ignore[attr-defined]
        return optimizer

    return made


@dataclass(frozen=True)
class ThirdParty:
    """An optimizer of another package. `formula` makes its reference, if this is not torch's optimizer.

    `lost`: the rms error, relative to a step, that a state of few bits may cause; the check then uses gradients of
    similar magnitude. It runs on `devices` only and, if `workloads` is not empty, in these only.
    """

    make: Make
    formula: Make | None = None
    lost: float = 0.0
    devices: tuple[str, ...] = ("cpu", "cuda")
    workloads: tuple[str, ...] = ()
    because: str = ""

    def why_not(self, device: str, workload: str) -> str:
        """Return why it is left out; empty if it is not."""
        if device not in self.devices:
            return f"runs only on {' and '.join(self.devices)}"
        return self.because if self.workloads and workload not in self.workloads else ""


ADAMW = {
    "bitsandbytes": ThirdParty(of_package("bitsandbytes.optim", "AdamW32bit")),
    "bitsandbytes 8-bit": ThirdParty(of_package("bitsandbytes.optim", "AdamW8bit"), lost=0.01),
    "torchao 8-bit": ThirdParty(
        of_package("torchao.optim", "AdamW8bit"),
        lost=0.01,
        workloads=("one",),
        because="compiles a kernel for each shape, so it only runs in workload one",
    ),
    "pytorch_optimizer": ThirdParty(of_package("pytorch_optimizer", "AdamW", weight_decay=0.01)),
    "deepspeed": ThirdParty(of_package("deepspeed.ops.adam", "DeepSpeedCPUAdam", weight_decay=0.01), devices=("cpu",)),
}
LION = {
    "pytorch_optimizer": ThirdParty(of_package("pytorch_optimizer", "Lion")),
    "lion-pytorch": ThirdParty(of_package("lion_pytorch", "Lion")),
}
# Its moments have no bias correction, which the trust ratio cancels where there is no weight decay.
UNDECAYED = {"lr": 1e-3, "eps": 1e-30, "weight_decay": 0.0}
LAMB = {
    "pytorch_optimizer": ThirdParty(unclamped(of_package("pytorch_optimizer", "Lamb", **UNDECAYED, adam_debias=True)))
}
PROXIMAL = {"lr": 0.1, "beta": 1.0, "lambda_1": 1e-3, "lambda_2": 1e-3}
FTRL = {"pytorch_optimizer": ThirdParty(of_package("pytorch_optimizer", "FTRL", **PROXIMAL))}
SGD = {
    "bitsandbytes": ThirdParty(of_package("bitsandbytes.optim", "SGD32bit", **MOVING)),
}
LARS = {
    "pytorch_optimizer": ThirdParty(
        of_package("pytorch_optimizer", "LARS", **MOVING),
        formula=lambda params: LARSByHand(params, **MOVING, vectors="plain"),
    ),
    "bitsandbytes": ThirdParty(
        of_package("bitsandbytes.optim", "LARS", **MOVING), formula=lambda params: NormLimited(params, **MOVING)
    ),
    "timm": ThirdParty(
        of_package("timm.optim", "Lars", **MOVING),
        formula=lambda params: LARSByHand(params, **MOVING, vectors="adapted"),
    ),
}
