"""Time a DDP step for each codec and each rate of emulated links, and report where each codec breaks even."""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table as Grid

from benchmarks import plots, report, saved_results
from benchmarks.break_even import in_words
from benchmarks.ddp_ranks import BACKWARD
from benchmarks.harness import Failure, Progress, Table, at_least, choices
from benchmarks.machine import link_probe, namespaces
from benchmarks.machine.signals import catch_signals
from benchmarks.plots.rates import AGAINST, LINK, curves_of
from dltrain_ext import codecs

NAME = "sweep"
LAYERS = 6
SLOW, FEW, MANY = 0.5, 3, 10  # below SLOW Gbit/s the link limits a step, whose time varies little: FEW steps suffice
UNITS = {"k": 1e-6, "m": 1e-3, "g": 1.0, "t": 1e3}


def rates(text: str) -> list[str]:
    """An argparse type: rates, separated by commas."""
    return list(dict.fromkeys(namespaces.rate(part.strip()) for part in text.split(",")))


def gbits(rate: str) -> float | None:
    """Convert a rate to Gbit/s; None without a limit."""
    if rate == "none":
        return None
    number = rate.removesuffix("bit")
    return float(number[:-1]) * UNITS[number[-1]] if number[-1] in UNITS else float(number) * 1e-9


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Each rate is a run of the case ddp on `hosts` (see the help of both), and the model has the options of ddp. "
        "After Ctrl-C the results so far are reported. Needs root and iproute2, except with --from."
    )
    parser.add_argument(
        "--rates",
        type=rates,
        default="100mbit,250mbit,1gbit,2.5gbit,10gbit,none",
        help="rates of each host's link (default: %(default)s)",
    )
    parser.add_argument("--hosts", type=at_least(2), default=4, help="number of hosts (default: %(default)s)")
    parser.add_argument("--per-host", type=at_least(1), default=1, help="ranks on each host (default: %(default)s)")
    parser.add_argument(
        "--codecs",
        type=choices([*codecs.CODECS, "auto"]),
        default="raw,bf16,int8,int4",
        help=f"names out of {', '.join(codecs.CODECS)}, auto (default: %(default)s)",
    )
    parser.add_argument(
        "--layers", type=at_least(1), help=f"number of Linear(width, width) (default: {LAYERS}, --quick: 2)"
    )
    parser.add_argument("--width", type=at_least(1), help="width of a layer (default: 1024, --quick: 256)")
    parser.add_argument("--batch", type=at_least(1), help="batch size of each rank (default: 16)")
    parser.add_argument(
        "-n", "--iters", type=at_least(1), help=f"timed steps (default: {MANY}, below {SLOW:g} Gbit/s {FEW})"
    )
    parser.add_argument("--logs", type=Path, metavar="DIR", help="write the output of the ranks, in a folder per rate")
    parser.add_argument(
        "--from", dest="saved", type=Path, metavar="FILE", help="show the results that --json wrote, and run nothing"
    )


def run(options: argparse.Namespace) -> int:
    """Run the sweep, or show saved results; return the exit status."""
    console = report.make_console()
    if options.saved:
        if options.json:
            raise Failure("sweep: expected --from or --json, got both")
        origin, table, status = *load(options.saved), 0
        console.print(report.headline(origin), style="dim", markup=False)
    else:
        namespaces.check_tools()
        origin = report.provenance()
        console.print(report.headline(origin), style="dim", markup=False)
        with report.live(console, [NAME]) as begin:
            table, status = measure(options, begin(NAME))
    if table.rows:
        show(console, table)
        if options.json:
            saved_results.write(options.json, saved_results.Run(origin, {NAME: table}, interrupted=bool(status)))
        for path in plots.draw(options.plot, NAME, table) if options.plot else ():
            console.print(f"wrote {path}")
    return status or int(not table.correct)


def load(path: Path) -> tuple[Mapping[str, str], Table]:
    run = saved_results.load(path, "--from")
    if not isinstance(table := run.tables.get(NAME), Table):
        raise Failure(f"--from {path}: expected a sweep, got {', '.join(run.tables) or 'nothing'}")
    return run.origin, table


