"""Checks of a single device: the bytes of codecs, optimizers, the loss scaler, captured graphs."""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dltrain_ext import amp, codecs, optim, reference
from dltrain_ext.codecs import CODECS
from dltrain_ext.selftest import sums
from dltrain_ext.selftest.report import Check, Found, Site, Skip

SHAPES = [(3, 5), (7,), (), (0, 4), (257, 33), (40_000,)]
LIKE_TORCH: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-6}  # torch's variants differ by as much over some steps
ROUNDINGS = ("nearest", "stochastic")


def message_bytes(site: Site) -> Found:
    """Compares messages, decoded values and residuals with the CPU's, and those of the CPU with the reference."""
    on_cpu, total = site.device.type == "cpu", 0
    for codec in CODECS:
        for rounding in ROUNDINGS:
            for numel in (1, 255, 5003) if on_cpu or site.quick else (1, 255, 5003, 2_000_003):
                own, other, residual = _values(numel)
                received = codecs.encode(other, codec)
                expected = _by_reference if on_cpu else _by_the_op
                wanted = expected(codec, rounding, own, received, residual.clone())
                moved = replace(received, wire=received.wire.to(site.device))
                got = _by_the_op(codec, rounding, own.to(site.device), moved, residual.to(site.device, copy=True))
                for name, ours, theirs in zip(("message", "decoded values", "residual"), got, wanted, strict=True):
                    wrong = int((ours.cpu().view(torch.uint8) != theirs.view(torch.uint8)).sum())
                    assert not wrong, f"{codec}, {rounding}, {numel} elements: {wrong} bytes of the {name} differ"
                total += got[0].numel()
    return Found(f"{len(CODECS)} codecs, {total} bytes equal the {'reference' if on_cpu else 'CPU'}'s")


