"""The code that every rank of the case ddp runs: a model for each side, the check of its gradients, and the timing."""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.allreduce_ranks import nccl_group
from benchmarks.harness import Progress, interleave
from benchmarks.machine import link_probe
from benchmarks.machine.ranks import over_ranks
from dltrain_ext import amp, codecs, ddp, optim
from dltrain_ext.selftest.sums import count_wrong, first_if_unlike, relative_error

DEADLINE = 120.0
BACKWARD, STEP = "forward and backward", "with unscaling, clipping and AdamW"
PLAIN, FP16, BF16 = "plain DDP", "torch fp16_compress_hook", "torch bf16_compress_hook"
POWER_SGD = "torch PowerSGD, rank 4, one bucket"  # with several, ranks would start its all-reduces in other orders
UNCOMPRESSED = 2  # steps before PowerSGD compresses; it accepts no smaller number
SEARCHED = 7  # the first step in which all codecs of a budget have been found
TORCH_HOOKS = {
    FP16: default_hooks.fp16_compress_hook,
    BF16: default_hooks.bf16_compress_hook,
    POWER_SGD: powerSGD_hook.powerSGD_hook,
}
PEERS = {"cpu": [PLAIN, FP16, POWER_SGD], "cuda": [PLAIN, FP16, BF16, POWER_SGD]}  # torch's bf16 hook needs NCCL
LOST = {PLAIN: 1e-5, FP16: 2**-10, BF16: 2**-7}  # error of one encoding, relative to the largest magnitude


class Side(NamedTuple):
    """How gradients are averaged: by one of torch's hooks, or by one of our codecs or "auto"; and what follows."""

    way: str
    algorithm: str = "auto"
    finish: str = ""
    max_error: float | None = None

    @property
    def ours(self) -> bool:
        return self.way in (*codecs.CODECS, "auto")

    @property
    def name(self) -> str:
        parts = [self.way, "" if self.algorithm == "auto" else self.algorithm, self.finish]
        budget = "" if self.max_error is None else f", error <= {self.max_error:g}"
        return " ".join(part for part in parts if part) + budget

    @property
    def first(self) -> int:
        """Return the first step that compresses."""
        if self.max_error is not None:
            return SEARCHED
        return UNCOMPRESSED + 1 if self.way == POWER_SGD else 1


class Job(NamedTuple):
    """What is timed, also by the case sharded, whose sides are others."""

    sides: dict[str, list[Any]]  # by workload
    layers: int
    width: int
    batch: int
    rounds: int
    warmup: int
    device: str = "cpu"


class Result(NamedTuple):
    """One side of one workload; `samples` is empty if its gradients were wrong.

    `line`: bytes per second of the link, measured in the same run.
    """

    workload: str
    side: Side
    chosen: str  # what "auto" selected
    wrong: int
    error: float
    wire_bytes: int | None
    hidden: float | None
    samples: list[float]
    line: float | None = None
    metrics: tuple[float, float] | None = None  # seconds of state.metrics() on the slowest rank: without errors, with


class Runner:
    """The model of one side, and its step."""

    def __init__(self, side: Side, job: Job, group: dist.ProcessGroup | None):
        torch.manual_seed(0)
        layers = [nn.Linear(job.width, job.width) for _ in range(job.layers)]
        options = {"bucket_cap_mb": 1 << 20} if side.way == POWER_SGD else {}
        self.model = DistributedDataParallel(
            nn.Sequential(*layers).to(job.device), process_group=group, gradient_as_bucket_view=True, **options
        )
        self.side = side
        self.state: ddp.AllReduceState | None = None
        self.scaler: torch.amp.GradScaler | None = None
        if side.finish:
            scalers = amp.LossScaler if side.ours else torch.amp.GradScaler
            optimizers = optim.AdamW if side.ours else partial(torch.optim.AdamW, fused=True)
            self.scaler = scalers(job.device, init_scale=2.0**10)
            self.optimizer = optimizers(self.model.parameters(), lr=1e-6)
        if side.ours:
            self.state = ddp.register(
                self.model, side.way, side.algorithm, scaler=self.scaler, max_error=side.max_error
            )
        elif hook := TORCH_HOOKS.get(side.way):
            self.model.register_comm_hook(power_sgd(group) if side.way == POWER_SGD else group, hook)

    @property
    def lost(self) -> float:
        """Return the largest error of one encoding, relative to the largest magnitude."""
        return codecs.error_bound(self.state.codec).max if self.state else LOST[self.side.way]

    @property
    def chosen(self) -> str:
        if self.side.way != "auto" or self.state is None:
            return ""
        if self.side.max_error is not None:
            shares = self.state.metrics(errors=False).items()
            found = {name.removeprefix("ddp/share_"): share for name, share in shares if "share_" in name}
            return ", ".join(f"{100 * share:.0f} % {codec}" for codec, share in found.items())
        return "native" if self.state.algorithm == "native" else self.state.codec

    def count_wrong(self, gradients: Tensor, exact: Tensor, magnitude: float, ranks: int) -> int:
        if self.side.way == POWER_SGD:  # a projection: all that is known is that its error is below the average
            return 0 if relative_error(gradients, exact) < 1 else gradients.numel()
        if self.side.max_error is not None:  # what was lost in the step before is added, and again as much is lost
            return 0 if relative_error(gradients, exact) < 2 * self.side.max_error else gradients.numel()
        return count_wrong(gradients, exact, tolerance(self.lost, ranks) * magnitude)

    def backward(self, x: Tensor) -> None:
        self.model.zero_grad()
        loss = loss_of(self.model, x)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, x: Tensor) -> None:
        self.backward(x)
        if self.scaler is None:
            return
        if self.state:
            known = {"grad_stats": self.state.grad_stats} if self.side.finish == "told the norm" else {}
            self.scaler.step(self.optimizer, max_norm=1.0, **known)
        else:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
        self.scaler.update()

    def gradients(self) -> Tensor:
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        return torch.cat([p.grad.flatten() for p in self.model.parameters()]) / scale


