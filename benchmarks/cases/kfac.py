"""K-FAC by part, at the shapes of ResNet-50: factors to their owners, inverses to all, inverting, preconditioning."""

import argparse
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cases.optim import resnet50
from benchmarks.harness import Keep, Progress, Row, Table, at_least, choices, interleave
from benchmarks.machine.ranks import count_ranks, on_ranks, over_ranks
from dltrain_ext import codecs, comm
from dltrain_ext.kfac.cholesky import cost, damped_inverses
from dltrain_ext.kfac.triangle import pack, packed_numel
from dltrain_ext.selftest.sums import count_wrong, first_if_unlike, tolerance

OVERVIEW = ["--largest", "600", "-n", "3"]
RANKS, DEADLINE = 4, 300.0
PARTS = ("factors", "inverses", "inverting", "preconditioning")
FACTOR_STEPS, INVERSE_STEPS = 10, 100  # the intervals of KAISA's scripts
DAMPING = 1e-3
Shape = tuple[int, int]  # outputs and inputs of a layer: the sizes of its factors


class Job(NamedTuple):
    shapes: dict[str, Shape]
    parts: list[str]
    codecs: list[str]
    rounds: int


class Result(NamedTuple):
    """A side of a part; `samples` is empty if it is wrong. `wire_bytes`: what the rank that sends most sends a call."""

    part: str
    side: str
    ours: bool
    wrong: int
    wire_bytes: float | None
    samples: list[float]


class Side(NamedTuple):
    call: Callable[[], object]
    count_wrong: Callable[[], int]
    wire_bytes: Callable[[], float] | None = None  # of the latest call, at this rank
    ours: bool = True


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "If torchrun's variables (RANK, WORLD_SIZE, ...) are set, it runs as that rank; rank 0 reports."
    parser.add_argument(
        "--parts",
        type=choices(list(PARTS)),
        default=list(PARTS),
        help=f"names out of {', '.join(PARTS)} (default: all)",
    )
    parser.add_argument(
        "--codecs",
        type=choices(codecs.CODECS),
        default="raw,fp16",
        help=f"names out of {', '.join(codecs.CODECS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--largest",
        type=at_least(64),
        help="leaves out layers with a larger factor (default: 1200, --quick: 300; ResNet-50's largest is 4608)",
    )
    parser.add_argument("-n", "--iters", type=at_least(1), help="timed calls (default: 5, --quick: 2)")


def run(options: argparse.Namespace, progress: Progress, keep: Keep) -> None:
    largest = options.largest or (300 if options.quick else 1200)
    shapes = layers(largest)
    ranks = count_ranks(options.ranks, RANKS)
    numel = sum(size**2 for shape in shapes.values() for size in shape)
    ring = 2 * (ranks - 1) / ranks * 4 * numel
    table = Table(
        f"K-FAC, {len(shapes)} layers of ResNet-50 with factors of up to {largest}, {ranks} ranks, fp32",
        notes=[
            "a sample is one call after a barrier, on the slowest rank; the sides of a part are timed alternately",
            "factors: the means of all ranks, as triangles to their owners; the peer all-reduces the matrices",
            "inverses: from their owners to all ranks; the peer broadcasts each matrix",
            "inverting: the factors of all layers, on one rank",
            "preconditioning: a gradient of each layer, with inverses, or with eigenvectors as KAISA does by default",
            "#wrong: elements beyond the error of the encodings, or with other bits than on rank 0; on one rank, "
            "matrices that do not satisfy their equation within 1 %",
            "wire bytes: of one call, the largest over the ranks; factors and inverses are sent every "
            f"{INVERSE_STEPS} steps; KAISA's formula for its all-reduce of fp32 factors is {1e-6 * ring:.4g} MB, every "
            f"{FACTOR_STEPS} steps",
        ],
        check_heading="#wrong",
    )
    keep(table)

    def take(of_a_part: list[Result]) -> None:
        rows = [make_row(result) for result in of_a_part]
        peers = [row for row in rows if not row.ours]
        for row in rows:
            if row.ours:
                row.compare_with(peers[0])
        table.rows += rows

    job = Job(shapes, options.parts, options.codecs, options.iters or (2 if options.quick else 5))
    on_ranks(work, ranks, job, take=take, progress=progress, deadline=DEADLINE)