def measure(options: argparse.Namespace, progress: Progress) -> tuple[Table, int]:
    """Return the results until the end, a failure, or a signal, and the exit status."""
    table = Table("", [], [], "#wrong", LINK)
    with catch_signals() as caught, tempfile.TemporaryDirectory() as folder:
        for index, rate in enumerate(options.rates):
            listener = Listener(progress, f"{rate}, {index + 1} of {len(options.rates)}", index / len(options.rates))
            out = Path(folder, f"{rate}.json")
            command = [sys.executable, "-m", "benchmarks", *ddp_options(options, rate), "--json", str(out)]
            logs = options.logs and options.logs / rate
            with namespaces.cluster(options.hosts, rate) as spaces:
                status = namespaces.launch(command, spaces, options.per_host, caught, logs=logs, show=listener.listen)
            if status:
                last = [] if caught else listener.lines()[-namespaces.TAIL :]
                print(f"benchmarks: sweep: ended at {rate}, with status {status}", *last, sep="\n  ", file=sys.stderr)
                return table, status
            add(table, options, rate, saved_results.load(out, "--json").tables["ddp"])
    return table, 0


class Listener:
    """Shows the progress of rank 0, at most once a second, because drawing it takes time from a core of the ranks."""

    def __init__(self, progress: Progress, where: str, done: float) -> None:
        self.progress, self.where, self.done = progress, where, done
        self.output, self.latest = b"", 0.0

    def listen(self, new: bytes) -> None:
        self.output += new
        if time.monotonic() > self.latest + 1:
            self.latest = time.monotonic()
            steps = [line.removeprefix("ddp: ") for line in self.lines() if line.startswith("ddp: ")]
            self.progress(f"{self.where}: {(steps or ['starting'])[-1]}", self.done)

    def lines(self) -> list[str]:
        return self.output.decode(errors="replace").splitlines()


def ddp_options(options: argparse.Namespace, rate: str) -> list[str]:
    slow = (gbits(rate) or SLOW) < SLOW
    given = {
        "--codecs": ",".join(options.codecs),
        "--layers": options.layers or (None if options.quick else LAYERS),
        "--width": options.width,
        "--batch": options.batch,
        "--iters": options.iters or (None if options.quick else FEW if slow else MANY),
        "--warmup": 2,
        "--workloads": "backward",
    }
    chosen = [str(part) for name, value in given.items() if value is not None for part in (name, value)]
    return ["ddp", *(["--quick"] if options.quick else []), *chosen]


def add(table: Table, options: argparse.Namespace, rate: str, measured: Table) -> None:
    """Add the measured rows to the table, with the rate as their workload."""
    where = f"{options.hosts} emulated hosts" + (f" of {options.per_host} ranks" if options.per_host > 1 else "")
    table.title = f"{measured.title}: {BACKWARD} on {where}, by the rate of their links"
    table.notes = [note for note in measured.notes if not note.startswith(link_probe.NOTE)]
    for row in measured.rows:
        if not row.left_out:
            row.workload, row.x = rate, gbits(rate)
            table.rows.append(row)


def show(console: Console, table: Table) -> None:
    """Show a line for each side, a column for each rate, and the rates at which ours and a peer break even."""
    ours, peers, free = curves_of(table)
    rates = list(dict.fromkeys((row.workload, row.x) for row in table.rows))
    grid = Grid(title=table.title, box=box.SIMPLE_HEAD, title_style="bold", title_justify="left")
    grid.add_column("side")
    for rate, _ in rates:
        grid.add_column(rate, justify="right")
    against = [peer for peer in AGAINST if peer in peers]
    for peer in against:
        grid.add_column(f"faster than {peer}")
    for side, curve in (peers | ours).items():
        times = [free.get(side) if x is None else curve.get(x) for _, x in rates]
        cells = [report.number(time and 1e3 * time) for time in times]
        even = [in_words(curve, peers[peer], free.get(side), free.get(peer)) for peer in against if side in ours]
        grid.add_row(side, *cells, *even, style="bold" if side in ours else "")
    console.print(grid)
    notes = [
        "median ms per step; the last columns say up to, or from, which Gbit/s ours is faster: where straight lines "
        "between the measured points cross, on logarithmic axes",
        *(f"WRONG: {row.side} at {row.workload}" for row in table.rows if not row.correct),
    ]
    report.show_notes(console, [*notes, *table.notes])
