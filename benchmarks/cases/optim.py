"""Steps of AdamW, SGD and LARS against torch's and others' implementations (fp32)."""

import argparse
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.harness import (
    MemoryLimit,
    Progress,
    Row,
    Table,
    at_least,
    choices,
    extra_memory,
    last_level_cache,
    time_rows,
)
from dltrain_ext import optim

OURS = "ours"
STEPS, ATOL = 3, 1e-8
Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class LARSByHand(torch.optim.Optimizer):
    """LARS of the paper as one writes it with torch's multi-tensor functions."""

    def __init__(self, params: list[torch.nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            params = group["params"]
            grads, decay = [p.grad for p in params], group["weight_decay"]
            for p in params:
                self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            buffers = [self.state[p]["momentum_buffer"] for p in params]
            norms, grad_norms = (torch.stack(torch._foreach_norm(tensors)) for tensors in (params, grads))
            ratios = torch.where((norms > 0) & (grad_norms > 0), 1e-3 * norms / (grad_norms + decay * norms), 1.0)
            flat = torch.tensor([p.ndim <= 1 for p in params], device=ratios.device)
            factors = torch.where(flat, 1.0, ratios) * group["lr"]
            updates = torch._foreach_add(grads, params, alpha=decay)
            torch._foreach_mul_(updates, list(factors.unbind()))
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, updates)
            torch._foreach_sub_(params, buffers)


def of_package(package: str, name: str, **options: Any) -> Make:
    """An optimizer of a package that need not be installed: then making it raises ModuleNotFoundError."""
    return lambda params: getattr(importlib.import_module(package), name)(params, **options)


def of_torch(kind: type[torch.optim.Optimizer], **options: Any) -> dict[str, Make]:
    ways: dict[str, dict[str, Any]] = {
        "fused": {"fused": True},
        "foreach": {"foreach": True},
        "for-loop": {"foreach": False},
    }
    return {f"torch {name}": lambda params, way=way: kind(params, **options, **way) for name, way in ways.items()}


@dataclass(frozen=True)
class Kind:
    """An optimizer, ours and others'. A step reads parameter, gradient and state, and writes all but the gradient.

    The last peer that is no stranger is what results are checked against; strangers have a formula of their own.
    """

    name: str
    ours: Make
    peers: dict[str, Make]
    state: tuple[str, ...]
    norms: bool = False  # a pass over parameter and gradient comes first
    rtol: float = 1e-6
    cancels: bool = False  # its sums do, so they are held against the largest element
    strangers: dict[str, Make] = field(default_factory=dict)

    @property
    def sides(self) -> dict[str, Make]:
        return {OURS: self.ours, **self.peers, **self.strangers}

    @property
    def reference(self) -> str:
        return list(self.peers)[-1]

    @property
    def bytes_held(self) -> int:
        """Per element."""
        return 4 * (2 + len(self.state))

    @property
    def bytes_moved(self) -> int:
        """Per element and step."""
        return self.bytes_held + 4 * (1 + len(self.state)) + 8 * self.norms


MOVING = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
OPTIMIZERS = {
    "adamw": Kind("AdamW", optim.AdamW, of_torch(torch.optim.AdamW), ("exp_avg", "exp_avg_sq")),
    "sgd": Kind(
        "SGD",
        lambda params: optim.SGD(params, **MOVING),
        of_torch(torch.optim.SGD, **MOVING),
        ("momentum_buffer",),
        cancels=True,
    ),
    "lars": Kind(
        "LARS",
        lambda params: optim.LARS(params, **MOVING),
        {"torch by hand": lambda params: LARSByHand(params, **MOVING)},
        ("momentum_buffer",),
        norms=True,
        rtol=1e-4,  # torch's norms are sums in float32
        cancels=True,
        strangers={
            "pytorch_optimizer": of_package("pytorch_optimizer", "LARS", **MOVING),
            "bitsandbytes": of_package("bitsandbytes.optim", "LARS", **MOVING),
            "timm": of_package("timm.optim", "Lars", **MOVING),
        },
    ),
}


def resnet50() -> list[tuple[int, ...]]:
    """The 161 parameter shapes of ResNet-50 v1 (He et al. 2015, table 1), in the order of the forward pass."""
    shapes: list[tuple[int, ...]] = []

    def convolution(out: int, into: int, size: int) -> None:
        shapes.extend([(out, into, size, size), (out,), (out,)])  # the kernel; batch norm's weight and bias

    convolution(64, 3, 7)
    into = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for out, channels, size in ((width, into, 1), (width, width, 3), (4 * width, width, 1)):
                convolution(out, channels, size)
            if block == 0:
                convolution(4 * width, into, 1)
            into = 4 * width
    return [*shapes, (1000, into), (1000,)]


def one(quick: bool, device: str) -> list[tuple[int, ...]]:
    if device == "cuda":
        return [(100_000_000,)]
    return [(4_200_000 if quick else 33_500_000,)]  # no power of two: there all streams share cache sets


WORKLOADS: dict[str, Callable[[bool, str], list[tuple[int, ...]]]] = {
    "one": one,
    "resnet50": lambda quick, device: resnet50(),
    "many": lambda quick, device: [(64,)] * 4000,
}
DEFAULT_WORKLOADS = {"adamw": list(WORKLOADS), "sgd": ["resnet50"], "lars": ["resnet50"]}
PEERS = list(dict.fromkeys(side for kind in OPTIMIZERS.values() for side in kind.sides if side != OURS))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--optimizers",
        type=choices(list(OPTIMIZERS)),
        default=list(OPTIMIZERS),
        help=f"out of {', '.join(OPTIMIZERS)} (the last two with momentum 0.9); default all",
    )
    parser.add_argument(
        "--workloads",
        type=choices(list(WORKLOADS)),
        help="out of one (a large tensor), resnet50 (its parameter list), many (4,000 tensors of 64); "
        "default all, for sgd and lars resnet50",
    )
    parser.add_argument("--peers", type=choices(PEERS), default=PEERS, help=f"out of {', '.join(PEERS)}; default all")
    parser.add_argument("--seconds", type=at_least(1), help="time budget per workload (default 15, --quick: 2)")