def layers(largest: int) -> dict[str, Shape]:
    """Return the layers of ResNet-50 by name; only the last one has a bias."""
    weights = [shape for shape in resnet50(quick=False) if len(shape) > 1]
    shapes = [(shape[0], math.prod(shape[1:]) + (len(shape) == 2)) for shape in weights]
    return {f"{number}: {o} x {i}": (o, i) for number, (o, i) in enumerate(shapes) if max(o, i) <= largest}


def make_row(result: Result) -> Row:
    row = Row(result.part, result.side, result.ours, result.wrong == 0, str(result.wrong), result.samples)
    if result.wire_bytes is not None:
        row.figures = {"wire bytes": result.wire_bytes}
    return row


def work(rank: int, ranks: int, progress: Progress, job: Job) -> Iterator[list[Result]]:
    """Yield the results of one part after the other, the same on all ranks."""
    owners = comm.Owners({name: sum(map(cost, shape)) for name, shape in job.shapes.items()}, workers=ranks)
    for index, part in enumerate(job.parts):

        def advance(done: float, index: int = index, part: str = part) -> None:
            progress(f"{part} on {ranks} ranks", (index + done) / len(job.parts))

        if part in ("factors", "inverses"):
            sides = exchanges(part, job, owners, rank, ranks)
        else:
            sides = inverting(job) if part == "inverting" else preconditioning(job)
            if rank > 0:  # one rank alone is timed
                sides = {name: side._replace(call=lambda: None, count_wrong=lambda: 0) for name, side in sides.items()}
        yield measure(part, sides, job.rounds, advance)
    owners.close()


def measure(part: str, sides: dict[str, Side], rounds: int, advance: Callable[[float], None]) -> list[Result]:
    wrong, sent = {}, {}
    for name, side in sides.items():
        side.call()
        (wrong[name],) = (round(count) for count in over_ranks([side.count_wrong()], "max"))
        sent[name] = None if side.wire_bytes is None else over_ranks([side.wire_bytes()], "max")[0]
    right = {name: side.call for name, side in sides.items() if not wrong[name]}
    samples = interleave(right, rounds=(rounds, rounds), warmup=0, before=lambda name: dist.barrier(), progress=advance)
    return [
        Result(
            part, name, side.ours, wrong[name], sent[name], over_ranks(samples[name], "max") if name in right else []
        )
        for name, side in sides.items()
    ]


# Exchanges.


def matrices(shape: Shape, rank: int) -> list[Tensor]:
    """Return symmetric matrices of whole numbers, whose sums are exact."""
    made = []
    for size in shape:
        numbers = torch.arange(size).view(-1, 1) + torch.arange(size)
        made.append(((7 * numbers + 13 * rank) % 251 - 125).float())
    return made


def packed(of_layer: list[Tensor]) -> Tensor:
    return torch.cat([pack(matrix) for matrix in of_layer])


def exchanges(part: str, job: Job, owners: comm.Owners, rank: int, ranks: int) -> dict[str, Side]:
    own = {name: matrices(shape, rank) for name, shape in job.shapes.items()}
    shapes = {name: (sum(map(packed_numel, shape)),) for name, shape in job.shapes.items()}
    found: dict[str, Tensor] = {}
    sent = 0

    def exchange(codec: str) -> None:
        nonlocal found, sent
        before = owners.stats()["wire_bytes"]
        if part == "factors":
            found = owners.reduce({name: packed(of_layer) for name, of_layer in own.items()}, codec)
        else:
            found = owners.share({name: packed(own[name]) for name in owners.owned}, shapes, codec)
        sent = owners.stats()["wire_bytes"] - before

    def count(codec: str) -> int:
        wrong = 0
        for name, result in found.items():
            if part == "factors":
                exact = sum(packed(matrices(job.shapes[name], each)) for each in range(ranks)) / ranks
            else:
                exact = packed(matrices(job.shapes[name], owners.owner[name]))
            wrong += count_wrong(result, exact, max(tolerance(codec, ranks, 126.0), 1e-4))
        if part == "inverses":
            whole = torch.cat([found[name] for name in job.shapes])
            wrong += count_wrong(whole, whole, 0, first_if_unlike(whole))
        return wrong

    copies = {name: [matrix.clone() for matrix in of_layer] for name, of_layer in own.items()}

    def torchs() -> None:
        for name, of_layer in copies.items():
            for matrix in of_layer:
                if part == "factors":
                    dist.all_reduce(matrix)
                    matrix.div_(ranks)
                else:
                    dist.broadcast(matrix, owners.owner[name])

    def count_torchs() -> int:
        wrong = 0
        for name, of_layer in copies.items():
            others = [matrices(job.shapes[name], each) for each in range(ranks)]
            for matrix, by_rank in zip(of_layer, zip(*others, strict=True), strict=True):
                exact = torch.stack(by_rank).mean(0) if part == "factors" else by_rank[owners.owner[name]]
                wrong += count_wrong(matrix, exact, 1e-4)
        return wrong

    sides = {
        f"ours, {codec}": Side(
            lambda codec=codec: exchange(codec), lambda codec=codec: count(codec), lambda: float(sent)
        )
        for codec in job.codecs
    }
    return {"gloo, matrices": Side(torchs, count_torchs, ours=False), **sides}


