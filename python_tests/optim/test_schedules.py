"""Schedules of docs/schedules.md and of the example: rates against formulas, resumed runs, and traps of torch."""

import bisect
import importlib
import math
import re
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from optimizers import (
    KINDS,
    SHAPES,
    assert_untouched,
    everything,
    give_own_grads,
    give_scaled,
    make_params,
    through_file,
)
from ranks import ROOT, run_ranks
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
)

from dltrain_ext import comm, optim
from dltrain_ext.amp import LossScaler

STEPS, LR = 200, 0.1
MIDDLES = [7, 20, 150]  # in the warm-up, at its end, and after it
LRS = [pytest.param(LR, 1e-9, id="number"), pytest.param(torch.tensor(LR), 1e-4, id="tensor")]  # and a tolerance
Make = Callable[[torch.optim.Optimizer], LRScheduler]


def begin(make: Make, lr: float | torch.Tensor) -> tuple[torch.optim.Optimizer, LRScheduler]:
    optimizer = optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr.clone() if isinstance(lr, torch.Tensor) else lr)
    return optimizer, make(optimizer)


def follow(make: Make, lr: float | torch.Tensor, middle: int, metrics: list[float] | None = None) -> list[float]:
    """Return the rates of STEPS + 1 steps; before the step ``middle``, new objects load what these have saved."""
    optimizer, scheduler = begin(make, lr)
    rates = []
    for t in range(STEPS + 1):
        if t == middle:
            saved = through_file([optimizer.state_dict(), scheduler.state_dict()])
            optimizer, scheduler = begin(make, lr)
            for part, state in zip((optimizer, scheduler), saved, strict=True):
                part.load_state_dict(state)
        (group,) = optimizer.param_groups
        rates.append(float(group["lr"]))
        (p,) = group["params"]
        p.grad = torch.ones(3)
        with torch.no_grad():
            p.zero_()
        optimizer.step()
        assert p.tolist() == pytest.approx(3 * [-rates[-1]], rel=1e-6), "the rate of the step"
        scheduler.step(*([] if metrics is None else [metrics[t]]))
    return rates


NAMES = {
    **{name: getattr(torch.optim.lr_scheduler, name) for name in torch.optim.lr_scheduler.__all__},
    **{"bisect_right": bisect.bisect_right, "cos": math.cos, "pi": math.pi, "sqrt": math.sqrt},
    **{"s": 0.1, "w": 20, "h": 40, "n": STEPS, "k": 30, "p": 2.0, "gamma": 0.9, "beta": 10.0, "least": 0.01},
    **{"at": [50, 120], "factors": [1.0, 0.3, 0.1]},
}


def rows() -> dict[str, list[str]]:
    """Return the formula and the scheduler of each schedule of the page."""
    page = (ROOT / "docs" / "schedules.md").read_text()
    found = re.findall(r"^\| (.+?) \| `(.+?)` \| `(.+?)` \|$", page, re.M)
    return {name: [formula, scheduler] for name, formula, scheduler in found}


@pytest.mark.parametrize("middle", MIDDLES)
@pytest.mark.parametrize(("lr", "tolerance"), LRS)
@pytest.mark.parametrize("name", rows())
def test_formulas_of_the_page(name: str, lr: float | torch.Tensor, tolerance: float, middle: int) -> None:
    formula, scheduler = rows()[name]
    rates = follow(lambda optimizer: eval(scheduler, {**NAMES, "optimizer": optimizer}), lr, middle)
    expected = [eval(formula, {**NAMES, "lr": LR, "t": t}) for t in range(STEPS + 1)]
    assert rates == pytest.approx(expected, rel=tolerance, abs=1e-15)


def test_the_schedules_of_the_page_differ() -> None:
    curves = {tuple(eval(formula, {**NAMES, "lr": LR, "t": t}) for t in range(STEPS)) for formula, _ in rows().values()}
    assert len(curves) == len(rows()) == 11