def _values(numel: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a contribution with many magnitudes and elements that are not finite, another contribution and a
    residual."""
    generator = torch.Generator().manual_seed(numel)
    own, other, residual, spread = (torch.randn(numel, generator=generator) for _ in range(4))
    own *= (4 * spread).exp2()
    own[numel // 2 :: 4096] = float("inf") if numel > 1 else 1.0
    return own, other, residual / 8


Message = tuple[Tensor, Tensor, Tensor]


def _by_the_op(codec: str, rounding: str, own: Tensor, received: codecs.Encoded, residual: Tensor) -> Message:
    feedback = residual if sums.has_feedback(codec, rounding) else None
    sent = codecs.reduce(own, [received], residual=feedback, rounding=rounding, seed=5, step=3)
    return sent.wire, codecs.decode(sent), residual


def _by_reference(codec: str, rounding: str, own: Tensor, received: codecs.Encoded, residual: Tensor) -> Message:
    wire, decoded = codecs.empty(own, codec).wire, torch.empty_like(own)
    feedback = residual if sums.has_feedback(codec, rounding) else None
    options: dict[str, Any] = {"stochastic": rounding == "stochastic", "seed": 5, "step": 3}
    reference.encode_sum_(own, [received.wire], codec, residual=feedback, wire=wire, decoded=decoded, **options)
    return wire, decoded, residual


def _parameters(device: torch.device, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Parameter]:
    return [Parameter(tensor.to(device, dtype)) for tensor in _drawn(seed)]


def _drawn(seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) for shape in SHAPES)


def _give_gradients(parameters: Sequence[Parameter], seed: int, scale: float = 1.0) -> None:
    for parameter, drawn in zip(parameters, _drawn(seed), strict=True):
        parameter.grad = (drawn * scale).to(parameter)


def _steps(optimizer: torch.optim.Optimizer, parameters: Sequence[Parameter]) -> Sequence[Parameter]:
    for seed in range(1, 6):
        _give_gradients(parameters, seed)
        optimizer.step()
    return parameters


def optimizers(site: Site) -> Found:
    """Compares AdamW and SGD with torch's, LARS with the reference in fp64, half parameters with fp32 parameters."""
    kinds: list[tuple[Any, Any, dict[str, Any]]] = [
        (optim.AdamW, torch.optim.AdamW, {"lr": 0.05, "amsgrad": True}),
        (optim.AdamW, torch.optim.AdamW, {"lr": 0.05, "maximize": True}),
        (optim.SGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ]
    for ours, theirs, options in kinds:
        got, wanted = (_steps(kind(p, **options), p) for kind in (ours, theirs) for p in [_parameters(site.device)])
        torch.testing.assert_close(got, wanted, msg=partial("{}: {}".format, ours.__name__), **LIKE_TORCH)
    _check_lars(site.device)
    for dtype in (torch.float16, torch.bfloat16):
        half, full = _parameters(site.device, dtype=dtype), _parameters(site.device, dtype=dtype)
        full = [Parameter(parameter.detach().float()) for parameter in full]
        optimizer, full_optimizer = optim.AdamW(half, lr=0.05), optim.AdamW(full, lr=0.05)
        for seed in range(1, 6):
            _give_gradients(half, seed)
            for parameter, other in zip(full, half, strict=True):
                assert other.grad is not None
                parameter.grad = other.grad.float()
            optimizer.step()
            full_optimizer.step()
        wrong = [not torch.equal(a, b.to(dtype)) for a, b in zip(half, full, strict=True)]
        assert not any(wrong), f"AdamW with {dtype}: {sum(wrong)} parameters are not what fp32 masters round to"
    return Found("AdamW and SGD as torch's, LARS as the reference, masters of fp16 and bf16")


def _check_lars(device: torch.device) -> None:
    parameters = _parameters(device)
    options: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.01}
    exact = [parameter.detach().double() for parameter in parameters]
    buffers = [torch.zeros_like(tensor) for tensor in exact]
    optimizer = optim.LARS(parameters, lr=0.5, adapt=True, **options)
    for seed in range(1, 6):
        _give_gradients(parameters, seed)
        gradients = [parameter.grad.double() for parameter in parameters if parameter.grad is not None]
        reference.lars_(exact, gradients, buffers, [], lr=0.5, **options)
        optimizer.step()
    got = [parameter.detach().double() for parameter in parameters]
    torch.testing.assert_close(got, exact, rtol=1e-5, atol=3e-5, msg="LARS: {}".format)


SCALED_STEPS = (1.0, 1.0, float("inf"), 1.0, 1.0)


def loss_scaler(site: Site) -> Found:
    """Compares a scaled, clipped AdamW step with torch's GradScaler, clip_grad_norm_ and AdamW; the third one
    overflows."""
    torchs, ours = _parameters(site.device), _parameters(site.device)
    optimizer, scaler = torch.optim.AdamW(torchs, lr=0.05), torch.amp.GradScaler(site.device.type, init_scale=8.0)
    for seed, factor in enumerate(SCALED_STEPS):
        _give_gradients(torchs, seed, scaler.scale(torch.ones((), device=site.device)).item() * factor)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(torchs, 1.0)
        scaler.step(optimizer)
        scaler.update()
    fused, step = _scaled_step(ours, site.device)
    for seed, factor in enumerate(SCALED_STEPS):
        _give_gradients(ours, seed, fused.scale(torch.ones((), device=site.device)).item() * factor)
        step()
    torch.testing.assert_close(ours, torchs, msg="LossScaler with AdamW: {}".format, **LIKE_TORCH)
    assert fused.skipped_steps == 1 and fused.get_scale() == scaler.get_scale() == 4.0
    return Found("as GradScaler, clip_grad_norm_ and AdamW; an overflow skips the step")


def _scaled_step(parameters: Sequence[Parameter], device: torch.device) -> tuple[amp.LossScaler, Callable[[], None]]:
    optimizer, scaler = optim.AdamW(parameters, lr=0.05), amp.LossScaler(device.type, init_scale=8.0)

    def step() -> None:
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()

    return scaler, step


def captured_graphs(site: Site) -> Found:
    """Compares a scaled step and an encoding, captured once and replayed, with the same calls. No host may wait."""
    if site.device.type != "cuda":
        raise Skip("the CPU has no graphs")
    eager, replayed = (_repeated(site.device, captured) for captured in (False, True))
    for name in eager:
        assert torch.equal(eager[name], replayed[name]), f"{name} differs between a captured step and one that is not"
    return Found("a scaled step and an encoding replay as they run; no host waits")


def _repeated(device: torch.device, captured: bool) -> dict[str, Tensor]:
    parameters = _parameters(device)
    scaler, step = _scaled_step(parameters, device)
    scaler.scale(torch.zeros((), device=device))
    _give_gradients(parameters, 0)
    step()  # creates the state
    gradients = [[drawn.to(device) for drawn in _drawn(seed)] for seed in range(1, 6)]
    given = gradients[0][-1]
    message, residual = codecs.empty(given, "int8"), torch.zeros_like(given)

    def call() -> None:
        step()
        codecs.encode(given, "int8", residual=residual, out=message)

    gc.collect()  # memory that is freed while a graph is captured may invalidate it
    torch.cuda.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for turn, drawn in enumerate(gradients):
            for parameter, gradient in zip(parameters, drawn, strict=True):
                assert parameter.grad is not None
                parameter.grad.copy_(gradient)
                parameter.grad.mul_(float("nan") if turn == 2 else 1.0)
            graph.replay() if captured else call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    named = {f"parameter {index}": parameter.detach() for index, parameter in enumerate(parameters)}
    return {**named, "message": message.wire, "residual": residual, "skipped_steps": scaler.skipped_steps}


CHECKS = [
    Check("bytes of messages", message_bytes),
    Check("optimizers", optimizers),
    Check("loss scaler", loss_scaler),
    Check("captured graphs", captured_graphs),
]