def run(options: argparse.Namespace, progress: Progress) -> Table:
    device = options.device
    jobs = [
        (kind, workload)
        for name, kind in OPTIMIZERS.items()
        if name in options.optimizers
        for workload in options.workloads or DEFAULT_WORKLOADS[name]
    ]
    kinds = list(dict.fromkeys(kind.name for kind, _ in jobs))
    bytes_moved = ", ".join(dict.fromkeys(f"{kind.bytes_moved} ({kind.name})" for kind, _ in jobs))
    shares = "the shares of the limit and of a copy" if device == "cuda" else "the share of the limit"
    cache = f"{'L2' if device == 'cuda' else 'last-level'} cache ({last_level_cache(device) / 2**20:.0f} MiB)"
    rows: list[Row] = []
    notes = [
        f"checked after {STEPS} steps against the last of torch's to rtol 1e-6 (LARS: 1e-4) and, for AdamW's "
        f"parameters, atol {ATOL:g}, for SGD and LARS as much of the largest element; shown is the largest error of "
        "a parameter; where a peer has a formula of its own, only that its parameters are finite",
        f"GB/s and {shares} count {bytes_moved} bytes per element, whatever a side really moves",
        f"each side has parameters, gradients and state of its own; where they exceed the {cache} the streams of the "
        "memory limit run in between",
        "extra MiB: what a step needs at its peak beside them",
    ]
    if device == "cuda":
        notes.append("the clock is read when the device has finished; a copy is the device's own, in the same run")
    for index, (kind, workload) in enumerate(jobs):
        shapes = WORKLOADS[workload](options.quick, device)
        elements = sum(map(math.prod, shapes))
        label = f"{kind.name} {workload}: {elements / 1e6:.3g}M in {len(shapes):,}"

        def advance(done: float, label: str = label, index: int = index) -> None:
            progress(label, (index + done) / len(jobs))

        advance(0.0)
        seconds = options.seconds or (2 if options.quick else 15)
        new_rows, note = measure(kind, shapes, device, [OURS, *options.peers], seconds, options.quick, advance)
        for row in new_rows:
            row.workload = label
        rows += new_rows
        notes += [f"{kind.name} {workload}: {note}"] if note else []
    where = torch.cuda.get_device_name(0) if device == "cuda" else "the CPU"
    return Table(f"Steps of {', '.join(kinds)}, fp32, on {where}: elements in tensors", rows, notes)


