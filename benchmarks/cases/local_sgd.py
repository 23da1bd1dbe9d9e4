"""Training over slow links: the time that DiLoCo computes, bytes, bursts, work and faults, against other ways."""

import argparse
import contextlib
import math
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import local_sgd_slow, local_sgd_work, saved_results
from benchmarks.harness import Failure, Keep, Progress, Row, Spread, Table, at_least, choices
from benchmarks.local_sgd_faults import SENDING, TRAINING, Fault, Outcome
from benchmarks.local_sgd_ranks import DEADLINE, FEW, PAUSE, WINDOW, Calibration, Job, Result, median, work
from benchmarks.local_sgd_sides import ALONE, AVERAGER, DDP, HIVEMIND, LAYERS, OURS, TORCHFT, Side, why_not
from benchmarks.machine import namespaces
from benchmarks.machine.ranks import count_ranks, given_rank, on_ranks
from benchmarks.machine.signals import catch_signals
from benchmarks.sweep import Listener, rates
from dltrain_ext import codecs

PARTS = ["share", "bytes", "burst", "peers", "work", "faults", "slow_site"]
TRAINED = PARTS[:4]  # those that are measured while ranks train
RATES = ["100mbit", "10mbit"]
OVERVIEW = ["--rate", "none", "--elements", "100000", "--sync-every", "20", "--delay", "2", "--milliseconds", "5",
            "--turns", "1", "--only", "share,bytes,burst,peers,work"]  # fmt: skip
NOTES = [
    "a sample is the mean time of an inner step in one turn, on the slowest rank; a turn is as many rounds of "
    f"sync_every steps as --rounds, or {FEW} steps of DDP; the sides are timed in turns, each made anew",
    "computing %: time of no averaging / time; not waiting %: 1 - the time in which training stood still / time, mean "
    "of the ranks (without a delay encoding is a part of that time)",
    "main ms: what an outer step takes of the thread that trains, without waiting; without a delay: without encoding",
    "bytes/step: that left a host's interface, with headers, mean of the ranks (over loopback: a rank's share of all); "
    "DDP bytes: those of DDP, fp32 / these",
    f"burst MB: the most that left the last host between two pauses of {PAUSE} s; peak MB: within {WINDOW} s",
    "hivemind: the time in which it finds the others, 5 s or more, is a part of the average, as training stands still",
    "#wrong: elements of a small model that differ from exact averages by torch by more than the codec loses, or "
    "between the ranks in a bit; error: rms error over the rms of what the parameters have moved, before the timing",
]
FAULT_NOTE = (
    "faults: the last rank is killed by SIGKILL. A sample is the time from the kill until inner.step() raised on the "
    "last survivor; noticed s: from its own departure to the average if that was later; recover s: of recover(); next "
    "s: from the error until the next outer step was complete. #wrong: survivors that did not name the rank, or differ "
    "afterwards"
)
SLOW_NOTE = (
    f"slow_site: over loopback, what comes before inner.step() takes {1e3 * local_sgd_slow.STEP:g} ms on all sites, "
    f"{local_sgd_slow.SLOWER} times as long on the last one, and is mostly slept; digits, 4,810 parameters, delay "
    f"{local_sgd_slow.DELAY}. A sample is the mean time of an inner step of the others in one turn; versions/s: outer "
    "steps in a second; loss, accuracy: of the held-out digits, with the parameters that the first site had after its "
    "last outer step within the turn, whose time is the same for all sides (median, quartiles; a loss is "
    f"{local_sgd_slow.MOST:g} at most). #wrong: elements that differ between the sites afterwards"
)
WORK_NOTE = (
    "outer step: encode backup - parameter, decode, momentum, backup and parameter, in one process, without a network; "
    "ours in two passes, torch by _foreach_sub, SGD(foreach, nesterov) and _foreach_copy_; resident, peak: bytes per "
    "parameter beside the parameters themselves, between outer steps and during one"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "As root, with iproute2, the ranks are on emulated hosts with links of each rate, except for --quick; "
        "otherwise over loopback. If torchrun's variables (RANK, WORLD_SIZE, ...) are set, it runs as that rank."
    )
    parser.add_argument(
        "--only", type=choices(PARTS), default=PARTS, help=f"names out of {', '.join(PARTS)} (default: all)"
    )
    parser.add_argument("--hosts", type=at_least(2), help="number of hosts, or of ranks (default: --ranks, else 4)")
    parser.add_argument(
        "--rate", type=rates, help=f"rates of each host's link; none: loopback (default: {','.join(RATES)})"
    )
    parser.add_argument(
        "--elements",
        type=at_least(1000),
        help=f"parameters of the model, in {LAYERS} equal layers (default: 10 million; work: also 100 million)",
    )
    parser.add_argument("--sync-every", type=at_least(1), help="steps of a round (default: 100, --quick: 8)")
    parser.add_argument("--fragments", type=at_least(1), default=4, help="parts of the model (default: %(default)s)")
    parser.add_argument("--delay", type=at_least(0), help="steps while a part is under way (default: by the rate)")
    parser.add_argument(
        "--codecs",
        type=choices(codecs.CODECS),
        default="int4,raw",
        help="the first one also with fragments and a delay (default: %(default)s)",
    )
    parser.add_argument("--milliseconds", type=at_least(1), help="time of an inner step (default: 100, --quick: 3)")
    parser.add_argument("--rounds", type=at_least(1), help="rounds in a turn (default: 2, --quick: 1)")
    parser.add_argument(
        "--turns",
        type=at_least(1),
        help="turns, and times that a rank is lost (default: 3, slow_site: 5, --quick: 1)",
    )
    parser.add_argument("--threads", type=at_least(1), help="threads of the work (default: 1 and 2)")


