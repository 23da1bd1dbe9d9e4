"""Steps of Muon at the shapes of GPT-2, in one process and shared by ranks, against torch's."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.harness import Keep, Progress, Row, Table, at_least, interleave
from benchmarks.machine.ranks import count_ranks, given_rank, on_ranks, over_ranks
from dltrain_ext import optim
from dltrain_ext.optim.muon.orthogonal import usual_dtype
from dltrain_ext.selftest.sums import first_if_unlike

OVERVIEW = ["--blocks", "1", "--width", "192", "-n", "5"]
RANKS, DEADLINE = 2, 300.0
COEFFICIENTS, EPS, NS_STEPS = (3.4445, -4.775, 2.0315), 1e-7, 5
BOUND = 0.1  # of the difference to torch's change of the parameters, relative to that change
ALONE = "one process"
Params = list[torch.nn.Parameter]
Make = Callable[[Params], torch.optim.Optimizer]


class InFloat32(torch.optim.Optimizer):
    """torch's Muon with products in float32, as one writes it with torch's functions for each matrix."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95})

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        a, b, c = COEFFICIENTS
        for p in group["params"]:
            buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            buffer.lerp_(p.grad, 1 - group["momentum"])
            x = p.grad.lerp(buffer, group["momentum"])
            x = x.T if x.size(0) > x.size(1) else x
            x = x / x.norm().clamp(min=EPS)
            for _ in range(NS_STEPS):
                gram = x @ x.T
                x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
            direction = x.T if p.size(0) > p.size(1) else x
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(direction, alpha=-group["lr"] * max(1, p.size(0) / p.size(1)) ** 0.5)


TORCH, BY_HAND = "torch", "torch by hand, float32"
ALONE_SIDES: Mapping[str, Make] = {
    TORCH: torch.optim.Muon,
    "ours, bfloat16": lambda params: optim.Muon(params, dtype=torch.bfloat16),
    BY_HAND: InFloat32,
    "ours, float32": lambda params: optim.Muon(params, dtype=torch.float32),
    "ours": optim.Muon,
}
PEERS = {"ours, bfloat16": TORCH, "ours, float32": BY_HAND, "ours": TORCH}
SHARED_SIDES: Mapping[str, Make] = {
    TORCH: torch.optim.Muon,
    "ours": lambda params: optim.Muon(params, group=dist.group.WORLD),
}


class Job(NamedTuple):
    blocks: int
    width: int
    rounds: int


class Result(NamedTuple):
    """A side; `samples` is empty if it is wrong."""

    side: str
    correct: bool
    error: float
    samples: list[float]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "If torchrun's variables (RANK, WORLD_SIZE, ...) are set, it runs as that rank; rank 0 reports. The defaults "
        "are smaller on processors without instructions for products of bfloat16, for which torch takes minutes there."
    )
    parser.add_argument("--blocks", type=at_least(1), help="blocks of the model (default: 12, or 1; --quick: 1)")
    parser.add_argument("--width", type=at_least(8), help="width of the model (default: 768, or 256; --quick: 64)")
    parser.add_argument("-n", "--iters", type=at_least(1), help="timed steps (default: 10, --quick: 2)")


def run(options: argparse.Namespace, progress: Progress, keep: Keep) -> None:
    is_fast = usual_dtype(torch.empty(1000, 1000, device=options.device)) == torch.bfloat16
    job = Job(
        options.blocks or (12 if is_fast and not options.quick else 1),
        options.width or (64 if options.quick else 768 if is_fast else 256),
        options.iters or (2 if options.quick else 10),
    )
    ranks = count_ranks(options.ranks, RANKS)
    table = Table(
        f"Muon, {len(shapes(job))} matrices of GPT-2 of width {job.width}, float32 parameters",
        notes=[
            "a sample is one step; the sides, each with parameters of its own, are timed alternately",
            f"{ALONE}: with {torch.get_num_threads()} threads; {ranks} ranks: on the CPU, with one thread each, after "
            "a barrier, on the slowest one: torch's optimizer does the same work on each rank, ours divides it",
            f"check: the norm of the difference to what torch has changed in 3 steps, relative to it, at most {BOUND}; "
            "ranks must have the same bits",
        ],
    )
    keep(table)
    if given_rank() is None:
        results = measure(ALONE_SIDES, job, options.device, lambda done: progress(ALONE, done / 2))
        table.rows += rows(ALONE, results, PEERS)
    label = f"{ranks} ranks"
    on_ranks(
        work,
        ranks,
        job,
        take=lambda results: table.rows.extend(rows(label, results, {"ours": TORCH})),
        progress=lambda text, done: progress(text, (1 + done) / 2),
        deadline=DEADLINE,
    )


def shapes(job: Job) -> list[tuple[int, int]]:
    """Return the shapes of the matrices of attention and feed-forward layers in all blocks (Radford et al. 2019)."""
    width = job.width
    return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * job.blocks


def rows(workload: str, results: list[Result], peers: Mapping[str, str]) -> list[Row]:
    made = {
        result.side: Row(
            workload, result.side, result.side.startswith("ours"), result.correct, f"{result.error:.1e}", result.samples
        )
        for result in results
    }
    for side, peer in peers.items():
        made[side].compare_with(made[peer])
    return list(made.values())


def work(rank: int, ranks: int, progress: Progress, job: Job) -> Iterator[list[Result]]:
    """Yield the results, the same on all ranks."""
    torch.set_num_threads(1)
    found = measure(SHARED_SIDES, job, "cpu", lambda done: progress(f"{ranks} ranks", done), over_ranks)
    yield [result._replace(samples=over_ranks(result.samples, "max")) for result in found]


def measure(
    sides: Mapping[str, Make],
    job: Job,
    device: str,
    advance: Callable[[float], None],
    largest: Callable[[list[float], str], list[float]] = lambda values, how: values,
) -> list[Result]:
    """Verify the sides after three steps, and time the correct ones. `largest` reduces numbers over the ranks, and so
    waits for them."""
    generator = torch.Generator().manual_seed(0)
    start = [0.02 * torch.randn(shape, generator=generator).to(device) for shape in shapes(job)]
    grads = [torch.randn(shape, generator=generator).to(device) for shape in shapes(job)]
    moved: dict[str, list[torch.Tensor]] = {}
    steps: dict[str, Callable[[], object]] = {}
    results = []
    for side, make in sides.items():
        params = [torch.nn.Parameter(p.clone()) for p in start]
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        optimizer = make(params)
        for _ in range(3):
            optimizer.step()
        moved[side] = [p.detach() - q for p, q in zip(params, start, strict=True)]
        unlike = dist.is_initialized() and any([first_if_unlike(p.detach()) is not None for p in params])
        (error,) = largest([difference(moved[side], moved[TORCH])], "max")
        if correct := error <= BOUND and not unlike:
            steps[side] = optimizer.step
        results.append(Result(side, correct, error, []))
    samples = interleave(
        steps,
        rounds=(job.rounds, job.rounds),
        warmup=0,
        before=lambda side: largest([0.0], "max"),
        device=device,
        progress=advance,
    )
    return [result._replace(samples=samples.get(result.side, [])) for result in results]


def difference(some: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest over the matrices, relative to the norm of what is expected."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(some, expected, strict=True))