# The work of one rank.


def moments(job: Job) -> list[Tensor]:
    """Return the second moments of normal rows of unequal scales, with a mean diagonal of 1."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for size in (size for shape in job.shapes.values() for size in shape):
        rows = torch.randn(2 * size, size, generator=generator) * torch.logspace(0, -2, size)
        moment = rows.t() @ rows
        made.append(moment / moment.diagonal().mean())
    return made


def inverting(job: Job) -> dict[str, Side]:
    given = moments(job)
    found: list[Tensor] = []

    def damped(matrix: Tensor) -> Tensor:
        return matrix + DAMPING * torch.eye(len(matrix))

    def cholesky() -> None:
        nonlocal found
        found, _ = damped_inverses(given, [DAMPING] * len(given))

    def lu() -> None:
        nonlocal found
        found = [torch.linalg.inv(damped(matrix)) for matrix in given]

    def eigen() -> None:
        nonlocal found
        found = [part for matrix in given for part in torch.linalg.eigh(matrix)]

    def count() -> int:
        return sum(
            unlike(damped(matrix) @ inverse, torch.eye(len(matrix)))
            for matrix, inverse in zip(given, found, strict=True)
        )

    def count_eigen() -> int:
        return sum(
            unlike((vectors * values) @ vectors.t(), matrix)
            for matrix, values, vectors in zip(given, found[::2], found[1::2], strict=True)
        )

    return {
        "torch.linalg.inv": Side(lu, count, ours=False),
        "torch.linalg.eigh": Side(eigen, count_eigen, ours=False),
        "ours, Cholesky": Side(cholesky, count),
    }


def unlike(matrix: Tensor, expected: Tensor) -> bool:
    """Return whether a matrix is wrong: the error of a correct one is about the condition times the dtype's eps."""
    return bool(torch.linalg.norm(matrix - expected) > 1e-2 * torch.linalg.norm(expected))


def preconditioning(job: Job) -> dict[str, Side]:
    """Both sides have the same inverses, of matrices with random eigenvectors, and with eigenvalues from 1 to 2."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator) for shape in job.shapes.values()]
    vectors = [
        [torch.linalg.qr(torch.randn(size, size, generator=generator)).Q for size in shape]
        for shape in job.shapes.values()
    ]
    values = [[torch.linspace(1, 2, size) for size in shape] for shape in job.shapes.values()]
    inverses = [
        [(q / d) @ q.t() for q, d in zip(*of_layer, strict=True)] for of_layer in zip(vectors, values, strict=True)
    ]
    quotients = [1 / torch.outer(g, a) for g, a in values]
    found: list[Tensor] = []

    def products() -> None:
        nonlocal found
        found = [g @ gradient @ a for gradient, (g, a) in zip(gradients, inverses, strict=True)]

    def eigen() -> None:
        nonlocal found
        found = [
            g @ ((g.t() @ gradient @ a) * quotient) @ a.t()
            for gradient, (g, a), quotient in zip(gradients, vectors, quotients, strict=True)
        ]

    def count() -> int:
        return sum(
            unlike(torch.linalg.solve(g, torch.linalg.solve(a, result, left=False)), gradient)
            for result, gradient, (g, a) in zip(found, gradients, inverses, strict=True)
        )

    return {"eigenvectors": Side(eigen, count, ours=False), "ours, inverses": Side(products, count)}
