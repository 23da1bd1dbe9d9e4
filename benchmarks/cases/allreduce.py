"""comm.all_reduce, by any algorithm and codec, against Gloo's dist.all_reduce: over loopback, or torchrun's ranks."""

import argparse

from benchmarks.allreduce_ranks import BURST, DEADLINE, GLOO, SMALL, Job, Result, Side, work
from benchmarks.harness import Failure, Progress, Row, Spread, Table, at_least, choices
from benchmarks.ranks import given_rank, join_ranks, run_ranks
from dltrain_ext import codecs, comm

DEVICES = ("cpu",)
NO_DEVICE = "it runs over Gloo on the CPU, and NCCL comes later"
DEFAULT = [*comm.ALGORITHMS, "auto"]
ALGORITHMS = [*DEFAULT, "butterfly", "native"]
RAW_ALONE = [*(name for name in comm.ALGORITHMS if comm.plan(name, 0, 1).exact), "native"]


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
    parser.epilog = "Under torchrun's variables (RANK, WORLD_SIZE, ...) it runs as that rank; rank 0 reports."
    parser.add_argument("-b", "--begin", type=size, default="4K", help="smallest message (default %(default)s)")
    parser.add_argument("-e", "--end", type=size, default="16M", help="largest message (default %(default)s)")
    parser.add_argument("-f", "--factor", type=at_least(2), help="from one size to the next (default 4, --quick: 1024)")
    parser.add_argument("-n", "--iters", type=at_least(1), help="timed calls per size (default 40, --quick: 8)")
    parser.add_argument("-w", "--warmup", type=at_least(0), help="calls before them (default 5, --quick: 2)")
    parser.add_argument("--ranks", type=at_least(1), help="processes (default 4; under torchrun WORLD_SIZE)")
    parser.add_argument(
        "--algorithms",
        type=choices(ALGORITHMS),
        default=DEFAULT,
        help=f"out of {', '.join(ALGORITHMS)}; default all plans and auto",
    )
    parser.add_argument(
        "--codecs",
        type=choices(codecs.CODECS),
        help=f"out of {', '.join(codecs.CODECS)}; default raw (--quick: and int8 by ring)",
    )
    parser.add_argument("--segments", type=at_least(1), help="pieces of a message (default: chosen by its size)")
    parser.add_argument("--op", choices=["sum", "avg"], default="sum", help="default %(default)s")


def run(options: argparse.Namespace, progress: Progress) -> Table:
    if options.begin > options.end:
        raise Failure(f"-b {options.begin} is above -e {options.end}")
    sizes = [options.begin]
    while (following := sizes[-1] * (options.factor or (1024 if options.quick else 4))) <= options.end:
        sizes.append(following)
    given = given_rank()
    if given and options.ranks not in (None, given.ranks):
        raise Failure(f"--ranks {options.ranks} contradicts WORLD_SIZE={given.ranks}")
    ranks = given.ranks if given else options.ranks or 4
    for algorithm in set(options.algorithms) & set(comm.ALGORITHMS):
        try:
            comm.verify(algorithm, ranks)
        except Exception as error:
            raise Failure(f"the plan {algorithm} for {ranks} ranks is wrong: {error}") from error
    iters = options.iters or (8 if options.quick else 40)
    warmup = options.warmup if options.warmup is not None else (2 if options.quick else 5)
    job = Job(sizes, make_sides(options), options.op, iters, warmup, options.segments)
    if given:
        results = join_ranks(work, given, job, progress=progress, deadline=DEADLINE)
    else:
        results = run_ranks(work, ranks, job, progress=progress, deadline=DEADLINE)
    gloo = {result.nbytes: result.samples for result in results if result.side == Side(GLOO)}
    title = f"all_reduce {options.op}, {ranks} ranks {'under torchrun' if given else 'over loopback'}, fp32"
    rows = [make_row(result, gloo[result.nbytes], ranks) for result in results]
    return Table(title, rows, make_notes(options, job.sides), check_heading="#wrong", x_label="message, bytes")


def make_sides(options: argparse.Namespace) -> list[Side]:
    """Gloo, and those combinations of algorithm and codec that there are."""
    names = options.codecs or ["raw"]
    sides = [Side(GLOO), Side(GLOO, "fp16")] if any(codec != "raw" for codec in names) else [Side(GLOO)]
    for codec in names:
        sides += [Side(name, codec) for name in options.algorithms if codec == "raw" or name not in RAW_ALONE]
    if options.quick and not options.codecs and "ring" in options.algorithms:
        sides.append(Side("ring", "int8"))
    if not any(side.ours for side in sides):
        raise Failure(f"no codec but raw: {', '.join(options.algorithms)}")
    return sides


def make_notes(options: argparse.Namespace, sides: list[Side]) -> list[str]:
    notes = [
        f"a barrier, then one call (up to {SMALL >> 10} KiB: {BURST}, back to back); the slowest rank counts",
        "algbw = S / t, busbw = algbw * 2(p - 1) / p, as nccl-tests defines them (its doc/PERFORMANCE.md); S in fp32",
        "#wrong: elements that differ (!=) from a sum that is exact in any order, or in a bit from rank 0's; over all "
        "ranks, in the check before the timing and after every sample",
        "wire bytes: sent by one rank in one call, the largest over the ranks; Gloo does not tell",
        "every call finds its message freshly written, as a gradient bucket is",
    ]
    if any(side.codec != "raw" for side in sides):
        notes += [
            "#wrong with a codec: beyond (p + 1) times codecs.error_bound's max, plus 1e-5, of the sum of the ranks' "
            "largest magnitudes",
            "codec error: its rms over that of the exact sum, of normally distributed contributions",
        ]
    if Side(GLOO, "fp16") in sides:
        notes.append("gloo fp16: converted, all-reduced in fp16, converted back, as torch's fp16_compress_hook does")
        if left_out := [name for name in options.algorithms if name in RAW_ALONE]:
            notes.append(f"no codec but raw: {', '.join(left_out)}")
    return notes


def make_row(result: Result, gloo: list[float], ranks: int) -> Row:
    exponent = min(3, (result.nbytes.bit_length() - 1) // 10)
    label = f"{result.nbytes / 1024**exponent:.4g} {['B', 'KiB', 'MiB', 'GiB'][exponent]}"
    side, right = result.side, result.wrong == 0
    row = Row(label, side.name, side.ours, right, str(result.wrong), result.samples, x=result.nbytes)
    if row.time:
        algbw = result.nbytes / 1e9 / row.time.median
        row.figures = {"algbw GB/s": algbw, "busbw GB/s": algbw * 2 * (ranks - 1) / ranks}
        if side.ours and gloo:
            row.ratio = Spread.of(gloo).median / row.time.median
    row.figures["wire bytes"] = result.wire_bytes
    if result.error is not None:
        row.figures["codec error"] = result.error
    return row
