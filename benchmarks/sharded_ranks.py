"""The code that every rank of the case sharded runs: a model for each side, the check of its results, the timing."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.ddp_ranks import Job, inputs, loss_of, tolerance
from benchmarks.harness import Progress, interleave
from benchmarks.machine import link_probe
from benchmarks.machine.ranks import over_ranks
from dltrain_ext import codecs, ddp, fsdp, optim
from dltrain_ext.selftest.sums import count_wrong, first_if_unlike, relative_error

DEADLINE = 120.0
GATHER, FSDP, ZERO = "gather", "fsdp", "zero"
FP32, BF16 = "torch fp32", "torch bf16"
PLAIN, ZERO_REDUNDANCY = "plain DDP, AdamW", "torch ZeroRedundancyOptimizer"
CHECKED = 2  # steps before the timing
ROUNDING = 1e-5  # of an optimizer's steps, relative to the largest magnitude of the parameters
ADAMW: dict[str, Any] = {"lr": 1e-4, "weight_decay": 1e-2}


class Side(NamedTuple):
    """One of the peers, by its name, or ours."""

    name: str
    codec: str | None = None  # of gradients; None for a peer
    gather: str | None = None  # the codec of parameters; None for torch's all-gather

    @property
    def ours(self) -> bool:
        return self.codec is not None


SIDES = {
    GATHER: [Side(FP32), Side(BF16), *(Side(codec, "raw", codec) for codec in ("raw", "bf16", "int8", "int4"))],
    FSDP: [Side(FP32), Side(BF16), Side("int8", "int8"), Side("int8, gather int8", "int8", "int8")],
    ZERO: [Side(PLAIN), Side(ZERO_REDUNDANCY), Side("shard, raw", "raw"), Side("shard, int8", "int8")],
}


class Result(NamedTuple):
    """One side of one workload; `samples` is empty if it was wrong.

    `wire_bytes`: of one call, the mean over the ranks. `state`: bytes of the optimizer's state on the rank that keeps
    most, and on the one that keeps least. `line`: bytes per second of the link, measured in the same run.
    """

    workload: str
    side: Side
    wrong: int
    error: float
    wire_bytes: int
    state: tuple[float, float] | None
    samples: list[float]
    line: float | None = None


class Runner:
    """The model of one side, and its calls. The lists have a tensor for each parameter: fp32, a whole copy."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    state: Any = None  # ours
    dtype = torch.float32  # in which the model computes

    def __init__(self, side: Side, job: Job, ranks: int):
        self.side, self.job, self.ranks = side, job, ranks

    def plain(self) -> nn.Sequential:
        """Return the model without any wrapper; all have the same parameters."""
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(self.job.width, self.job.width) for _ in range(self.job.layers)])

    @property
    def lost(self) -> float:
        """Return the largest error of one encoding of a gradient, relative to the largest magnitude."""
        return lost_by(self.side.codec, self.dtype)

    def adamw(self) -> torch.optim.Optimizer:
        if self.side.ours:
            return optim.AdamW(self.model.parameters(), **ADAMW)
        return torch.optim.AdamW(self.model.parameters(), fused=True, **ADAMW)

    def backward(self, x: Tensor) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(loss_of(self.model, x))

    def step(self, x: Tensor) -> None:
        self.backward(x)
        self.optimizer.step()

    def updated(self) -> list[Tensor]:
        """Return the parameters that the optimizer updates."""
        return [whole(parameter) for parameter in self.model.parameters()]

    def computed(self) -> list[Tensor]:
        """Return the parameters with which the model computes."""
        return self.updated()

    def gradients(self) -> list[Tensor]:
        return [whole(parameter.grad) for parameter in self.model.parameters()]

    def counted(self) -> int:
        """Return the bytes that ours has sent."""
        return self.state.stats()["wire_bytes"] if self.state else 0

    def sent_by_torch(self, workload: str) -> float:
        """Return the bytes that torch sends in a call, by formula."""
        raise NotImplementedError

    def one_gather(self) -> float:
        """Return the bytes that a rank sends so that all get the parameters, of which each has a part."""
        numel = sum(parameter.numel() for parameter in self.model.parameters())
        return (self.ranks - 1) / self.ranks * numel * self.dtype.itemsize

    def state_bytes(self) -> int:
        optimizer = self.optimizer.optim if isinstance(self.optimizer, ZeroRedundancyOptimizer) else self.optimizer
        kept = [entry for of_one in optimizer.state.values() for entry in of_one.values() if isinstance(entry, Tensor)]
        return sum((entry.to_local() if isinstance(entry, DTensor) else entry).nbytes for entry in kept)