def run(options: argparse.Namespace, progress: Progress, keep: Keep) -> None:
    settle(options)
    ranks = count_ranks(options.ranks or options.hosts, 4)
    table = Table(
        f"Training over slow links, {ranks} ranks, {options.width**2 * LAYERS:,} parameters, averages every "
        f"{options.sync_every} steps",
        notes=[*(NOTES if set(TRAINED) & {*options.only} else [])],
        check_heading="#wrong",
    )
    about = {"faults": FAULT_NOTE, "slow_site": SLOW_NOTE, "work": WORK_NOTE}
    table.notes += [note for part, note in about.items() if part in options.only]
    if often := [part for part in ("faults", "slow_site") if part in options.only]:
        table.notes.append(f"{', '.join(often)}: averages every {few_steps(options)} steps")
    keep(table)
    if "work" in options.only and not given_rank():
        table.rows += work_rows(options, progress)
    if "slow_site" in options.only and not given_rank():
        add_slow_rows(options, ranks, table, progress)
    if not {*TRAINED, "faults"} & {*options.only}:
        return
    if options.rate and not given_rank():
        for index, rate in enumerate(options.rate):
            run_on_hosts(options, ranks, rate, table, Shown(progress, rate, index / len(options.rate)))
    else:
        run_here(options, ranks, table, progress)


