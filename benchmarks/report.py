"""The output for the user: live progress, a table per case, and the provenance of the figures."""

import contextlib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table as Grid
from rich.text import Text

from benchmarks.harness import Progress, Row, Spread, Table
from benchmarks.simulation import Simulation
from dltrain_ext import info


def make_console(quiet: bool = False) -> Console:
    """Return a console for the terminal; for a pipe or a log file its lines are wide enough for the tables."""
    console = Console(highlight=False, quiet=quiet)
    return console if console.is_terminal else Console(highlight=False, quiet=quiet, width=160)


@contextlib.contextmanager
def live(console: Console, cases: Sequence[str]) -> Iterator[Callable[[str], Progress]]:
    """Show the progress of the run; yield a function that begins a case and returns its Progress. Nothing is drawn
    between two progress reports, because a thread that redraws would disturb the timing.
    """
    columns = (
        TextColumn("[bold]{task.fields[case]}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Bars(*columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("", total=float(len(cases)), case="")

        def begin(case: str) -> Progress:
            index, shown = list(cases).index(case), ""
            name = f"{case} ({index + 1} of {len(cases)})" if len(cases) > 1 else case
            bars.update(task, description="", completed=index, case=name, refresh=True)

            def progress(text: str, done: float) -> None:
                nonlocal shown
                description = f"{100 * done:3.0f} % {escape(text)}" if len(cases) > 1 else escape(text)
                bars.update(task, description=description, completed=index + done, refresh=True)
                if not console.is_terminal and text != shown:
                    console.print(f"{name}: {text}", markup=False)
                shown = text

            return progress

        yield begin


def show(console: Console, table: Table | Simulation) -> None:
    if isinstance(table, Simulation):
        show_simulation(console, table)
        return
    summary = [row for row in table.rows if table.summary and row.workload == table.summary]
    console.print(draw([row for row in table.rows if row not in summary], table, table.title))
    if summary:
        console.print(draw(summary, table, None))
    note = "time: median (quartiles) of rounds in which the sides alternate; peer/ours: below 1 ours is slower"
    show_notes(console, [note, *table.notes])


def show_notes(console: Console, notes: list[str]) -> None:
    for note in notes:
        console.print(Text(f"  {note}", style="dim"))
    console.print()


def show_simulation(console: Console, simulation: Simulation) -> None:
    console.print(Text(simulation.title, style="bold"))
    for name, section in simulation.sections.items():
        grid = Grid(title=f"simulated: {name}", box=box.SIMPLE_HEAD, title_style="bold", title_justify="left")
        headings, lines = section.grid()
        for heading in headings:
            named = heading in section.by and all(isinstance(row[heading], str) for row in section.rows)
            grid.add_column(heading, justify="left" if named else "right")
        for line in lines:
            grid.add_row(*(cell if isinstance(cell, str) else number(cell) for cell in line))
        console.print(grid)
    show_notes(console, simulation.notes)


def draw(rows: list[Row], table: Table, title: str | None) -> Grid:
    timed = title is not None
    figures = list(dict.fromkeys(name for row in rows for name in row.figures))
    grid = Grid(title=title, box=box.SIMPLE_HEAD, title_style="bold", title_justify="left")
    grid.add_column("workload")
    grid.add_column("side")
    for heading in (*(("time (q1 - q3)", "peer/ours") if timed else ()), *figures, table.check_heading):
        grid.add_column(heading, justify="right")
    for workload, group in groupby(rows, key=lambda row: row.workload):
        for position, row in enumerate(group):
            style = "bold" if row.ours else ""
            grid.add_row(workload if position == 0 else "", *cells(row, figures, timed), style=style)
        grid.add_section()
    return grid


def cells(row: Row, figures: list[str], timed: bool) -> Iterator[str | Text]:
    yield row.side
    if timed:
        yield duration(row.time) if row.time else "-"
        yield comparison(row.ratio) if row.ratio else ""
    yield from (number(row.figures.get(name)) for name in figures)
    if row.left_out:
        yield Text(row.check, style="dim")
        return
    yield Text(row.check) if row.correct else Text(f"{row.check} WRONG", style="bold red")


def comparison(ratio: float) -> Text:
    text = f"{number(ratio)}x"
    return Text(f"slower {text}", style="red") if ratio < 1 else Text(text, style="green")


def time_of(row: Row) -> str:
    """Return only the median of the time."""
    return duration(row.time).partition(" (")[0] if row.time else "-"


def duration(time: Spread) -> str:
    scale, unit = (1e3, "ms") if time.median >= 1e-3 else (1e6, "us")
    return f"{number(scale * time.median)} {unit} ({number(scale * time.q1)} - {number(scale * time.q3)})"


def number(value: float | None) -> str:
    """Format a value with three digits, or with all digits of a whole number."""
    if value is None:
        return "-"
    if isinstance(value, int) or value >= 100:
        return f"{value:,.0f}"
    if not math.isfinite(value):
        return str(value)
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}" if value else "0"


def provenance() -> dict[str, str]:
    """Return where and with what the figures are measured. Must be called before, for the load average."""
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    facts = {name: fact for name, fact in info.collect().items() if name != "package"}  # it is a local path
    argv = re.sub(r" --json[ =]\S+", "", " ".join(["", *sys.argv[1:]])).strip()  # likewise
    return {"date": date, "argv": argv, "load average": f"{os.getloadavg()[0]:.1f}"} | facts


def headline(origin: Mapping[str, str]) -> str:
    names = ("dltrain_ext", "commit", "torch", "CPU", "cores", "instruction set", "load average")
    line = ", ".join(f"{name} {origin[name]}" for name in names if name in origin)
    busy = float(origin["load average"]) > (os.cpu_count() or 1) / 2
    return f"{line}{' (the machine is busy: expect noise)' if busy else ''}"
