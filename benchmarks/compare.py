"""A run beside an older one, row by row: --compare OLD.json."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from benchmarks.harness import Spread, Table
from benchmarks.report import duration, number, show_notes
from benchmarks.saved_results import Run

WITHIN, FASTER, SLOWER = "within the spread", "faster", "slower"
STYLES = {FASTER: "green", SLOWER: "bold red"}
SAME = ("CPU", "cores", "torch", "GPU", "instruction set")  # else it is not the code alone that differs


class Line(NamedTuple):
    workload: str
    side: str
    old: Spread | None
    new: Spread | None
    verdict: str

    @property
    def ratio(self) -> float | None:
        return self.new.median / self.old.median if self.new and self.old else None


def show(console: Console, path: Path, old: Run, new: Run) -> None:
    notes = [
        "median (quartiles), in ms; new/old: below 1 it is faster now; the verdict is that of the quartiles: "
        f"{WITHIN} where they overlap"
    ]
    notes += differences(old, new)
    grid = Grid(title=f"Beside {path}", box=box.SIMPLE_HEAD, title_style="bold", title_justify="left")
    for heading in ("case", "workload", "side", "old", "new", "new/old", ""):
        grid.add_column(heading, justify="right" if heading in ("old", "new", "new/old") else "left")
    then, now = timed(old), timed(new)
    for case, table in now.items():
        if case not in then:
            notes.append(f"{case}: not in {path}")
            continue
        if then[case].title != table.title:
            notes.append(f"{case}: the old run is another: {then[case].title}; now {table.title}")
        for index, line in enumerate(compare(then[case], table)):
            ratio = f"{number(line.ratio)}x" if line.ratio else ""
            times = [duration(time) if time else "-" for time in (line.old, line.new)]
            verdict = Text(line.verdict, style=STYLES.get(line.verdict, ""))
            grid.add_row("" if index else case, line.workload, line.side, *times, ratio, verdict)
        grid.add_section()
    if others := [case for case in then if case not in now]:
        notes.append(f"not in this run: {', '.join(others)}")
    console.print(grid)
    show_notes(console, notes)


def timed(run: Run) -> dict[str, Table]:
    return {case: table for case, table in run.tables.items() if isinstance(table, Table)}


def differences(old: Run, new: Run) -> Iterator[str]:
    """Of the machine, and of what runs on it."""
    for name in SAME:
        before, now = old.origin.get(name), new.origin.get(name)
        if before != now:
            yield f"ANOTHER {name}: {before}, now {now}: not the code alone differs"
    if old.interrupted:
        yield "the old run was interrupted"


def compare(old: Table, new: Table) -> Iterator[Line]:
    """The rows of this run, then those that it lacks."""
    then, now = ({(row.workload, row.side): row.time for row in table.rows} for table in (old, new))
    for key, time in now.items():
        before = then.get(key)
        if before and time:
            yield Line(*key, before, time, judge(before, time))
        elif before or time:
            yield Line(*key, before, time, "timed then alone" if before else "timed now alone")
    for key, before in then.items():
        if key not in now and before:
            yield Line(*key, before, None, "in the old run alone")


def judge(old: Spread, new: Spread) -> str:
    if new.q3 < old.q1:
        return FASTER
    return SLOWER if new.q1 > old.q3 else WITHIN
