"""AdamW.step() against torch's fused, foreach and for-loop implementations (fp32, CPU)."""

import argparse
import math
from collections.abc import Callable

import torch

from benchmarks.harness import MemoryLimit, Progress, Row, Table, at_least, choices, interleave, last_level_cache
from dltrain_ext import optim

OURS, REFERENCE = "ours", "for-loop"
PEERS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}
BYTES_PER_ELEMENT = 28  # reads p, g, m, v; writes p, m, v
STEPS, RTOL, ATOL = 3, 1e-6, 1e-8


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


WORKLOADS: dict[str, Callable[[bool], list[tuple[int, ...]]]] = {
    "one": lambda quick: [(4_200_000 if quick else 33_500_000,)],  # no power of two: there all streams share cache sets
    "resnet50": lambda quick: resnet50(),
    "many": lambda quick: [(64,)] * 4000,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workloads",
        type=choices(list(WORKLOADS)),
        default=list(WORKLOADS),
        help="out of one (a large tensor), resnet50 (its parameter list), many (4,000 tensors of 64)",
    )
    parser.add_argument(
        "--peers", type=choices(list(PEERS)), default=list(PEERS), help=f"out of torch's {', '.join(PEERS)}"
    )
    parser.add_argument("--seconds", type=at_least(1), help="time budget per workload (default 15, --quick: 2)")


def run(options: argparse.Namespace, progress: Progress) -> Table:
    rows: list[Row] = []
    notes = [
        f"checked after {STEPS} steps against torch's {REFERENCE} to rtol {RTOL:g}, for parameters also atol "
        f"{ATOL:g}; shown is the largest error of a parameter",
        f"GB/s and the share of the limit count {BYTES_PER_ELEMENT} bytes per element, whatever a side really moves",
        "each side has parameters, gradients and moments of its own; where they exceed the last-level cache "
        f"({last_level_cache() / 2**20:.0f} MiB) the streams of the memory limit run in between",
    ]
    for index, name in enumerate(options.workloads):
        shapes = WORKLOADS[name](options.quick)
        elements = sum(map(math.prod, shapes))
        label = f"{name}: {elements / 1e6:.3g}M in {len(shapes):,}"

        def advance(done: float, label: str = label, index: int = index) -> None:
            progress(label, (index + done) / len(options.workloads))

        advance(0.0)
        seconds = options.seconds or (2 if options.quick else 15)
        new_rows, note = measure(shapes, elements, [OURS, *options.peers], seconds, advance)
        for row in new_rows:
            row.workload = label
        rows += new_rows
        notes += [f"{name}: {note}"] if note else []
    return Table("AdamW.step(), fp32: elements in tensors", rows, notes)


def measure(
    shapes: list[tuple[int, ...]], elements: int, sides: list[str], seconds: float, advance: Callable[[float], None]
) -> tuple[list[Row], str]:
    """Verify the sides and time those that are right; rows, and a line on the memory limit where that counts."""
    values = make_values(shapes)
    reference = stepped(REFERENCE, values)
    rows, steps = {}, {}
    for side in sides:
        optimizer = reference if side == REFERENCE else stepped(side, values)
        correct, error = compare(optimizer, reference)
        rows[side] = Row("", side if side == OURS else f"torch {side}", side == OURS, correct, f"{error:.1e}")
        if correct:
            steps[side] = optimizer.step
    del reference, values
    limit = MemoryLimit() if 16 * elements > last_level_cache() else None
    streams = limit.sides if limit else {}
    samples = interleave(steps | streams, rounds=(3, 200), seconds=seconds, progress=advance)
    best, note = limit.of(samples) if limit else (None, "")
    for side in steps:
        row = rows[side]
        row.samples = samples[side]
        speed = BYTES_PER_ELEMENT * elements / 1e9 / row.time.median
        row.figures = {"GB/s": speed, "% of limit": 100 * speed / best if best else None}
        if OURS in steps and side != OURS:
            row.ratio = row.time.median / rows[OURS].time.median
    return list(rows.values()), note


def make_values(shapes: list[tuple[int, ...]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A parameter and a gradient of each shape; gradients over eight decades, so that eps counts too."""
    random = torch.Generator().manual_seed(0)
    values = []
    for shape in shapes:
        decades = torch.rand(shape, generator=random).mul_(-8 * math.log2(10)).exp2_()
        gradient = torch.randn(shape, generator=random).mul_(decades)
        values.append((torch.randn(shape, generator=random), gradient))
    return values


def stepped(side: str, values: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.optim.Optimizer:
    """An optimizer of that side after STEPS steps over its own copy of the values."""
    parameters = []
    for value, gradient in values:
        parameters.append(torch.nn.Parameter(value.clone()))
        parameters[-1].grad = gradient.clone()
    optimizer = optim.AdamW(parameters) if side == OURS else torch.optim.AdamW(parameters, **PEERS[side])
    for step in range(STEPS):
        for parameter in parameters if step else []:
            parameter.grad.mul_(0.5)  # keeps the sign: the moments do not cancel and stay comparable
        optimizer.step()
    return optimizer


def compare(optimizer: torch.optim.Optimizer, reference: torch.optim.Optimizer) -> tuple[bool, float]:
    """Whether parameters and both moments are close, and the largest difference of a parameter."""
    correct, errors = True, []
    pairs = zip(optimizer.param_groups[0]["params"], reference.param_groups[0]["params"], strict=True)
    for ours, theirs in pairs:
        state, wanted = optimizer.state[ours], reference.state[theirs]
        correct &= torch.allclose(ours, theirs, rtol=RTOL, atol=ATOL)
        correct &= all(
            torch.allclose(state[key], wanted[key], rtol=RTOL, atol=0.0) for key in ("exp_avg", "exp_avg_sq")
        )
        errors.append((ours.detach() - theirs.detach()).abs().max())
    return correct, torch.stack(errors).max().item()