# By what the rate is multiplied in step t of 200, for the schedules of the example.
FACTORS = {
    "warmup": lambda t: min(1.0, 0.1 + 0.9 * t / 20),
    "piecewise": lambda t: 1.0 if t < 66 else 0.3 if t < 100 else 0.1,
    "multi-step": lambda t: 1.0 if t < 100 else 0.1 if t < 150 else 0.01,
    "step": lambda t: 0.5 ** (t // 50),
    "exponential": lambda t: 0.01 ** (t / 200),
    "polynomial": lambda t: ((200 - t) / 200) ** 2,
    "cosine": lambda t: math.cos(math.pi * t / 400) ** 2 if t < 200 else 0.0,
    "inverse-sqrt": lambda t: (t + 1) ** -0.5,
    "warmup-inverse-sqrt": lambda t: (t + 1) / 20 if t < 20 else 1.0 if t < 40 else (40 / (t + 1)) ** 0.5,
    "alpha-beta": lambda t: 20**0.5 / (20 + t) ** 0.5,
    "warmup-cosine": lambda t: (
        0.1 + 0.9 * t / 20 if t < 20 else math.cos(math.pi * (t - 20) / 360) ** 2 if t < 200 else 0.0
    ),
}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("schedules")


@pytest.mark.needs("rich", "sklearn")
@pytest.mark.parametrize("middle", MIDDLES)
@pytest.mark.parametrize(("lr", "tolerance"), LRS)
@pytest.mark.parametrize("name", FACTORS)
def test_formulas_of_the_example(
    example: ModuleType, name: str, lr: float | torch.Tensor, tolerance: float, middle: int
) -> None:
    rates = follow(lambda optimizer: example.SCHEDULES[name](optimizer, STEPS), lr, middle)
    assert rates == pytest.approx([LR * FACTORS[name](t) for t in range(STEPS + 1)], rel=tolerance, abs=1e-15)


@pytest.mark.needs("rich", "sklearn")
@pytest.mark.parametrize("middle", [7, 61, 150])
@pytest.mark.parametrize(("lr", "tolerance"), LRS)
def test_plateau_of_the_example(example: ModuleType, lr: float | torch.Tensor, tolerance: float, middle: int) -> None:
    """An improvement by less than a tenth is none, and what was the best then remains it."""
    assert {*FACTORS, "plateau"} == set(example.SCHEDULES)
    stalls, best, metrics, expected, rate = {7, 60, 61, 150}, 1e10, [], [LR], LR
    for t in range(STEPS + 1):
        if t in stalls:
            rate *= 0.5
        else:
            best *= 0.8
        metrics.append(0.95 * best if t in stalls else best)
        expected.append(rate)
    rates = follow(lambda optimizer: example.plateau(optimizer, STEPS), lr, middle, metrics)
    assert rates == pytest.approx(expected[:-1], rel=tolerance)


def warm_up_and_cosine(optimizer: torch.optim.Optimizer, last: int = -1) -> LRScheduler:
    parts = [
        LinearLR(optimizer, 0.1, total_iters=5, last_epoch=last),
        CosineAnnealingLR(optimizer, T_max=15, last_epoch=last),
    ]
    return SequentialLR(optimizer, parts, milestones=[5], last_epoch=last)


def train(kind: type[torch.optim.Optimizer], resumed: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Return rates and results of 18 steps, of which two overflow and do not count; a new run resumes after 10."""

    def begin():
        params = make_params(SHAPES)
        optimizer = kind(params, lr=LR)
        return params, optimizer, warm_up_and_cosine(optimizer), LossScaler("cpu", init_scale=8.0, growth_interval=4)

    params, *parts = begin()
    rates = []
    for t in range(18):
        if resumed and t == 10:
            saved = through_file([[p.detach() for p in params], *(part.state_dict() for part in parts)])
            params, *parts = begin()
            with torch.no_grad():
                for p, value in zip(params, saved[0], strict=True):
                    p.copy_(value)
            for part, state in zip(parts, saved[1:], strict=True):
                part.load_state_dict(state)
        optimizer, scheduler, scaler = parts
        rates.append(optimizer.param_groups[0]["lr"])
        give_scaled(params, t, scaler, bad=math.inf if t in (0, 12) else None)
        skipped = scaler.skipped_steps
        scaler.step(optimizer)
        scaler.update()
        if scaler.skipped_steps == skipped:
            scheduler.step()
    return rates, [*everything(params, optimizer), torch.tensor(scaler.get_scale())]


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_same_rates_and_bits(kind: type[torch.optim.Optimizer]) -> None:
    rates, results = train(kind, resumed=False)
    taken = [LR * (0.1 + 0.9 * t / 5 if t < 5 else math.cos(math.pi * (t - 5) / 30) ** 2) for t in range(16)]
    assert rates == pytest.approx([taken[0], *taken[:12], *taken[11:]][:18]), "those of skipped steps come again"
    again, others = train(kind, resumed=True)
    assert again == rates
    assert_untouched(others, results)


def seen(optimizer: torch.optim.Optimizer, scheduler: LRScheduler, steps: int) -> list[float]:
    """Return the rates of the next steps."""
    rates = []
    for t in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        give_own_grads(optimizer.param_groups[0]["params"], t)
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("middle", [3, 12])
def test_torch_resumes_wrongly_with_last_epoch_or_in_another_order(middle: int) -> None:
    """If this fails, torch has changed, and docs/schedules.md can do with fewer warnings."""
    whole = seen(*begin(warm_up_and_cosine, LR), 20)
    optimizer, scheduler = begin(warm_up_and_cosine, LR)
    seen(optimizer, scheduler, middle)
    saved = optimizer.state_dict()

    for last in (middle - 1, middle):
        other = optim.SGD([torch.nn.Parameter(torch.zeros(3))], LR)
        other.load_state_dict(saved)
        assert seen(other, warm_up_and_cosine(other, last), 5) != pytest.approx(whole[middle : middle + 5], rel=0.01)

    other = optim.SGD([torch.nn.Parameter(torch.zeros(3))], LR)
    other.load_state_dict(saved)
    late = warm_up_and_cosine(other)
    late.load_state_dict(scheduler.state_dict())
    assert seen(other, late, 5) != pytest.approx(whole[middle : middle + 5], rel=0.01)


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_torch_does_not_nest_sequences() -> None:
    def inner(optimizer):
        return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=2), ConstantLR(optimizer, 0.5)], [2])

    alone = seen(*begin(inner, 1.0), 4)
    first = seen(*begin(lambda o: SequentialLR(o, [inner(o), ExponentialLR(o, 0.5)], [5]), 1.0), 4)
    assert alone == pytest.approx([0.1, 0.55, 0.5, 0.5]) and first != pytest.approx(alone)
    with pytest.raises(NotImplementedError):
        seen(*begin(lambda o: SequentialLR(o, [ExponentialLR(o, 0.5), inner(o)], [3]), 1.0), 4)


def test_ftrl_scales_its_parameters_with_the_rate() -> None:
    params = make_params([(64, 33)])
    optimizer = optim.FTRL(params, lr=LR)
    scheduler = LambdaLR(optimizer, lambda t: 1.0 if t < 3 else 0.5)
    seen(optimizer, scheduler, 3)
    before = params[0].detach().clone()
    params[0].grad = torch.zeros_like(params[0])
    optimizer.step()
    torch.testing.assert_close(params[0].detach(), before / 2)


def reduced(rank: int, world_size: int) -> dict[bool, list[float]]:
    """Return the rates with a metric that improves on rank 0 alone: as each rank sees it, and averaged."""
    found = {}
    for averaged in (False, True):
        optimizer, scheduler = begin(lambda o: ReduceLROnPlateau(o, factor=0.5, patience=1), LR)
        found[averaged] = []
        for step in range(6):
            total = torch.tensor([1.0, 1.0] if rank else [30.0 - step, 10.0])  # sum, and number of examples
            if averaged:
                comm.all_reduce(total)
            scheduler.step(total[0] / total[1])
            found[averaged].append(optimizer.param_groups[0]["lr"])
    return found


def test_ranks_agree_on_an_averaged_metric() -> None:
    first, second = run_ranks(2, reduced)
    assert first[False] != second[False]
    assert first[True] == second[True] == [LR] * 6
    assert second[False] == pytest.approx([LR, LR, LR / 2, LR / 2, LR / 4, LR / 4])
