"""What is trained: the sizes of the parameters, the buckets that DDP makes of them, and the times of a step."""

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dltrain_ext import amp, optim

_BUCKETS = 1 << 20, 25 << 20  # bytes of DDP's first bucket, and of the others
_LAYER = 1 << 20  # elements of a parameter, if only their number is known
_MOST = 1 << 26  # elements whose optimizer step is timed
_TURNS = 5

LossOf = Callable[[], Tensor]  # runs forward


@dataclass(frozen=True)
class Workload:
    """The parameters, and the seconds of the parts of a step on one rank.

    numels: elements of the parameters, in their order. forward, backward: seconds. torch_step, our_step: seconds in
    which gradients are unscaled and clipped, and AdamW updates the parameters.
    """

    numels: Sequence[int]
    forward: float
    backward: float
    torch_step: float
    our_step: float

    @property
    def buckets(self) -> list[int]:
        """The bytes of DDP's buckets, in the order in which backward fills them."""
        first, most = _BUCKETS
        buckets: list[int] = []
        open_one = 0
        for numel in reversed(self.numels):
            open_one += 4 * numel
            if open_one >= (most if buckets else first):
                buckets.append(open_one)
                open_one = 0
        return [*buckets, open_one] if open_one else buckets


def load(text: str) -> tuple[nn.Module, LossOf]:
    """Returns the model that ``module:function`` makes, and the function that returns its loss. Raises ValueError that
    says what is wrong with it."""
    module, _, name = text.partition(":")
    try:
        make = getattr(importlib.import_module(module), name)
        model, loss_of = make()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"--model: expected module:function, which returns a module and a function of its loss, got {text!r}: "
            f"{error}"
        ) from error
    if not isinstance(model, nn.Module) or not callable(loss_of):
        raise ValueError(f"--model: expected {text!r} to return a module and a function, got {model!r}, {loss_of!r}")
    return model, loss_of


def of_model(model: nn.Module, loss_of: LossOf, device: torch.device) -> Workload:
    numels = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    if not numels:
        raise ValueError("--model: expected a module with parameters that require gradients, got none")
    model.to(device)
    forward, backward = [], []
    for _ in range(_TURNS + 1):
        model.zero_grad(set_to_none=False)
        began = _now(device)
        loss = loss_of()
        middle = _now(device)
        loss.backward()  # type: ignore[no-untyped-call]
        forward.append(middle - began)
        backward.append(_now(device) - middle)
    return Workload(numels, statistics.median(forward[1:]), statistics.median(backward[1:]), *steps(numels, device))


def of_numel(numel: int, forward: float, backward: float, device: torch.device) -> Workload:
    numels = [min(_LAYER, numel - first) for first in range(0, numel, _LAYER)]
    return Workload(numels, forward, backward, *steps(numels, device))


def steps(numels: Sequence[int], device: torch.device) -> tuple[float, float]:
    """Returns the seconds in which torch's fused AdamW, and ours, with a scaler of each and clipping, update parameters
    of these sizes. Of many parameters the first are timed, and the rest is extrapolated."""
    timed: list[int] = []
    for numel in numels:
        if timed and sum(timed) + numel > _MOST:
            break
        timed.append(numel)
    gradients = [torch.randn(numel, device=device) for numel in timed]
    calls = [by(_parameters(timed, device)) for by in (_torch_step, _our_step)]
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(_TURNS + 1):
        for call, kept in zip(calls, samples, strict=True):
            kept.append(call(gradients))
    theirs, ours = (statistics.median(kept[1:]) * sum(numels) / sum(timed) for kept in samples)
    return theirs, ours


def _parameters(numels: Sequence[int], device: torch.device) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(numel, device=device)) for numel in numels]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    return parameters


def _torch_step(parameters: list[nn.Parameter]) -> Callable[[Sequence[Tensor]], float]:
    device = parameters[0].device
    optimizer, scaler = torch.optim.AdamW(parameters, fused=True), torch.amp.GradScaler(device.type)

    def step() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return _timed(parameters, scaler, step)


def _our_step(parameters: list[nn.Parameter]) -> Callable[[Sequence[Tensor]], float]:
    optimizer, scaler = optim.AdamW(parameters), amp.LossScaler(parameters[0].device.type)

    def step() -> None:
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()

    return _timed(parameters, scaler, step)


def _timed(
    parameters: list[nn.Parameter], scaler: torch.amp.GradScaler, step: Callable[[], None]
) -> Callable[[Sequence[Tensor]], float]:
    device = parameters[0].device

    def call(gradients: Sequence[Tensor]) -> float:
        scaler.scale(torch.zeros(1, device=device))  # makes the scale
        for parameter, gradient in zip(parameters, gradients, strict=True):
            assert parameter.grad is not None
            torch.mul(gradient, scaler.get_scale(), out=parameter.grad)
        began = _now(device)
        step()
        return _now(device) - began

    return call


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