def settle(options: argparse.Namespace) -> None:
    """Set what depends on other options."""
    quick = options.quick
    options.sync_every = options.sync_every or (8 if quick else 100)
    if options.sync_every % options.fragments:
        raise Failure(f"--sync-every {options.sync_every}: expected a multiple of --fragments {options.fragments}")
    options.milliseconds = options.milliseconds or (3 if quick else 100)
    options.rounds = options.rounds or (1 if quick else 2)
    options.slow_turns = options.turns or (1 if quick else 5)
    options.turns = options.turns or (1 if quick else 3)
    options.width = math.isqrt((options.elements or (40_000 if quick else 10_000_000)) // LAYERS)
    if options.rate is None and not quick and not given_rank():
        with contextlib.suppress(Failure):
            namespaces.check_tools()
            options.rate = RATES
    if options.rate == ["none"]:
        options.rate = None
    if options.delay is not None and options.delay >= options.sync_every // options.fragments:
        raise Failure(f"--delay {options.delay}: expected less than --sync-every / --fragments")


def delay_for(options: argparse.Namespace, ranks: int, rate: str | None) -> int:
    """Return the steps in which the mean of a fragment arrives, with a half more; as many as there can be, or fewer."""
    most = options.sync_every // options.fragments - 1
    if options.delay is not None:
        return int(options.delay)
    if not rate:
        return min(most, 2)
    of_fragment = -(-LAYERS // options.fragments) * options.width**2
    nbytes = 2 * (ranks - 1) / ranks * codecs.nbytes(options.codecs[0], of_fragment)
    return min(most, math.ceil(1.5 * 8e3 * nbytes / namespaces.bits(rate) / options.milliseconds))


def sides_of(options: argparse.Namespace, delay: int) -> list[Side]:
    """Return the sides that the parts need; each is measured once."""
    parts, first = {*options.only}, options.codecs[0]
    found: list[Side] = []
    if parts & {"share", "peers"}:
        found.append(Side(ALONE))
    if parts & {*TRAINED}:
        found.append(Side(OURS, first, options.fragments, delay, ours=True))
    if parts & {"share", "burst"}:
        found += [Side(OURS, codec, ours=True) for codec in options.codecs]
    if parts & {"bytes", "peers"}:
        found += [Side(DDP), Side(DDP, first, ours=True)]
    if "peers" in parts:
        found += [Side(AVERAGER), Side(TORCHFT), Side(TORCHFT, "raw", options.fragments, delay), Side(HIVEMIND)]
    return list(dict.fromkeys(found))


def few_steps(options: argparse.Namespace) -> int:
    """Return the steps between two averages where ranks are lost, or a site is slow."""
    return 4 if options.quick else 10


def faults_of(options: argparse.Namespace) -> list[Fault]:
    if "faults" not in options.only:
        return []
    every = few_steps(options)
    found = [Fault(when, every, delay, options.turns) for delay in (0, every // 2) for when in (TRAINING, SENDING)]
    return found[:1] if options.quick else found


def run_here(options: argparse.Namespace, ranks: int, table: Table, progress: Progress) -> None:
    """Run as one of torchrun's ranks, or over loopback."""
    rate = options.rate[0] if options.rate else None
    sides = sides_of(options, delay_for(options, ranks, rate))
    absent = {side: why for side in sides if (why := why_not(side))}
    job = Job(
        [side for side in sides if side not in absent],
        options.width,
        options.sync_every,
        options.rounds,
        options.turns,
        1e-3 * options.milliseconds,
        faults_of(options),
    )
    workload = f"train, {rate or 'loopback'}"
    rows: dict[str, Row] = {}

    def take(found: Calibration | Result | Outcome) -> None:
        if isinstance(found, Calibration):
            note = f"{rate or 'loopback'}: batches of {found.batch}, with which a step of all ranks takes"
            table.notes.append(f"{note} {1e3 * found.seconds:.3g} ms")
        elif isinstance(found, Result):
            rows[found.side.name] = row = make_row(found, workload, options.only)
            table.rows.append(row)
            compare(rows)
        else:
            table.rows.append(fault_row(found, rate))

    on_ranks(work, ranks, job, take=take, progress=progress, deadline=DEADLINE)
    table.rows += [Row.missing(side.name, why, workload) for side, why in absent.items()]


def run_on_hosts(options: argparse.Namespace, ranks: int, rate: str, table: Table, listener: "Shown") -> None:
    """Run this case as the ranks of emulated hosts, and add what they have measured."""
    namespaces.check_tools()
    with catch_signals() as caught, tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = [sys.executable, "-m", "benchmarks", *inner_options(options, rate), "--json", str(out)]
        with namespaces.cluster(ranks, rate) as spaces:
            status = namespaces.launch(command, spaces, 1, caught, show=listener.listen)
        found = saved_results.load(out, "--json").tables["local_sgd"] if out.exists() else None
        if isinstance(found, Table):
            table.rows += found.rows
            table.notes += [note for note in found.notes if note not in table.notes]
    if caught:
        signal.raise_signal(caught[0])
    if status and not (found and not found.correct):
        last = " | ".join(listener.lines()[-3:])
        raise Failure(f"{rate}: the ranks ended with status {status}: {last}")


class Shown(Listener):
    """Shows the progress of rank 0."""

    def listen(self, new: bytes) -> None:
        self.output += new
        steps = [line.removeprefix("local_sgd: ") for line in self.lines() if line.startswith("local_sgd: ")]
        if new and steps:
            self.progress(f"{self.where}: {steps[-1]}", self.done)


def inner_options(options: argparse.Namespace, rate: str) -> list[str]:
    given = {
        "--only": ",".join(part for part in options.only if part not in ("work", "slow_site")),
        "--rate": rate,
        "--elements": LAYERS * options.width**2,
        "--sync-every": options.sync_every,
        "--fragments": options.fragments,
        "--delay": options.delay,
        "--codecs": ",".join(options.codecs),
        "--milliseconds": options.milliseconds,
        "--rounds": options.rounds,
        "--turns": options.turns,
    }
    chosen = [str(part) for name, value in given.items() if value is not None for part in (name, value)]
    return ["local_sgd", *(["--quick"] if options.quick else []), *chosen]


SHARE, WAITING, MAIN, SENT, SAVED, BURST, PEAK = (
    "computing %",
    "not waiting %",
    "main ms",
    "bytes/step",
    "DDP bytes",
    "burst MB",
    "peak MB",
)
FIGURES = {"share": [SHARE, WAITING, MAIN], "bytes": [SENT, SAVED], "burst": [BURST, PEAK], "peers": [SHARE, SENT]}


def make_row(result: Result, workload: str, parts: list[str]) -> Row:
    side = result.side
    if result.why and side.ours:
        return Row(workload, side.name, True, False, f"failed: {result.why}")
    if result.why:
        return Row.missing(side.name, f"failed: {result.why}", workload)
    row = Row(workload, side.name, side.ours, result.wrong == 0, str(result.wrong))
    if not result.turns:
        return row
    row.samples = [turn.seconds for turn in result.turns]
    known = {SENT: median(result, "nbytes"), BURST: 1e-6 * median(result, "burst"), PEAK: 1e-6 * median(result, "peak")}
    if side.kind in (OURS, AVERAGER, HIVEMIND):
        known[WAITING] = 100 * (1 - median(result, "waited"))
    if side.kind == OURS:
        known[MAIN] = 1e3 * median(result, "own")
    wanted = [name for part in parts for name in FIGURES.get(part, ())]
    row.figures = {name: known.get(name) for name in wanted} | {"error": result.error}
    return row


def compare(rows: dict[str, Row]) -> None:
    """Fill in what follows from several sides; no averaging and the peers are compared with our first side."""
    alone, plain = rows.get(ALONE), rows.get(Side(DDP).name)
    ours = next((row for row in rows.values() if row.ours), None)
    for row in rows.values():
        if alone and alone.time and row.time and SHARE in row.figures:
            row.figures[SHARE] = 100 * alone.time.median / row.time.median
        if plain and row is not alone and SAVED in row.figures:
            row.figures[SAVED] = ratio(plain.figures[SENT], row.figures[SENT])
        if ours and not row.ours:
            row.compare_with(ours)


def ratio(first: float | None, second: float | None) -> float | None:
    return first / second if first and second else None


def fault_row(outcome: Outcome, rate: str | None) -> Row:
    fault, wrong = outcome.fault, outcome.wrong
    check = str(len(wrong)) + (f": {wrong[0]}" if wrong else "")
    row = Row(f"killed {fault.when}, {rate or 'loopback'}", fault.name, True, not wrong, check, outcome.raised)
    if outcome.raised:
        for name, seconds in (
            ("noticed s", outcome.noticed),
            ("recover s", outcome.recovered),
            ("next s", outcome.completed),
        ):
            row.figures[name] = sorted(seconds)[len(seconds) // 2]
    return row


def work_rows(options: argparse.Namespace, progress: Progress) -> Iterator[Row]:
    numels = [LAYERS * options.width**2] + ([] if options.quick or options.elements else [100_000_000])
    threads = [options.threads] if options.threads else [1] if options.quick else [1, 2]
    rounds = 3 if options.quick else 20
    for numel in numels:
        for count in threads:
            name = f"outer step, {numel / 1e6:.3g} M, {count} thread{'s' if count > 1 else ''}"

            def advance(done: float, name: str = name) -> None:
                progress(name, done)

            rows: dict[str, Row] = {}
            for cost in local_sgd_work.measure(numel, count, options.codecs, rounds, advance):
                row = Row(name, cost.side, cost.ours, cost.wrong == 0, str(cost.wrong), cost.samples)
                row.figures = {"resident B": cost.resident, "peak B": cost.peak}
                rows[cost.side] = row
                ours = rows[f"DiLoCo, {cost.codec}"]
                if not cost.ours:
                    row.compare_with(ours)
            for row in rows.values():
                plain = rows.get("torch")
                if row.ours and plain and plain.time and row.time:
                    row.figures["torch raw/this"] = plain.time.median / row.time.median
            yield from rows.values()


def add_slow_rows(options: argparse.Namespace, ranks: int, table: Table, progress: Progress) -> None:
    workload = "slow site, loopback"
    try:
        import examples.tasks  # noqa: F401
    except ModuleNotFoundError as missing:
        table.rows.append(Row.missing(OURS, f"no module {missing.name}; pip install '.[examples]'", workload))
        return

    def take(found: tuple[local_sgd_slow.Way, list[local_sgd_slow.Turn]]) -> None:
        way, turns = found
        wrong = int(sum(turn.wrong for turn in turns))
        row = Row(workload, way.name, True, wrong == 0, str(wrong), [turn.seconds for turn in turns])
        loss = Spread.of([turn.loss for turn in turns])
        row.figures = {
            "steps/s": statistics.median(1 / turn.seconds for turn in turns),
            "slow steps/s": statistics.median(1 / turn.slow for turn in turns),
            "versions/s": statistics.median(turn.versions for turn in turns),
            "loss": loss.median,
            "loss q1": loss.q1,
            "loss q3": loss.q3,
            "accuracy %": 100 * statistics.median(turn.accuracy for turn in turns),
        }
        table.rows.append(row)

    job = local_sgd_slow.Job(few_steps(options), options.codecs[0], 0.3 if options.quick else 2.5, options.slow_turns)
    on_ranks(local_sgd_slow.work, ranks, job, take=take, progress=progress, deadline=DEADLINE)
