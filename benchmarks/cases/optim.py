"""Optimizer steps, against the implementations of torch and of other packages (fp32)."""

import argparse
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import optim_peers
from benchmarks.harness import Keep, Progress, Row, Table, at_least, choices
from benchmarks.machine.memory import MemoryLimit, extra_memory, last_level_cache, time_rows
from benchmarks.optim_peers import (
    MOVING,
    PROXIMAL,
    UNDECAYED,
    ByReference,
    LangevinByHand,
    LARSByHand,
    Make,
    ThirdParty,
)
from dltrain_ext import optim
from dltrain_ext.optim.rule import RULES

OVERVIEW = ["--elements", "8400000", "--seconds", "2", "--no-compile"]

QUICK = 2**18  # a quick run leaves out tensors of this number of elements, and larger ones
OURS, CODED = "ours", "ours int8 state"
STEPS, ATOL = 3, 1e-8
Values = list[tuple[torch.Tensor, torch.Tensor]]


def of_torch(kind: type[torch.optim.Optimizer], **options: Any) -> dict[str, Make]:
    ways: dict[str, dict[str, Any]] = {
        "fused": {"fused": True},
        "foreach": {"foreach": True},
        "for-loop": {"foreach": False},
    }
    if "fused" not in inspect.signature(kind).parameters:
        del ways["fused"]
    return {f"torch {name}": lambda params, way=way: kind(params, **options, **way) for name, way in ways.items()}


@dataclass(frozen=True)
class Kind:
    """An optimizer, ours and its peers. A step reads parameter, gradient and state, and writes parameter and state.

    Results are checked against the last peer or, if a ThirdParty has one, against its formula.
    """

    name: str
    ours: Make
    peers: dict[str, Make]
    state: tuple[str, ...]
    norms: int = 0  # streams that a pass for norms reads before the update
    rtol: float = 1e-6
    cancels: bool = False  # its sums may cancel, so errors are relative to the largest element
    third_parties: dict[str, ThirdParty] = field(default_factory=dict)

    @property
    def sides(self) -> dict[str, Make]:
        third_parties = {name: third_party.make for name, third_party in self.third_parties.items()}
        return {OURS: self.ours, **self.peers, **third_parties}

    @property
    def reference(self) -> str:
        return list(self.peers)[-1]

    @property
    def bytes_held(self) -> int:
        """Bytes of memory per element."""
        return 4 * (2 + len(self.state))

    @property
    def bytes_moved(self) -> int:
        """Bytes that a step moves per element."""
        return self.bytes_held + 4 * (1 + len(self.state)) + 4 * self.norms


