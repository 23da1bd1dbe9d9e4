"""Loss-scaled steps: unscaling, clipping and the update in one pass, against torch's sequence of calls."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cases.optim import OPTIMIZERS, Kind, make_values, resnet50
from benchmarks.harness import Keep, Progress, Row, Table, at_least, choices
from benchmarks.machine.memory import MemoryLimit, extra_memory, last_level_cache, time_rows
from benchmarks.optim_peers import Make
from dltrain_ext import amp

OVERVIEW = ["--seconds", "2", "--no-compile"]
OURS, TOLD = "ours", "ours, told the norm"
STEPS, SCALE, MAX_NORM, ATOL = 3, 1024.0, 1.0, 1e-6
TORCHS = [name for name, kind in OPTIMIZERS.items() if kind.reference.startswith("torch for")]  # that torch has
Values = list[tuple[Tensor, Tensor]]


class Side:
    """A step, with parameters and gradients of its own; renew() restores the gradients, which a step may change."""

    kind: type[torch.amp.GradScaler] = amp.LossScaler

    def __init__(self, values: Values, dtype: torch.dtype, device: str, make: Make) -> None:
        self.params = [torch.nn.Parameter(value.to(dtype, copy=True)) for value, _ in values]
        for p, (_, gradient) in zip(self.params, values, strict=True):
            p.grad = gradient.to(dtype, copy=True)
        self.given, self.values = [p.grad for p in self.params], [gradient for _, gradient in values]
        self.scaler = self.kind(device, init_scale=SCALE, growth_interval=10**6)
        self.scaler.scale(torch.zeros((), device=device))
        self.prepare(make)

    @torch.no_grad()
    def renew(self) -> None:
        torch._foreach_copy_(self.given, self.values)

    def prepare(self, make: Make) -> None:
        """Make the optimizer."""
        self.optimizer = make(self.params)

    def step(self) -> None:
        self.scaler.step(self.optimizer, max_norm=MAX_NORM)
        self.scaler.update()


class Told(Side):
    """A step that receives the sum of squares of the gradients, as found while they were reduced."""

    def prepare(self, make: Make) -> None:
        super().prepare(make)
        total = torch.stack([g.double().square().sum() for g in self.given]).sum()
        self.stats = amp.GradStats(total, torch.zeros((), device=total.device))

    def step(self) -> None:
        self.scaler.step(self.optimizer, max_norm=MAX_NORM, grad_stats=self.stats)
        self.scaler.update()


class Torch(Side):
    """Torch's GradScaler.unscale_, clip_grad_norm_ and step."""

    kind = torch.amp.GradScaler

    def step(self) -> None:
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()


class TorchMasters(Torch):
    """Torch's step with fp32 masters: half gradients are copied to the masters, and the masters to the parameters."""

    def prepare(self, make: Make) -> None:
        self.halves = self.params
        self.params = [torch.nn.Parameter(p.detach().float()) for p in self.halves]
        for master in self.params:
            master.grad = torch.zeros_like(master)
        super().prepare(make)

    @torch.no_grad()
    def step(self) -> None:
        torch._foreach_copy_([p.grad for p in self.params], self.given)
        super().step()
        torch._foreach_copy_(self.halves, self.params)


@dataclass(frozen=True)
class Workload:
    """The dtype of parameters and gradients, and the bytes per element that each side has to move beside its state."""

    dtype: torch.dtype
    torchs: type[Torch]
    suffix: str  # of the names of torch's sides
    ours: int
    told: int
    others: int
    rtol: float

    def sides(self, kind: Kind) -> dict[str, tuple[type[Side], Make, int]]:
        """Return for each side its class, its optimizer, and the bytes per element that it has to move."""
        state = 8 * len(kind.state)
        torchs = [(name, make) for name, make in kind.peers.items() if name.startswith("torch ")][:2]  # the faster ones
        return {
            OURS: (Side, kind.ours, self.ours + state),
            TOLD: (Told, kind.ours, self.told + state),
            **{name + self.suffix: (self.torchs, make, self.others + state) for name, make in torchs},
        }


WORKLOADS = {
    "fp32": Workload(torch.float32, Torch, "", 16, 12, 32, rtol=1e-5),
    "fp16": Workload(torch.float16, TorchMasters, " by hand", 14, 12, 44, rtol=2**-10),  # one rounding
}


