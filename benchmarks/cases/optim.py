"""AdamW.step() and SGD.step() against torch's fused, foreach and for-loop implementations (fp32)."""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness import MemoryLimit, Progress, Row, Table, at_least, choices, interleave, last_level_cache
from dltrain_ext import optim

DEVICES = ("cpu", "cuda")
OURS, REFERENCE = "ours", "for-loop"
PEERS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}
STEPS, RTOL, ATOL = 3, 1e-6, 1e-8


@dataclass(frozen=True)
class Kind:
    """An optimizer, ours and torch's. A step reads parameter, gradient and state, and writes all but the gradient."""

    ours: type[torch.optim.Optimizer]
    theirs: type[torch.optim.Optimizer]
    options: dict[str, Any]
    state: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.ours.__name__

    @property
    def bytes_held(self) -> int:
        """Per element."""
        return 4 * (2 + len(self.state))

    @property
    def bytes_moved(self) -> int:
        """Per element and step."""
        return self.bytes_held + 4 * (1 + len(self.state))


OPTIMIZERS = {
    "adamw": Kind(optim.AdamW, torch.optim.AdamW, {}, ("exp_avg", "exp_avg_sq")),
    "sgd": Kind(optim.SGD, torch.optim.SGD, {"momentum": 0.9}, ("momentum_buffer",)),
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
DEFAULT_WORKLOADS = {"adamw": list(WORKLOADS), "sgd": ["resnet50"]}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--optimizers",
        type=choices(list(OPTIMIZERS)),
        default=list(OPTIMIZERS),
        help=f"out of {', '.join(OPTIMIZERS)} (momentum 0.9); default both",
    )
    parser.add_argument(
        "--workloads",
        type=choices(list(WORKLOADS)),
        help="out of one (a large tensor), resnet50 (its parameter list), many (4,000 tensors of 64); "
        "default all, for sgd resnet50",
    )
    parser.add_argument(
        "--peers", type=choices(list(PEERS)), default=list(PEERS), help=f"out of torch's {', '.join(PEERS)}"
    )
    parser.add_argument("--seconds", type=at_least(1), help="time budget per workload (default 15, --quick: 2)")


def run(options: argparse.Namespace, progress: Progress) -> Table:
    device = options.device
    jobs = [
        (kind, workload)
        for name, kind in OPTIMIZERS.items()
        if name in options.optimizers
        for workload in options.workloads or DEFAULT_WORKLOADS[name]
    ]
    kinds = [kind for name, kind in OPTIMIZERS.items() if name in options.optimizers]
    bytes_moved = " and ".join(f"{kind.bytes_moved} ({kind.name})" for kind in kinds)
    shares = "the shares of the limit and of a copy" if device == "cuda" else "the share of the limit"
    cache = f"{'L2' if device == 'cuda' else 'last-level'} cache ({last_level_cache(device) / 2**20:.0f} MiB)"
    rows: list[Row] = []
    notes = [
        f"checked after {STEPS} steps against torch's {REFERENCE} to rtol {RTOL:g}, for parameters also atol "
        f"{ATOL:g}; shown is the largest error of a parameter",
        f"GB/s and {shares} count {bytes_moved} bytes per element, whatever a side really moves",
        f"each side has parameters, gradients and state of its own; where they exceed the {cache} the streams of the "
        "memory limit run in between",
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
        new_rows, note = measure(kind, shapes, device, [OURS, *options.peers], seconds, advance)
        for row in new_rows:
            row.workload = label
        rows += new_rows
        notes += [f"{kind.name} {workload}: {note}"] if note else []
    where = torch.cuda.get_device_name(0) if device == "cuda" else "the CPU"
    steps = " and ".join(f"{kind.name}.step()" for kind in kinds)
    return Table(f"{steps}, fp32, on {where}: elements in tensors", rows, notes)


def measure(
    kind: Kind,
    shapes: list[tuple[int, ...]],
    device: str,
    sides: list[str],
    seconds: float,
    advance: Callable[[float], None],
) -> tuple[list[Row], str]:
    """Verify the sides and time those that are right; rows, and a line on the memory limit where that counts."""
    elements = sum(map(math.prod, shapes))
    values = make_values(shapes, device)
    reference = stepped(kind, REFERENCE, values)
    rows, steps = {}, {}
    for side in sides:
        optimizer = reference if side == REFERENCE else stepped(kind, side, values)
        correct, error = compare(kind, optimizer, reference)
        rows[side] = Row("", side if side == OURS else f"torch {side}", side == OURS, correct, f"{error:.1e}")
        if correct:
            steps[side] = optimizer.step
    del reference, values
    limit = MemoryLimit(device) if kind.bytes_held * elements > last_level_cache(device) else None
    streams = limit.sides if limit else {}
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    samples = interleave(steps | streams, rounds=(3, 200), seconds=seconds, synchronize=synchronize, progress=advance)
    speeds = limit.speeds(samples) if limit else {}
    for side in steps:
        row = rows[side]
        row.samples = samples[side]
        speed = kind.bytes_moved * elements / 1e9 / row.time.median
        row.figures = {"GB/s": speed, "% of limit": 100 * speed / max(speeds.values()) if speeds else None}
        if device == "cuda":
            row.figures["% of copy"] = 100 * speed / speeds["copy"] if speeds else None
        if OURS in steps and side != OURS:
            row.ratio = row.time.median / rows[OURS].time.median
    return list(rows.values()), limit.note(speeds) if limit else ""


def make_values(shapes: list[tuple[int, ...]], device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A parameter and a gradient of each shape; gradients over eight decades, so that eps counts too."""
    random = torch.Generator(device).manual_seed(0)
    values = []
    for shape in shapes:
        decades = torch.rand(shape, generator=random, device=device).mul_(-8 * math.log2(10)).exp2_()
        gradient = torch.randn(shape, generator=random, device=device).mul_(decades)
        values.append((torch.randn(shape, generator=random, device=device), gradient))
    return values


def stepped(kind: Kind, side: str, values: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.optim.Optimizer:
    """An optimizer of that side after STEPS steps over its own copy of the values."""
    parameters = []
    for value, gradient in values:
        parameters.append(torch.nn.Parameter(value.clone()))
        parameters[-1].grad = gradient.clone()
    if side == OURS:
        optimizer = kind.ours(parameters, **kind.options)
    else:
        optimizer = kind.theirs(parameters, **kind.options, **PEERS[side])
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
        correct &= torch.allclose(ours, theirs, rtol=RTOL, atol=ATOL)
        correct &= all(torch.allclose(state[key], wanted[key], rtol=RTOL, atol=0.0) for key in kind.state)
        errors.append((ours.detach() - theirs.detach()).abs().max())
    return correct, torch.stack(errors).max().item()
