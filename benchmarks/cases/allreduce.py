"""comm.all_reduce with any algorithm and codec, against Gloo's or NCCL's; over loopback, or on torchrun's ranks."""

import argparse
from collections.abc import Sequence

import torch

from benchmarks import cupy_peers, deepspeed_peer
from benchmarks.allreduce_ranks import BURST_BYTES, CUPY, DEADLINE, DEEPSPEED, PEERS, SMALL, Job, Result, Side, work
from benchmarks.harness import Failure, Keep, Progress, Row, Table, at_least, choices
from benchmarks.machine import link_probe
from benchmarks.machine.ranks import count_ranks, given_rank, on_ranks
from dltrain_ext import codecs, comm

OVERVIEW = ["-b", "4K", "-f", "64", "-n", "10", "-w", "2", "--algorithms", "auto", "--codecs", "raw,fp16,int8"]
RANKS = 4
DEFAULT = {"cpu": [*comm.ALGORITHMS, "auto"], "cuda": [*comm.ALGORITHMS, "auto", "native"]}
ALGORITHMS = [*comm.ALGORITHMS, "auto", "butterfly", "native"]
TRANSPORTS = {"cpu": ["auto", "shm", "gloo"], "cuda": ["auto", "nccl", "c10d"]}
NARROW_PEERS = {"cpu": ["fp16"], "cuda": ["fp16", "bf16"]}
RAW_ALONE = [*(name for name in comm.ALGORITHMS if name not in comm.algorithms_for("int8")), "native"]