def power_sgd(group: dist.ProcessGroup | None) -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=4, start_powerSGD_iter=UNCOMPRESSED)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def inputs(rank: int, job: Job) -> Tensor:
    return torch.randn(job.batch, job.width, generator=torch.Generator().manual_seed(rank)).to(job.device)


def work(rank: int, ranks: int, progress: Progress, job: Job) -> Iterator[list[Result]]:
    """Yield the results of one workload after the other, the same on all ranks."""
    group = nccl_group() if job.device == "cuda" else None
    for index, (workload, sides) in enumerate(job.sides.items()):

        def advance(done: float, index: int = index, workload: str = workload) -> None:
            progress(f"{workload}, {ranks} ranks", (index + done) / len(job.sides))

        yield measure(rank, ranks, workload, sides, job, group, advance)


def measure(
    rank: int,
    ranks: int,
    workload: str,
    sides: list[Side],
    job: Job,
    group: dist.ProcessGroup | None,
    advance: Callable[[float], None],
) -> list[Result]:
    x = inputs(rank, job)
    runners = {side.name: Runner(side, job, group) for side in sides}
    exact, magnitude = average(next(iter(runners.values())).model.module, ranks, job)
    wrong, errors = {}, {}
    for name, runner in runners.items():
        advance(0.0)
        for _ in range(runner.side.first):
            runner.backward(x)
        gradients = runner.gradients()
        off = runner.count_wrong(gradients, exact, magnitude, ranks)
        wrong[name] = off + (0 if are_identical(gradients) else gradients.numel())
        errors[name] = relative_error(gradients, exact)
    wrong_anywhere = dict(zip(runners, over_ranks(list(wrong.values()), "sum"), strict=True))
    right = [name for name in runners if not wrong_anywhere[name]]
    timed = interleave(
        {name: partial(runners[name].step, x) for name in right} | link_probe.sides(rank, ranks, job.device),
        rounds=(job.rounds, job.rounds),
        warmup=job.warmup,
        before=lambda name: dist.barrier(),
        device=job.device,
        progress=advance,
    )
    slowest = {name: over_ranks(samples, "max") for name, samples in timed.items()}
    results = []
    for name, runner in runners.items():
        stats = runner.state.stats() if runner.state else None
        passes = stats["steps"] if stats else 1
        results.append(
            Result(
                workload,
                runner.side,
                runner.chosen,
                int(wrong_anywhere[name]),
                errors[name],
                stats["wire_bytes"] // passes if stats else None,
                stats["hidden"] if stats else None,
                slowest.get(name, []),
                link_probe.rate(slowest.get(link_probe.SIDE, [])),
                metrics_of(runner.state) if runner.state else None,
            )
        )
    return results


def metrics_of(state: ddp.AllReduceState) -> tuple[float, float]:
    medians = []
    for errors in (False, True):
        samples = []
        for _ in range(5):
            dist.barrier()
            start = time.perf_counter()
            state.metrics(errors=errors)
            samples.append(time.perf_counter() - start)
        medians.append(statistics.median(samples))
    without, complete = over_ranks(medians, "max")
    return without, complete


def average(model: nn.Module, ranks: int, job: Job) -> tuple[Tensor, float]:
    """Return the averages over all ranks of the gradients and of their largest magnitudes, computed without DDP."""
    total, magnitude = torch.zeros(()), 0.0
    for rank in range(ranks):
        gradients = torch.autograd.grad(loss_of(model, inputs(rank, job)), list(model.parameters()))
        own = torch.cat([gradient.flatten() for gradient in gradients]).double()
        total = total + own / ranks
        magnitude += own.abs().max().item() / ranks
    return total.float(), magnitude


def tolerance(lost: float, ranks: int) -> float:
    """Return the tolerance for p contributions and a result that are each encoded once, and a sum in fp32."""
    return (ranks + 1) * lost + 1e-5


def are_identical(gradients: Tensor) -> bool:
    """Return whether the gradients have the same bits on all ranks."""
    return first_if_unlike(gradients) is None