def usual(kind: type[torch.optim.Optimizer], torchs: type[torch.optim.Optimizer]) -> Kind:
    """Make the Kind of an optimizer without special rules; its state tensors are found by a step."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = kind([parameter])
    optimizer.step()
    state = tuple(key for key, value in optimizer.state[parameter].items() if value.shape == parameter.shape)
    return Kind(kind.__name__, kind, of_torch(torchs), state, cancels=kind is not optim.AdamW)


OPTIMIZERS = {
    "adamw": Kind(
        "AdamW",
        optim.AdamW,
        of_torch(torch.optim.AdamW),
        ("exp_avg", "exp_avg_sq"),
        third_parties={CODED: ThirdParty(lambda params: optim.AdamW(params, state_codec="int8"), lost=0.01)}
        | optim_peers.ADAMW,
    ),
    "sgd": Kind(
        "SGD",
        lambda params: optim.SGD(params, **MOVING),
        of_torch(torch.optim.SGD, **MOVING),
        ("momentum_buffer",),
        cancels=True,
        third_parties=optim_peers.SGD,
    ),
    "lars": Kind(
        "LARS",
        lambda params: optim.LARS(params, **MOVING),
        {"torch by hand": lambda params: LARSByHand(params, **MOVING)},
        ("momentum_buffer",),
        norms=2,
        rtol=1e-4,  # torch's norms are sums in float32
        cancels=True,
        third_parties=optim_peers.LARS,
    ),
    "lion": Kind(
        "Lion",
        optim.Lion,
        {"torch by hand": lambda params: ByReference(params, "lion", lr=1e-4)},
        ("exp_avg",),
        third_parties=optim_peers.LION,
    ),
    "lamb": Kind(
        "LAMB",
        lambda params: optim.LAMB(params, preset="paper", **UNDECAYED),
        {"torch by hand": lambda params: ByReference(params, "lamb", **UNDECAYED)},
        ("exp_avg", "exp_avg_sq"),
        norms=4,
        rtol=1e-4,  # torch's norms are sums in float32
        cancels=True,
        third_parties=optim_peers.LAMB,
    ),
    "sgld": Kind(
        "SGLD",
        lambda params: optim.SGLD(params, lr=1e-3),
        {"torch by hand": lambda params: LangevinByHand(params, lr=1e-3)},
        (),
        cancels=True,
    ),
    "ftrl": Kind(
        "FTRL",
        lambda params: optim.FTRL(params, **PROXIMAL),
        {"torch by hand": lambda params: ByReference(params, "ftrl", **PROXIMAL)},
        ("z", "n"),
        cancels=True,
        third_parties=optim_peers.FTRL,
    ),
}
OPTIMIZERS |= {
    name.lower(): usual(getattr(optim, name), getattr(torch.optim, name))
    for name in optim.__all__
    if name.lower() in RULES and name.lower() not in OPTIMIZERS
}


def resnet50(quick: bool) -> list[tuple[int, ...]]:
    """Return the 161 parameter shapes of ResNet-50 v1 (He et al. 2015, table 1), in the order of the forward pass.

    If quick, return only those of small tensors.
    """
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
    shapes += [(1000, into), (1000,)]
    return [shape for shape in shapes if math.prod(shape) < QUICK or not quick]


def one(options: argparse.Namespace) -> list[tuple[int, ...]]:
    """Return the shape of one large tensor. The default is no power of two, where all streams share cache sets."""
    default = 100_000_000 if options.device == "cuda" else 4_200_000 if options.quick else 33_500_000
    return [(options.elements or default,)]


WORKLOADS: dict[str, Callable[[argparse.Namespace], list[tuple[int, ...]]]] = {
    "one": one,
    "resnet50": lambda options: resnet50(options.quick),
    "many": lambda options: [(64,)] * 4000,
}
DEFAULT_WORKLOADS = {name: ["resnet50"] for name in OPTIMIZERS} | {"adamw": list(WORKLOADS)}
PEERS = list(dict.fromkeys(side for kind in OPTIMIZERS.values() for side in kind.sides if side != OURS))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--optimizers",
        type=choices(list(OPTIMIZERS)),
        default=list(OPTIMIZERS),
        help=f"names out of {', '.join(OPTIMIZERS)} (default: all; sgd and lars have momentum 0.9)",
    )
    parser.add_argument(
        "--workloads",
        type=choices(list(WORKLOADS)),
        help="names out of one (a large tensor), resnet50 (its parameters), many (4,000 tensors of 64 elements) "
        "(default: all for adamw, otherwise resnet50)",
    )
    parser.add_argument(
        "--peers", type=choices(PEERS), default=PEERS, help=f"names out of {', '.join(PEERS)} (default: all)"
    )
    parser.add_argument(
        "--elements",
        type=at_least(1),
        help="elements of workload one (default: 33,500,000, --quick: 4,200,000, on a GPU 10^8)",
    )
    parser.add_argument(
        "--no-compile", action="store_true", help="measure the memory limit with torch's own ops, without torch.compile"
    )
    parser.add_argument("--seconds", type=at_least(1), help="time budget per workload (default: 7, --quick: 1)")


def run(options: argparse.Namespace, progress: Progress, keep: Keep) -> None:
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
    notes = [
        f"each side is checked after {STEPS} steps against torch's last implementation, to rtol 1e-6 (LARS: 1e-4) and "
        f"atol {ATOL:g} for AdamW's parameters (SGD, LARS: rtol of the largest element); check shows the largest error "
        "of a parameter; of other packages only parameters are checked, LARS against the formula of the package; on a "
        "GPU errors of peers may be 20 times as large",
        f"8-bit state: after {STEPS} steps with gradients of similar magnitude, the rms error of the steps must be at "
        f"most {100 * max(peer.lost for peer in optim_peers.ADAMW.values()):.0f} % of their rms; check shows it",
        "SGLD is checked without its noise, and timed with it",
        f"GB/s and {shares} assume {bytes_moved} bytes per element, also for a side that moves more",
        f"each side has parameters, gradients and state of its own; if they exceed the {cache}, the streams of the "
        "memory limit are timed alternately with the sides",
        "extra MiB: peak memory of a step in addition to parameters, gradients and state",
    ]
    if device == "cuda":
        notes.append("times are from events on the stream; % of copy: of a copy within the device, in the same run")
    where = torch.cuda.get_device_name(0) if device == "cuda" else "the CPU"
    table = Table(f"Steps of {', '.join(kinds)}, fp32, on {where}: elements in tensors", notes=notes)
    keep(table)
    for index, (kind, workload) in enumerate(jobs):
        shapes = WORKLOADS[workload](options)
        elements = sum(map(math.prod, shapes))
        label = f"{kind.name} {workload}: {elements / 1e6:.3g}M in {len(shapes):,}"

        def advance(done: float, label: str = label, index: int = index) -> None:
            progress(label, (index + done) / len(jobs))

        advance(0.0)
        seconds = options.seconds or (1 if options.quick else 7)
        reads = 0 if options.quick or options.no_compile or device == "cuda" else 2 + len(kind.state)
        why_not = {name: third_party.why_not(device, workload) for name, third_party in kind.third_parties.items()}
        rows, note = measure(kind, shapes, device, [OURS, *options.peers], why_not, seconds, reads, advance)
        for row in rows:
            row.workload = label
        table.rows += rows
        notes += [f"{kind.name} {workload}: {note}"] if note else []


def measure(
    kind: Kind,
    shapes: list[tuple[int, ...]],
    device: str,
    sides: list[str],
    why_not: dict[str, str],
    seconds: float,
    reads: int,
    advance: Callable[[float], None],
) -> tuple[list[Row], str]:
    """Verify the sides and time the correct ones. Return their rows, and a note on the memory limit if it was used."""
    elements = sum(map(math.prod, shapes))
    values = make_values(shapes, device)
    reference = stepped(kind.sides[kind.reference], values)
    rows, steps = {}, {}
    for side in (side for side in kind.sides if side in sides):
        if side in (OURS, kind.reference):
            optimizer = reference if side == kind.reference else stepped(kind.ours, values)
            correct, error = compare(kind, optimizer, reference)
            rows[side] = Row("", side, side == OURS, correct, f"{error:.1e}")
        else:
            optimizer, rows[side] = check_peer(side, kind, values, reference, why_not.get(side, ""))
        if optimizer and rows[side].correct:
            steps[side] = optimizer.step
    for side, step in steps.items():  # when all are verified, since it is one more step, also of the reference
        rows[side].figures["extra MiB"] = extra_memory(step, device)
    del reference, values
    past_cache = kind.bytes_held * elements > last_level_cache(device)
    limit = MemoryLimit(device, reads) if past_cache else None
    moved = dict.fromkeys(steps, kind.bytes_moved * elements)
    note = time_rows(rows, steps, moved, limit=limit, device=device, seconds=seconds, progress=advance)
    return list(rows.values()), note


def check_peer(
    side: str, kind: Kind, values: Values, reference: torch.optim.Optimizer, why_not: str
) -> tuple[torch.optim.Optimizer | None, Row]:
    """Return the optimizer of torch or of another package after its steps (None if it cannot run here), and its row."""
    peer = kind.third_parties.get(side) or ThirdParty(kind.peers[side])
    if why_not:
        return None, Row.missing(side, why_not)
    given = even(values) if peer.lost else values
    try:
        optimizer = stepped(peer.make, given)
    except ModuleNotFoundError as missing:
        return None, Row.missing(side, f"not installed: pip install {(missing.name or side).split('.')[0]}")
    except Exception as error:  # it may not support this machine
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return None, Row.missing(side, f"cannot run here: {reason}")
    if peer.lost:
        share = lost(optimizer, stepped(kind.sides[kind.reference], given), given)
        return optimizer, Row("", side, False, share <= peer.lost, f"{100 * share:.1f} %")
    wanted = stepped(peer.formula, values) if peer.formula else reference
    on_cuda = values[0][0].is_cuda  # where torch's fused AdamW takes 1 - beta2 in float32
    correct, error = compare(kind, optimizer, wanted, state=side in kind.peers, slack=20 if on_cuda else 1)
    return optimizer, Row("", side, False, correct, f"{error:.1e}")


def make_values(shapes: list[tuple[int, ...]], device: str) -> Values:
    """Make a parameter and a gradient of each shape. Gradients span eight decades, so that eps has an effect."""
    random = torch.Generator(device).manual_seed(0)
    values = []
    for shape in shapes:
        decades = torch.rand(shape, generator=random, device=device).mul_(-8 * math.log2(10)).exp2_()
        gradient = torch.randn(shape, generator=random, device=device).mul_(decades)
        values.append((torch.randn(shape, generator=random, device=device), gradient))
    return values


def even(values: Values) -> Values:
    """Return the values with gradients of magnitudes from 1/2 to 1, which 8-bit numbers of one block can represent."""
    return [(value, gradient.sign() * (0.5 + 0.5 * (gradient % 1.0))) for value, gradient in values]


def stepped(make: Make, values: Values) -> torch.optim.Optimizer:
    """Return an optimizer after STEPS steps over its own copy of the values; one that adds noise leaves it out."""
    parameters = []
    for value, gradient in values:
        parameters.append(torch.nn.Parameter(value.clone()))
        parameters[-1].grad = gradient.clone()
    optimizer = make(parameters)
    noisy = [group for group in optimizer.param_groups if "temperature" in group]
    for group in noisy:
        group["temperature"] = 0.0
    for step in range(STEPS):
        # Gradients are halved, so signs stay and the state does not cancel. Some optimizers overwrite the gradients.
        for parameter, (_, gradient) in zip(parameters, values, strict=True) if step else []:
            torch.mul(gradient, 0.5**step, out=parameter.grad)
        optimizer.step()
    for group in noisy:
        group["temperature"] = 1.0
    return optimizer


def compare(
    kind: Kind, optimizer: torch.optim.Optimizer, reference: torch.optim.Optimizer, state: bool = True, slack: int = 1
) -> tuple[bool, float]:
    """Return whether parameters (and, if asked for, state) are close, and the largest difference of a parameter."""
    correct, errors, rtol = True, [], slack * kind.rtol
    pairs = zip(optimizer.param_groups[0]["params"], reference.param_groups[0]["params"], strict=True)
    for ours, theirs in pairs:
        both = [(ours, theirs, ATOL)]
        if state:
            both += [(optimizer.state[ours][key], reference.state[theirs][key], 0.0) for key in kind.state]
        for a, b, atol in both:
            atol = rtol * b.detach().abs().max().item() if kind.cancels else slack * atol
            correct &= torch.allclose(a, b, rtol=rtol, atol=atol)
        errors.append((ours.detach() - theirs.detach()).abs().max())
    return correct, torch.stack(errors).max().item()


def lost(optimizer: torch.optim.Optimizer, reference: torch.optim.Optimizer, values: Values) -> float:
    """Return the rms of the error of the parameters' change, over the rms of the correct change."""
    params = zip(optimizer.param_groups[0]["params"], reference.param_groups[0]["params"], values, strict=True)
    squares = [((a - b).square().sum().item(), (b - start).square().sum().item()) for a, b, (start, _) in params]
    off, moved = map(sum, zip(*squares, strict=True))
    return math.sqrt(off / moved)
