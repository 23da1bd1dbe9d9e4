"""AdamW steps of bfloat16 parameters, by what is kept of their masters and moments: time, bytes of state, errors."""

import argparse
import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from benchmarks.harness import Keep, Progress, Row, Table, at_least, interleave
from dltrain_ext import optim

OVERVIEW = ["--numel", "1M", "-n", "5"]
OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 1e-2}
MASTERS = "masters"
STEPS = 10  # that are checked
MOMENTS = "moments in 8 bits"
MOMENTS_OPTIONS = {**OPTIONS, "betas": (0.9, 0.999)}
MOMENTS_STEPS, MOMENTS_SHAPE = 300, (512, 128)
SECONDS = 60.0  # after three rounds, none begins later
STOCHASTIC = {"master_weights": False, "rounding": "stochastic"}
NOTES = [
    "a sample is one step on one bfloat16 parameter with a bfloat16 gradient; the sides, each with its own parameter, "
    "are timed alternately; peer/ours is the time of a peer over that of ours with float32 masters, or the time with "
    "float32 masters over that of another form of ours",
    f"update error: the norm of the difference to float32 AdamW after {STEPS} steps, relative to how far that has "
    "moved; of the master where there is one; #wrong: 1 if it is above the side's bound",
    "state B/param: the optimizer's state, without the count of steps",
    "torch fused has moments in bfloat16; optimi (torch-optimi) has them, too, and a bfloat16 Kahan sum",
    f"{MOMENTS}: the rms error of the update of step {MOMENTS_STEPS} with float32 parameters, relative to the rms of "
    "the exact one; gradients are normal, times a scale of each element, which is log-normal",
]


class Side(NamedTuple):
    """An optimizer, and the bound of its update error."""

    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
    bound: float
    ours: bool = True


def ours(bound: float, **options: Any) -> Side:
    return Side(lambda params: optim.AdamW(params, **OPTIONS, **options), bound)