def measure(
    kind: Kind,
    shapes: list[tuple[int, ...]],
    device: str,
    sides: list[str],
    seconds: float,
    quick: bool,
    advance: Callable[[float], None],
) -> tuple[list[Row], str]:
    """Verify the sides and time those that are right; rows, and a line on the memory limit where that counts."""
    elements = sum(map(math.prod, shapes))
    values = make_values(shapes, device)
    reference = stepped(kind.sides[kind.reference], values)
    rows, steps = {}, {}
    for side in (side for side in kind.sides if side in sides):
        try:
            optimizer = reference if side == kind.reference else stepped(kind.sides[side], values)
        except ModuleNotFoundError as missing:
            rows[side] = Row("", side, False, True, f"not installed: pip install {missing.name}")
            continue
        if side in kind.strangers:
            correct, check = all(p.isfinite().all() for p in optimizer.param_groups[0]["params"]), "its own formula"
        else:
            correct, error = compare(kind, optimizer, reference)
            check = f"{error:.1e}"
        rows[side] = Row("", side, side == OURS, correct, check)
        if correct:
            steps[side] = optimizer.step
            rows[side].figures["extra MiB"] = extra_memory(optimizer.step, device)
    del reference, values
    past_cache = kind.bytes_held * elements > last_level_cache(device)
    reads = 0 if quick or device == "cuda" else 2 + len(kind.state)
    limit = MemoryLimit(device, reads) if past_cache else None
    moved = dict.fromkeys(steps, kind.bytes_moved * elements)
    note = time_rows(rows, steps, moved, limit=limit, device=device, seconds=seconds, progress=advance)
    return list(rows.values()), note


def make_values(shapes: list[tuple[int, ...]], device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A parameter and a gradient of each shape; gradients over eight decades, so that eps counts too."""
    random = torch.Generator(device).manual_seed(0)
    values = []
    for shape in shapes:
        decades = torch.rand(shape, generator=random, device=device).mul_(-8 * math.log2(10)).exp2_()
        gradient = torch.randn(shape, generator=random, device=device).mul_(decades)
        values.append((torch.randn(shape, generator=random, device=device), gradient))
    return values


def stepped(make: Make, values: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.optim.Optimizer:
    """An optimizer after STEPS steps over its own copy of the values."""
    parameters = []
    for value, gradient in values:
        parameters.append(torch.nn.Parameter(value.clone()))
        parameters[-1].grad = gradient.clone()
    optimizer = make(parameters)
    for step in range(STEPS):
        for parameter in parameters if step else []:
            parameter.grad.mul_(0.5)  # keeps the sign: the state does not cancel and stays comparable
        optimizer.step()
    return optimizer


def compare(kind: Kind, optimizer: torch.optim.Optimizer, reference: torch.optim.Optimizer) -> tuple[bool, float]:
    """Whether parameters and state are close, and the largest difference of a parameter."""
    correct, errors = True, []
    pairs = zip(optimizer.param_groups[0]["params"], reference.param_groups[0]["params"], strict=True)
    for ours, theirs in pairs:
        state, wanted = optimizer.state[ours], reference.state[theirs]
        for a, b, atol in [(ours, theirs, ATOL), *((state[key], wanted[key], 0.0) for key in kind.state)]:
            atol = kind.rtol * b.detach().abs().max().item() if kind.cancels else atol
            correct &= torch.allclose(a, b, rtol=kind.rtol, atol=atol)
        errors.append((ours.detach() - theirs.detach()).abs().max())
    return correct, torch.stack(errors).max().item()