def size(text: str) -> int:
    """Convert 4096, 4K, 16M or 1G (powers of 1024) to bytes."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
    if not number.isdecimal() or unit not in units or int(number) * units[unit] % 4 or int(number) == 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: expected whole fp32 elements in bytes, such as 4096, 4K, 16M or 1G"
        )
    return int(number) * units[unit]


def label(nbytes: int) -> str:
    exponent = min(3, (nbytes.bit_length() - 1) // 10)
    return f"{nbytes / 1024**exponent:.4g} {['B', 'KiB', 'MiB', 'GiB'][exponent]}"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "If torchrun's variables (RANK, WORLD_SIZE, ...) are set, it runs as that rank; rank 0 reports."
    parser.add_argument("-b", "--begin", type=size, default="4K", help="smallest message (default: %(default)s)")
    parser.add_argument("-e", "--end", type=size, default="16M", help="largest message (default: %(default)s)")
    parser.add_argument("-f", "--factor", type=at_least(2), help="ratio of two sizes (default: 4, --quick: 1024)")
    parser.add_argument("-n", "--iters", type=at_least(1), help="timed calls per size (default: 40, --quick: 8)")
    parser.add_argument("-w", "--warmup", type=at_least(0), help="calls before the timed ones (default: 5, --quick: 2)")
    parser.add_argument(
        "--algorithms",
        type=choices(ALGORITHMS),
        help=f"names out of {', '.join(ALGORITHMS)} (default: all plans and auto; on CUDA also native)",
    )
    parser.add_argument(
        "--codecs",
        type=choices(codecs.CODECS),
        help=f"names out of {', '.join(codecs.CODECS)} (default: raw; --quick: also int8 with ring)",
    )
    parser.add_argument(
        "--levels", type=choices(["1", "2"]), help="1, 2 or 1,2 (default: 1, and 2 if each host has several ranks)"
    )
    parser.add_argument(
        "--ranks-per-host", type=at_least(1), help="treat so many neighbouring ranks as a host (default: detect hosts)"
    )
    parser.add_argument(
        "--transport",
        type=choices(list(dict.fromkeys(name for names in TRANSPORTS.values() for name in names))),
        help="what carries our messages: one or several of auto, shm and gloo, on CUDA auto, nccl and c10d (default: "
        "auto)",
    )
    parser.add_argument(
        "--burst",
        type=at_least(1),
        default=20,
        help="most calls that are one sample; in long ones it matters less that ranks do not begin at the same time "
        "(default: %(default)s)",
    )
    parser.add_argument("--segments", type=at_least(1), help="segments of a message (default: depends on its size)")
    parser.add_argument("--tune", action="store_true", help="measure the group first, and let auto use the result")
    parser.add_argument("--op", choices=["sum", "avg"], default="sum", help="reduction (default: %(default)s)")


def run(options: argparse.Namespace, progress: Progress, keep: Keep) -> None:
    if options.begin > options.end:
        raise Failure(f"-b {options.begin} is above -e {options.end}")
    sizes = [options.begin]
    while (following := sizes[-1] * (options.factor or (1024 if options.quick else 4))) <= options.end:
        sizes.append(following)
    ranks = count_ranks(options.ranks, RANKS)
    algorithms = options.algorithms or DEFAULT[options.device]
    for algorithm in set(algorithms) & set(comm.ALGORITHMS):
        try:
            comm.verify(algorithm, ranks)
        except Exception as error:
            raise Failure(f"the plan {algorithm} for {ranks} ranks is wrong: {error}") from error
    job = Job(
        sizes,
        make_sides(options, algorithms),
        options.op,
        rounds=options.iters or (8 if options.quick else 40),
        warmup=options.warmup if options.warmup is not None else (2 if options.quick else 5),
        segments=options.segments,
        device=options.device,
        ranks_per_host=options.ranks_per_host,
        needs_hosts=bool(options.levels) or (options.ranks_per_host or 1) > 1,
        burst=options.burst,
        tuned=options.tune,
    )
    where = "on one host" if options.device == "cpu" else f"on {min(ranks, torch.cuda.device_count())} GPU(s)"
    title = f"all_reduce {options.op}, {ranks} ranks {'under torchrun' if given_rank() else where}, fp32"
    table = Table(title, check_heading="#wrong", x_label="message, bytes")
    keep(table)
    results: list[Result] = []

    def take(of_a_size: list[Result]) -> None:
        results.extend(of_a_size)
        rows = [make_row(result, ranks, options.device) for result in of_a_size]
        pair(rows, of_a_size)
        if options.tune:
            compare_selections(rows, of_a_size)
        table.rows += rows

    try:
        on_ranks(work, ranks, job, take=take, progress=progress, deadline=DEADLINE)
    finally:  # also if the run was interrupted
        table.rows += left_out(options.device)
        table.notes += make_notes(options, algorithms, list(dict.fromkeys(result.side for result in results)))
        table.notes += link_probe.note([result.line for result in results])


def make_sides(options: argparse.Namespace, algorithms: Sequence[str]) -> list[Side]:
    """Return the peers, and our valid combinations of algorithm and codec, with one level and with two."""
    if foreign := set(options.transport or []).difference(TRANSPORTS[options.device]):
        raise Failure(
            f"--transport: expected names out of {', '.join(TRANSPORTS[options.device])}, got {foreign.pop()}"
        )
    names = options.codecs or ["raw"]
    pairs = [(name, codec) for codec in names for name in algorithms if codec == "raw" or name not in RAW_ALONE]
    if options.quick and not options.codecs and "ring" in algorithms:
        pairs.append(("ring", "int8"))
    if not pairs:
        raise Failure(f"these algorithms only take the codec raw: {', '.join(algorithms)}")
    narrow = NARROW_PEERS[options.device] if any(codec != "raw" for codec in names) else []
    peers = [Side(PEERS[options.device], codec) for codec in ("raw", *narrow)]
    if options.device == "cuda" and not cupy_peers.why_not():
        peers.append(Side(CUPY))
    if options.device == "cpu" and not why_not_deepspeed():
        peers.append(Side(DEEPSPEED))
    return peers + [
        Side(*pair, transport, int(levels))
        for pair in pairs
        for transport in options.transport or ["auto"]
        for levels in options.levels or ["1", "2"]
    ]


def why_not_deepspeed() -> str:
    return "its ranks have to be on one host" if given_rank() else deepspeed_peer.why_not()


def left_out(device: str) -> list[Row]:
    """Return the rows of the peers that cannot run here."""
    if device == "cpu":
        missing = [Row.missing(peer, "needs --device cuda") for peer in (PEERS["cuda"], CUPY)]
        return missing + ([Row.missing(DEEPSPEED, why)] if (why := why_not_deepspeed()) else [])
    return [Row.missing(CUPY, why)] if (why := cupy_peers.why_not()) else []


def make_notes(options: argparse.Namespace, algorithms: Sequence[str], sides: Sequence[Side]) -> list[str]:
    peer = PEERS[options.device]
    notes = [
        f"a sample is the mean of some calls after a barrier, on the slowest rank: at most {options.burst}, of "
        f"{BURST_BYTES >> 20} MiB together, or a single one",
        "algbw = S / t, busbw = algbw * 2(p - 1) / p, as nccl-tests defines them (its doc/PERFORMANCE.md); S in fp32",
        "#wrong: number of elements that differ from the sum, which is exact in any order, or in a bit from those of "
        "rank 0; summed over all ranks, in the check before the timing and after every sample",
        f"wire bytes: bytes that one rank sends in one call, the largest over the ranks; {peer} does not report them",
        "the message is written anew before every call, as a gradient bucket is",
    ]
    if any(side.levels == 2 for side in sides):
        notes.append("2 levels: reduced within each host, then between hosts; wire bytes are those between hosts only")
    if options.tune:
        notes.append("of the best: the time of the fastest plan timed by name, over the time of the tuned auto")
    if any(side.algorithm == CUPY for side in sides):
        notes.append(cupy_peers.NOT_RUN)
    if options.device == "cuda":
        notes += [
            f"us/tick: the time of a call with one level over the rounds of its plan, up to {SMALL >> 10} KiB",
            "NCCL treats ranks that share a GPU as separate hosts, and connects them by sockets",
        ]
    if any(side.codec != "raw" for side in sides):
        notes += [
            "#wrong with a codec: elements whose error exceeds (p + 1) * codecs.error_bound(codec).max + 1e-5, times "
            "the sum of the ranks' largest magnitudes",
            "codec error: rms error over the rms of the exact sum; the contributions are normally distributed",
        ]
    if narrow := [side.name for side in sides if not side.ours and side.codec != "raw"]:
        notes.append(
            f"{', '.join(narrow)}: converted, all-reduced, and converted back, as torch's fp16_compress_hook does"
        )
        if left_out := [name for name in algorithms if name in RAW_ALONE]:
            notes.append(f"these algorithms only take the codec raw: {', '.join(left_out)}")
    return notes


def make_row(result: Result, ranks: int, device: str) -> Row:
    side, right = result.side, result.wrong == 0
    name = side.name + (f": {result.chosen}" if result.chosen else "")
    row = Row(label(result.nbytes), name, side.ours, right, str(result.wrong), result.samples, x=result.nbytes)
    if row.time:
        algbw = result.nbytes / 1e9 / row.time.median
        row.figures = {"algbw GB/s": algbw, "busbw GB/s": algbw * 2 * (ranks - 1) / ranks}
        if device == "cuda" and result.nbytes <= SMALL and (rounds := rounds_of(side, ranks)):
            row.figures["us/tick"] = 1e6 * row.time.median / rounds
    row.figures["wire bytes"] = result.wire_bytes
    if row.time:
        row.figures |= link_probe.share(result.wire_bytes, row.time.median, result.line)
    if result.error is not None:
        row.figures["codec error"] = result.error
    return row


def pair(rows: Sequence[Row], results: Sequence[Result]) -> None:
    """Compare ours with the peer in fp32, and the peers in another type with our first side in that type."""
    codec = [result.side.codec for result in results]
    ours = {name: row for name, row in zip(reversed(codec), reversed(rows), strict=True) if row.ours}
    first, *others = rows
    for row, name in zip(others, codec[1:], strict=True):
        if row.ours:
            row.compare_with(first)
        elif name in ours:
            row.compare_with(ours[name])


def compare_selections(rows: Sequence[Row], results: Sequence[Result]) -> None:
    """Compare auto with the plans that were timed by name, with the same codec and levels."""
    timed = [(row, result.nbytes, result.side) for row, result in zip(rows, results, strict=True) if row.time]
    for auto, nbytes, side in timed:
        if side.algorithm == "auto" and auto.time:
            named = [
                row.time.median
                for row, size, other in timed
                if row.time and size == nbytes and other.algorithm in comm.ALGORITHMS
                if other == side._replace(algorithm=other.algorithm)
            ]
            auto.figures["of the best"] = min(named) / auto.time.median if named else None


def rounds_of(side: Side, ranks: int) -> int:
    """Return the rounds of the plan that a side runs with one level; 0 if it does not run one known plan."""
    if side.levels != 1 or side.algorithm not in comm.ALGORITHMS:
        return 0
    return len(comm.plan(side.algorithm, 0, ranks).rounds)
