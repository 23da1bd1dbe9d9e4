"""The sides of the case local_sgd, each with a model of its own: ours, and torch's averager and DDP."""

import importlib.util
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging import averagers
from torch.nn.parallel import DistributedDataParallel

from benchmarks.machine.ranks import given_rank
from dltrain_ext import ddp, local_sgd, optim

LAYERS = 10
LR, MOMENTUM, MIX = 0.7, 0.9, 0.5  # of the outer optimizer
ALONE, OURS, DDP = "no averaging", "DiLoCo", "DDP"
AVERAGER, TORCHFT, HIVEMIND = "torch PeriodicModelAverager", "torchft DiLoCo", "hivemind averager"
INSTALL = {TORCHFT: "torchft", HIVEMIND: "hivemind"}


class Side(NamedTuple):
    """`codec` is "raw" for peers. A peer with `fragments` or `delay` is one that has them."""

    kind: str
    codec: str = "raw"
    fragments: int = 1
    delay: int = 0
    ours: bool = False

    @property
    def name(self) -> str:
        parts = [self.kind]
        if self.ours or self.kind == DDP:
            parts.append(self.codec if self.ours else "fp32")
        if self.fragments > 1:
            parts.append(f"{self.fragments} fragments")
        if self.delay:
            parts.append(f"delay {self.delay}")
        return ", ".join(parts)


class Schedule(NamedTuple):
    sync_every: int
    fragments: int
    delay: int

    @property
    def interval(self) -> int:
        return self.sync_every // self.fragments


def why_not(side: Side) -> str:
    """Return why a peer cannot be a side; "" if it can."""
    package = INSTALL.get(side.kind)
    if package and not importlib.util.find_spec(package):
        return f"not installed: pip install {package}, in an environment of its own"
    if side.kind == HIVEMIND and given_rank():
        return "on emulated hosts some averages of hivemind 1.1.12 did not end within 90 s; over loopback it runs"
    return ""


def layers_of(width: int) -> nn.Sequential:
    """Return the model: layers of the same size, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(LAYERS)])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose steps are in proportion to the gradients, for checks."""
    return torch.optim.SGD(model.parameters(), lr=1e-2)


Inner = Callable[[nn.Module], torch.optim.Optimizer]


class Runner:
    """A side in training, and that of no averaging. It averages "nothing", "gradients", "parameters", or "moves"."""

    averages = "nothing"
    failures = 0  # averages that did not succeed, without an exception
    lead = 0  # steps before a turn, at the end of which nothing is under way
    outer: local_sgd.DiLoCo | None = None

    def __init__(self, side: Side, model: nn.Sequential, schedule: Schedule, inner: Inner):
        self.side, self.model, self.schedule = side, model, schedule
        self.wrapped: nn.Module = model
        self.inner = inner(model)
        self.count = 0

    def train(self, x: Tensor) -> None:
        self.inner.zero_grad()
        torch.autograd.backward(self.wrapped(x).square().mean())
        self.step()

    def give(self, grads: Callable[[list[nn.Parameter]], None]) -> None:
        """Take a step with given gradients."""
        grads(list(self.model.parameters()))
        self.step()

    def step(self) -> None:
        self.inner.step()

    def departs(self, step: int) -> bool:
        return step % self.schedule.interval == 0

    def lands(self, step: int) -> bool:
        return self.departs(step)

    def same(self) -> list[Tensor]:
        """Return what has the same bits on all ranks."""
        return [] if self.averages == "nothing" else [p.detach() for p in self.model.parameters()]

    @property
    def waited(self) -> float:
        """Return the seconds in which it stood still; 0 where this is not known."""
        return 0.0

    def close(self) -> None:
        """Release what it holds."""


class Ours(Runner):
    averages = "moves"

    def __init__(self, side: Side, model: nn.Sequential, schedule: Schedule, inner: Inner):
        super().__init__(side, model, schedule, inner)
        self.outer = local_sgd.DiLoCo(
            model,
            self.inner,
            sync_every=schedule.sync_every,
            fragments=schedule.fragments,
            delay=schedule.delay,
            codec=side.codec,
            error_feedback=side.codec != "raw",
            lr=LR,
            momentum=MOMENTUM,
            mix=MIX,
        )
        self.lead = schedule.delay

    def lands(self, step: int) -> bool:
        return step > self.schedule.delay and (step - self.schedule.delay) % self.schedule.interval == 0

    def same(self) -> list[Tensor]:
        assert self.outer
        return list(self.outer.state_dict()["backup"].values())

    @property
    def waited(self) -> float:
        assert self.outer
        return self.outer.metrics()["outer/waited"]

    def close(self) -> None:
        assert self.outer
        self.outer.finish()
        self.outer.close()


class DataParallel(Runner):
    averages = "gradients"

    def __init__(self, side: Side, model: nn.Sequential, schedule: Schedule, inner: Inner):
        super().__init__(side, model, schedule, inner)
        self.wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)
        self.state = ddp.register(self.wrapped, side.codec) if side.ours else None

    def give(self, grads: Callable[[list[nn.Parameter]], None]) -> None:
        kept = [nn.Parameter(p.detach()) for p in self.model.parameters()]
        grads(kept)
        given = [p.grad for p in kept]
        self.inner.zero_grad()
        forward, self.model.forward = self.model.forward, self.products  # type: ignore[method-assign]
        self.given = given
        try:
            torch.autograd.backward(self.wrapped(torch.zeros(())))
        finally:
            self.model.forward = forward  # type: ignore[method-assign]
        self.step()

    def products(self, _: Tensor) -> Tensor:
        """Return a sum of which the gradients are those that were given."""
        return torch.stack([(p * g).sum() for p, g in zip(self.model.parameters(), self.given, strict=True)]).sum()


class Averager(Runner):
    """torch's averager, which averages after the first step, and then periodically."""

    averages = "parameters"

    def __init__(self, side: Side, model: nn.Sequential, schedule: Schedule, inner: Inner):
        super().__init__(side, model, schedule, inner)
        self.averager = averagers.PeriodicModelAverager(period=schedule.sync_every)
        self.waiting = 0.0

    def step(self) -> None:
        self.inner.step()
        began = time.perf_counter()
        self.averager.average_parameters(self.model.parameters())
        self.waiting += time.perf_counter() - began

    def departs(self, step: int) -> bool:
        return (step - 1) % self.schedule.interval == 0

    @property
    def waited(self) -> float:
        return self.waiting

    def same(self) -> list[Tensor]:
        return []  # the check ends in other steps than those that average