def kahan(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = importlib.import_module("optimi").AdamW(
        params, **OPTIONS, kahan_sum=True, triton=False
    )
    return made


# An element of 1 moves by 1e-2 in ten steps, and a bfloat16 near 1 has steps of 4e-3 to 8e-3.
SIDES: Mapping[str, Side] = {
    MASTERS: ours(0.01),
    'master_weights="8bit"': ours(0.01, master_weights="8bit"),
    "stochastic": ours(1.0, **STOCHASTIC),
    "to nearest": ours(2.0, master_weights=False),
    "masters, int8 moments": ours(0.1, state_codec="int8"),
    '"8bit", int8 moments': ours(0.1, master_weights="8bit", state_codec="int8"),
    "stochastic, int8 moments": ours(1.0, state_codec="int8", **STOCHASTIC),
    "torch fused": Side(lambda params: torch.optim.AdamW(params, **OPTIONS, fused=True), 2.0, ours=False),
    "optimi, Kahan": Side(kahan, 1.0, ours=False),
}


def bitsandbytes(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = importlib.import_module("bitsandbytes").optim.AdamW8bit(params, **MOMENTS_OPTIONS)
    return made


IN_8_BITS: Mapping[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "ours": lambda params: optim.AdamW(params, state_codec="int8", **MOMENTS_OPTIONS),
    "bitsandbytes": bitsandbytes,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--numel", type=elements, help="elements of the parameter (default: 25M, --quick: 100K)")
    parser.add_argument("-n", "--iters", type=at_least(1), help="timed steps (default: 30, --quick: 3)")


def elements(text: str) -> int:
    units = {"K": 10**3, "M": 10**6}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1)
    return unit * at_least(1)(number)


def run(options: argparse.Namespace, progress: Progress, keep: Keep) -> None:
    numel = options.numel or (100_000 if options.quick else 25_000_000)
    rounds = options.iters or (3 if options.quick else 30)
    where = torch.cuda.get_device_name(0) if options.device == "cuda" else f"{torch.get_num_threads()} threads"
    table = Table(f"AdamW of a bfloat16 parameter, {where}", notes=list(NOTES), check_heading="#wrong", summary=MOMENTS)
    keep(table)
    params: dict[str, torch.nn.Parameter] = {}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    rows: dict[str, Row] = {}
    start, grads = inputs(numel, options.device)
    expected = exact(start, grads)
    for index, (name, side) in enumerate(SIDES.items()):
        progress(f"{name}: verifying", index / len(SIDES) / 3)
        p = torch.nn.Parameter(start.clone())
        try:
            optimizer = side.make([p])
        except ModuleNotFoundError as error:
            table.rows.append(Row.missing(name, f"not installed: {error.name}"))
            continue
        error, state = verify(p, optimizer, start, grads, expected)
        correct = error <= side.bound
        rows[name] = Row(f"{numel:,} elements", name, side.ours, correct, str(int(not correct)))
        rows[name].figures = {"update error": error, "state B/param": state}
        if correct:
            params[name], optimizers[name] = p, optimizer

    def give_grad(name: str) -> None:  # optimi overwrites it
        params[name].grad.copy_(grads[0])  # type: ignore[union-attr]

    samples = interleave(
        {name: optimizer.step for name, optimizer in optimizers.items()},
        rounds=(min(rounds, 3), rounds),
        seconds=SECONDS,
        before=give_grad,
        device=options.device,
        progress=lambda done: progress("steps", (1 + 2 * done) / 3),
    )
    for name, row in rows.items():
        row.samples = samples.get(name, [])
    for name, row in rows.items():
        if not row.ours:
            row.compare_with(rows[MASTERS])
        elif name != MASTERS and row.time and rows[MASTERS].time:
            row.against, row.ratio = MASTERS, rows[MASTERS].time.median / row.time.median  # type: ignore[union-attr]
    table.rows += rows.values()
    table.rows += [moments(name, make, options.device) for name, make in IN_8_BITS.items()]


def inputs(numel: int, device: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(numel, generator=generator).to(device, torch.bfloat16) for _ in range(4))
    return start, grads


def exact(start: torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor:
    """Return the parameter after the checked steps in float32."""
    p = torch.nn.Parameter(start.float())
    optimizer = torch.optim.AdamW([p], **OPTIONS, fused=True)
    for step in range(STEPS):
        p.grad = grads[step % len(grads)].float()
        optimizer.step()
    return p.detach()


def verify(
    p: torch.nn.Parameter,
    optimizer: torch.optim.Optimizer,
    start: torch.Tensor,
    grads: list[torch.Tensor],
    expected: torch.Tensor,
) -> tuple[float, float]:
    """Return the update error and the bytes of state for each element."""
    for step in range(STEPS):
        p.grad = grads[step % len(grads)].clone()
        optimizer.step()
    value = optimizer.state_dict()["state"][0].get("master_param", p.detach()).float()
    error = (value - expected).norm() / (expected - start.float()).norm()
    kept = [value for value in optimizer.state[p].values() if torch.is_tensor(value) and value.numel() > 1]
    return float(error), sum(value.nbytes for value in kept) / p.numel()


def moments(name: str, make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], device: str) -> Row:
    """Return the errors of an update whose moments have been kept in 8 bits."""
    figures: dict[str, float | None] = {}
    for sigma in (0, 1, 3):
        generator = torch.Generator().manual_seed(sigma)
        scales = torch.exp(sigma * torch.randn(MOMENTS_SHAPE, generator=generator))
        params = [torch.nn.Parameter(torch.zeros(MOMENTS_SHAPE, device=device)) for _ in range(2)]
        try:
            optimizers = [make(params[:1]), torch.optim.AdamW(params[1:], **MOMENTS_OPTIONS)]
        except ModuleNotFoundError as error:
            return Row.missing(name, f"not installed: {error.name}", MOMENTS)
        for _ in range(MOMENTS_STEPS):
            grad = (scales * torch.randn(MOMENTS_SHAPE, generator=generator)).to(device)
            before = [p.detach().clone() for p in params]
            for p, optimizer in zip(params, optimizers, strict=True):
                p.grad = grad.clone()
                optimizer.step()
        got, exactly = (p.detach() - start for p, start in zip(params, before, strict=True))
        figures[f"error, sigma {sigma}"] = float((got - exactly).norm() / exactly.norm())
    row = Row(MOMENTS, name, name == "ours", correct=True, check="")
    row.figures = figures
    return row
