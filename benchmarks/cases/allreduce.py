"""comm.all_reduce, by every algorithm, against dist.all_reduce on Gloo: p processes over loopback (fp32, in place)."""

import argparse
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.harness import Failure, Progress, Row, Spread, Table, at_least, choices, interleave
from benchmarks.ranks import run_ranks
from dltrain_ext import comm

DEVICES = ("cpu",)
NO_DEVICE = "it runs over Gloo on the CPU, and NCCL comes later"
GLOO = "gloo"
ALGORITHMS = [*comm.ALGORITHMS, "auto"]
DEADLINE = 60.0


class Job(NamedTuple):
    sizes: list[int]
    algorithms: list[str]
    op: str
    rounds: int
    warmup: int


class Result(NamedTuple):
    """One side at one size. Counts are over all ranks; `samples` is empty where a result was wrong."""

    nbytes: int
    side: str
    wrong: int
    wire_bytes: int | None
    samples: list[float]


def size(text: str) -> int:
    """Bytes out of 4096, 4K, 16M or 1G (powers of 1024)."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
    if not number.isdecimal() or unit not in units or int(number) * units[unit] % 4 or int(number) == 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: whole fp32 elements in bytes, as 4096, 4K, 16M or 1G"
        )
    return int(number) * units[unit]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-b", "--begin", type=size, default="4K", help="smallest message (default %(default)s)")
    parser.add_argument("-e", "--end", type=size, default="16M", help="largest message (default %(default)s)")
    parser.add_argument("-f", "--factor", type=at_least(2), help="from one size to the next (default 4, --quick: 64)")
    parser.add_argument("-n", "--iters", type=at_least(1), help="timed calls per size (default 40, --quick: 8)")
    parser.add_argument("-w", "--warmup", type=at_least(0), help="calls before them (default 5, --quick: 2)")
    parser.add_argument("--ranks", type=at_least(1), default=4, help="processes (default %(default)s)")
    parser.add_argument(
        "--algorithms", type=choices(ALGORITHMS), default=ALGORITHMS, help=f"out of {', '.join(ALGORITHMS)}"
    )
    parser.add_argument("--op", choices=["sum", "avg"], default="sum", help="default %(default)s")


def run(options: argparse.Namespace, progress: Progress) -> Table:
    if options.begin > options.end:
        raise Failure(f"-b {options.begin} is above -e {options.end}")
    sizes = [options.begin]
    while (following := sizes[-1] * (options.factor or (64 if options.quick else 4))) <= options.end:
        sizes.append(following)
    for algorithm in options.algorithms:
        if algorithm != "auto":
            try:
                comm.verify(algorithm, options.ranks)
            except Exception as error:
                raise Failure(f"the plan {algorithm} for {options.ranks} ranks is wrong: {error}") from error
    iters = options.iters or (8 if options.quick else 40)
    warmup = options.warmup if options.warmup is not None else (2 if options.quick else 5)
    job = Job(sizes, options.algorithms, options.op, iters, warmup)
    results = run_ranks(work, options.ranks, job, progress=progress, deadline=DEADLINE)
    gloo = {result.nbytes: result.samples for result in results if result.side == GLOO}
    notes = [
        "a barrier, then one call; its time is the largest over the ranks",
        "algbw = S / t, busbw = algbw * 2(p - 1) / p, as nccl-tests defines them (its doc/PERFORMANCE.md)",
        "#wrong: elements that differ (!=) from a sum that is exact in any order; over all ranks, in the check before "
        "the timing and in every call of it",
        "wire bytes: sent by one rank in one call, the largest over the ranks; Gloo does not tell",
        "every call finds its message freshly written, as a gradient bucket is",
    ]
    title = f"all_reduce {options.op}, {options.ranks} ranks over loopback, fp32"
    rows = [make_row(result, gloo[result.nbytes], options.ranks) for result in results]
    return Table(title, rows, notes, check_heading="#wrong", x_label="message, bytes")


def make_row(result: Result, gloo: list[float], ranks: int) -> Row:
    exponent = min(3, (result.nbytes.bit_length() - 1) // 10)
    label = f"{result.nbytes / 1024**exponent:.4g} {['B', 'KiB', 'MiB', 'GiB'][exponent]}"
    ours = result.side != GLOO
    row = Row(label, result.side, ours, result.wrong == 0, str(result.wrong), result.samples, x=result.nbytes)
    if row.time:
        algbw = result.nbytes / 1e9 / row.time.median
        row.figures = {"algbw GB/s": algbw, "busbw GB/s": algbw * 2 * (ranks - 1) / ranks}
        if ours and gloo:
            row.ratio = Spread.of(gloo).median / row.time.median
    row.figures["wire bytes"] = result.wire_bytes
    return row


def work(rank: int, ranks: int, progress: Progress, job: Job) -> list[Result]:
    """What each rank runs; the results are the same on all of them."""
    communicator = comm.Communicator(timeout=timedelta(seconds=DEADLINE / 2))
    results: list[Result] = []
    for index, nbytes in enumerate(job.sizes):

        def advance(done: float, index: int = index, nbytes: int = nbytes) -> None:
            progress(f"{nbytes} bytes on {ranks} ranks", (index + done) / len(job.sizes))

        results += measure(rank, ranks, nbytes // 4, communicator, job, advance)
    return results


def measure(
    rank: int, ranks: int, n: int, communicator: comm.Communicator, job: Job, advance: Callable[[float], None]
) -> list[Result]:
    # Small whole numbers; times the ranks for an average, so that their mean is whole as well.
    pattern = torch.arange(n)
    parts = [((pattern * 7 + 13 * r) % 251 - 125).float() for r in range(ranks)]
    source = parts[rank] * (ranks if job.op == "avg" else 1)
    expected = torch.stack(parts).sum(0)
    message = torch.empty(n)

    def call_gloo() -> None:
        dist.all_reduce(message)
        if job.op == "avg":
            message.div_(ranks)

    sides: dict[str, Callable[[], object]] = {GLOO: call_gloo}
    for algorithm in job.algorithms:
        sides[algorithm] = lambda algorithm=algorithm: communicator.all_reduce(message, job.op, algorithm=algorithm)
    wrong = dict.fromkeys(sides, 0)

    def before(side: str) -> None:
        message.copy_(source)
        dist.barrier()

    def after(side: str) -> None:
        wrong[side] += int(torch.count_nonzero(message != expected))

    wire_bytes = []
    for side, call in sides.items():
        advance(0.0)
        before(side)
        already = communicator.stats()["wire_bytes"]
        call()
        after(side)
        wire_bytes.append(communicator.stats()["wire_bytes"] - already)
    right = [side for side, count in zip(sides, over_ranks(list(wrong.values()), "sum"), strict=True) if not count]
    timed = interleave(
        {side: sides[side] for side in right},
        rounds=(job.rounds, job.rounds),
        warmup=job.warmup,
        before=before,
        after=after,
        progress=advance,
    )
    slowest = {side: over_ranks(samples, "max") for side, samples in timed.items()}
    totals = over_ranks(list(wrong.values()), "sum")
    most_sent = over_ranks(wire_bytes, "max")
    return [
        Result(4 * n, side, int(count), None if side == GLOO else int(sent), [] if count else slowest[side])
        for side, count, sent in zip(sides, totals, most_sent, strict=True)
    ]


def over_ranks(values: list[float], how: str) -> list[float]:
    """Element by element over the ranks, by Gloo itself."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}[how])
    return tensor.tolist()