class FullySharded(Runner):
    def __init__(self, side: Side, job: Job, ranks: int):
        super().__init__(side, job, ranks)
        policy = MixedPrecisionPolicy()
        if side.name == BF16:
            self.dtype = torch.bfloat16
            policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=self.dtype)
        self.model = self.plain()
        for module in (*self.model, self.model):
            fully_shard(module, mp_policy=policy)
        if side.codec:
            self.state = fsdp.register(self.model, side.codec, gather=side.gather)
        self.modules = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        self.optimizer = self.adamw()

    def gather(self, look: Callable[[], object] = lambda: None) -> None:
        """Gather the parameters, and free them after a look."""
        for module in self.modules:
            module.unshard()
        look()
        for module in self.modules:
            module.reshard()

    def computed(self) -> list[Tensor]:
        found: list[Tensor] = []
        self.gather(lambda: found.extend(whole(parameter) for parameter in self.model.parameters()))
        return found

    def counted(self) -> int:
        return super().counted() + (self.state.stats()["gather_bytes"] if self.state else 0)

    def sent_by_torch(self, workload: str) -> float:
        gathers = 0 if self.side.gather else 1 if workload == GATHER else 2
        reductions = 0 if self.side.ours or workload == GATHER else 2  # Gloo's reduce-scatter sends what all-reduces do
        return (gathers + reductions) * self.one_gather()


class DataParallel(Runner):
    def __init__(self, side: Side, job: Job, ranks: int):
        super().__init__(side, job, ranks)
        inner = self.plain()
        self.names = [name for name, _ in inner.named_parameters()]
        self.model = DistributedDataParallel(inner, gradient_as_bucket_view=True)
        if side.name == ZERO_REDUNDANCY:
            self.optimizer = ZeroRedundancyOptimizer(
                self.model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, fused=True, **ADAMW
            )
        else:
            self.optimizer = self.adamw()
        if side.codec:
            self.state = ddp.register(self.model, side.codec, shard=self.optimizer)

    def plain(self) -> nn.Sequential:
        """Return a model whose last layer has two thirds of the parameters."""
        return super().plain().append(nn.Linear(self.job.width, 2 * self.job.layers * self.job.width))

    def gradients(self) -> list[Tensor]:
        if self.state is None:
            return super().gradients()
        shards = dict(self.state.shards.named_parameters())
        return [whole(shards[name].grad) for name in self.names]

    def sent_by_torch(self, workload: str) -> float:
        return {PLAIN: 2, ZERO_REDUNDANCY: 3}.get(self.side.name, 0) * self.one_gather()


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    found = tensor.detach()
    return (found.full_tensor() if isinstance(found, DTensor) else found).to(torch.float32, copy=True)


def lost_by(codec: str | None, dtype: torch.dtype) -> float:
    return codecs.error_bound(codec or ("bf16" if dtype == torch.bfloat16 else "raw")).max


def work(rank: int, ranks: int, progress: Progress, job: Job) -> Iterator[list[Result]]:
    """Yield the results of one workload after the other, the same on all ranks."""
    for index, workload in enumerate(job.sides):

        def advance(done: float, index: int = index, workload: str = workload) -> None:
            progress(f"{workload}, {ranks} ranks", (index + done) / len(job.sides))

        yield measure(rank, ranks, workload, job, advance)