NOTES = [
    f"a step unscales, clips to the norm {MAX_NORM:g}, calls step() of the optimizer, and update() of the scaler, for "
    "ResNet-50's parameters; by hand, in fp16, it also copies the gradients to fp32 and the parameters back",
    "told the norm: the step gets the grad_stats that a reduction of the gradients returns",
    f"each side is checked after {STEPS} steps against torch's; check shows the largest error of a parameter",
    "the gradients are restored before each step, outside of the timing, since torch's steps overwrite them",
    "bytes: bytes that a side moves per element; GB/s and % of limit are computed from these",
    "extra MiB: peak memory of a step in addition to parameters, gradients and state",
]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--optimizers",
        type=choices(TORCHS),
        default=["adamw"],
        help=f"names out of {', '.join(TORCHS)} (default: adamw)",
    )
    parser.add_argument(
        "--workloads",
        type=choices(list(WORKLOADS)),
        default=list(WORKLOADS),
        help="fp32 (parameters and gradients in fp32, as under autocast), fp16 (in fp16, with fp32 masters), or both",
    )
    parser.add_argument(
        "--no-compile", action="store_true", help="measure the memory limit with torch's own ops, without torch.compile"
    )
    parser.add_argument("--seconds", type=at_least(1), help="time budget per workload (default: 20, --quick: 1)")


def run(options: argparse.Namespace, progress: Progress, keep: Keep) -> None:
    device = options.device
    shapes = resnet50(options.quick)
    values = [(value, gradient * SCALE) for value, gradient in make_values(shapes, device)]
    elements = sum(value.numel() for value, _ in values)
    where = torch.cuda.get_device_name(0) if device == "cuda" else "the CPU"
    jobs = [(OPTIMIZERS[name], workload) for name in options.optimizers for workload in options.workloads]
    kinds = ", ".join(dict.fromkeys(kind.name for kind, _ in jobs))
    table = Table(f"Loss-scaled steps of {kinds} on {where}", notes=list(NOTES))
    keep(table)
    for index, (kind, name) in enumerate(jobs):
        label = f"{kind.name} {name}: {elements / 1e6:.3g}M in {len(values)}"

        def advance(done: float, label: str = label, index: int = index) -> None:
            progress(label, (index + done) / len(jobs))

        advance(0.0)
        seconds = options.seconds or (1 if options.quick else 20)
        reads = 0 if options.quick or options.no_compile or device == "cuda" else 2 + len(kind.state)
        rows, note = measure(kind, WORKLOADS[name], values, device, seconds, reads, advance)
        for row in rows:
            row.workload = label
        table.rows += rows
        table.notes += [f"{kind.name} {name}: {note}"] if note else []


def measure(
    kind: Kind,
    workload: Workload,
    values: Values,
    device: str,
    seconds: float,
    reads: int,
    advance: Callable[[float], None],
) -> tuple[list[Row], str]:
    elements = sum(value.numel() for value, _ in values)
    given = workload.sides(kind)
    sides = {name: side(values, workload.dtype, device, make) for name, (side, make, _) in given.items()}
    bytes_moved = {name: moved for name, (*_, moved) in given.items()}
    results = {name: stepped(side) for name, side in sides.items()}
    reference = results[list(sides)[2]]
    rows, steps = {}, {}
    for name, side in sides.items():
        pairs = list(zip(results[name], reference, strict=True))
        # Torch's norm is a sum in float32, whose error changes large steps by more than AdamW's.
        atols = [ATOL * (b.abs().max().item() if kind.cancels else 1.0) for _, b in pairs]
        correct = all(
            torch.allclose(a, b, rtol=workload.rtol, atol=atol) for (a, b), atol in zip(pairs, atols, strict=True)
        )
        error = max((a - b).abs().max().item() for a, b in pairs)
        rows[name] = Row("", name, name in (OURS, TOLD), correct, f"{error:.1e}")
        if correct:
            steps[name] = side.step
            rows[name].figures |= {
                "extra MiB": extra_memory(side.step, device),
                "bytes": bytes_moved[name],
            }
    limit = None
    if kind.bytes_held * elements > last_level_cache(device):
        limit = MemoryLimit(device, reads)
    moved = {name: bytes_moved[name] * elements for name in steps}

    def renew(name: str) -> None:
        if name in steps:
            sides[name].renew()

    note = time_rows(rows, steps, moved, limit=limit, device=device, seconds=seconds, progress=advance, before=renew)
    return list(rows.values()), note


def stepped(side: Side) -> list[Tensor]:
    """Return the parameters after STEPS steps with the same gradients."""
    for _ in range(STEPS):
        side.renew()
        side.step()
    return [p.detach().float().clone() for p in getattr(side, "halves", side.params)]