def measure(rank: int, ranks: int, workload: str, job: Job, advance: Callable[[float], None]) -> list[Result]:
    x = inputs(rank, job)
    make = DataParallel if workload == ZERO else FullySharded
    runners = [make(side, job, ranks) for side in job.sides[workload]]
    calls: dict[str, Callable[[], object]] = {}
    found = []
    for runner in runners:
        advance(0.0)
        if isinstance(runner, FullySharded) and workload == GATHER:
            off, error = check_gather(runner)
            call: Callable[[], object] = runner.gather
        else:
            off, error = check_steps(runner, x)
            call = partial(runner.step, x)
        wrong, counted = over_ranks([off, count_sent(runner, call)], "sum")
        if not wrong:
            calls[runner.side.name] = call
        sent = round(counted / ranks + runner.sent_by_torch(workload))
        state = None if workload == GATHER else most_and_least(runner.state_bytes())
        found.append(Result(workload, runner.side, int(wrong), error, sent, state, []))
    timed = interleave(
        calls | link_probe.sides(rank, ranks, "cpu"),
        rounds=(job.rounds, job.rounds),
        warmup=job.warmup,
        before=lambda name: dist.barrier(),
        progress=advance,
    )
    slowest = {name: over_ranks(samples, "max") for name, samples in timed.items()}
    line = link_probe.rate(slowest.get(link_probe.SIDE, []))
    return [result._replace(samples=slowest.get(result.side.name, []), line=line) for result in found]


def count_sent(runner: Runner, call: Callable[[], object]) -> int:
    before = runner.counted()
    call()
    return runner.counted() - before


def most_and_least(nbytes: int) -> tuple[float, float]:
    most, least = over_ranks([nbytes, -nbytes], "max")
    return most, -least


# Checks. Each returns a number of wrong elements, and the rms of the error over the rms of what is exact.


def check_gather(runner: FullySharded) -> tuple[int, float]:
    """Compare what is gathered with the shards: the bits of all ranks, and the error of one encoding."""
    exact, found = runner.updated(), runner.computed()
    lost = (1 + 1e-4) * lost_by(runner.side.gather, runner.dtype)
    wrong = sum(count_wrong(a, b, lost * b.abs().max().item()) for a, b in zip(found, exact, strict=True))
    return wrong + count_unlike(found), relative_error(flat(found), flat(exact))


def check_steps(runner: Runner, x: Tensor) -> tuple[int, float]:
    """Compare each gradient with its average over all ranks, computed locally with the same parameters, and then these
    with what torch's AdamW makes of that gradient. So an error of a gradient does not count as one of the step."""
    copies = [nn.Parameter(parameter) for parameter in runner.updated()]
    reference = torch.optim.AdamW(copies, **ADAMW)
    wrong, error = 0, 0.0
    for _ in range(CHECKED):
        exact, magnitudes = average(runner)
        runner.backward(x)
        gradients = runner.gradients()
        for copy, gradient, expected, magnitude in zip(copies, gradients, exact, magnitudes, strict=True):
            copy.grad = gradient
            wrong += count_wrong(gradient, expected, tolerance(runner.lost, runner.ranks) * magnitude)
        error = error or relative_error(flat(gradients), flat(exact))
        runner.optimizer.step()
        reference.step()
        for found, copy in zip(runner.updated(), copies, strict=True):
            wrong += count_wrong(found, copy.detach(), ROUNDING * copy.abs().max().item())
    return wrong + count_unlike(runner.computed()), error


def average(runner: Runner) -> tuple[list[Tensor], list[float]]:
    """Return the averages over all ranks of the gradients and of their largest magnitudes, without communication."""
    model = runner.plain()
    nn.utils.vector_to_parameters(flat(runner.computed()), model.parameters())
    model.to(runner.dtype)
    by_rank = [
        torch.autograd.grad(loss_of(model, inputs(rank, runner.job).to(runner.dtype)), list(model.parameters()))
        for rank in range(runner.ranks)
    ]
    of_parameter = [torch.stack(each).float() for each in zip(*by_rank, strict=True)]
    return [each.mean(0) for each in of_parameter], [
        each.abs().flatten(1).amax(1).mean().item() for each in of_parameter
    ]


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def count_unlike(tensors: list[Tensor]) -> int:
    """Count the elements that have other bits than on rank 0."""
    found = flat(tensors)
    return count_wrong(found, found.clone(), 0, first_if_unlike(found))
