"""Compares a run with an older one, row by row: --compare OLD.json."""

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
SAME = ("CPU", "cores", "torch", "GPU", "instruction set")  # a difference in these may cause a difference in time


class Line(NamedTuple):
    workload: str
    side: str
    old: Spread | None
    new: Spread | None
    outcome: str

    @property
    def ratio(self) -> float | None:
        return self.new.median / self.old.median if self.new and self.old else None


def show(console: Console, path: Path, old: Run, new: Run) -> None:
    notes = [
        f"median (quartiles); new/old: below 1 the new run is faster; {WITHIN}: the ranges of the quartiles overlap"
    ]
    notes += differences(old, new)
    grid = Grid(title=f"Compared with {path}", box=box.SIMPLE_HEAD, title_style="bold", title_justify="left")
    for heading in ("case", "workload", "side", "old", "new", "new/old", ""):
        grid.add_column(heading, justify="right" if heading in ("old", "new", "new/old") else "left")
    then, now = timed(old), timed(new)
    for case, table in now.items():
        if case not in then:
            notes.append(f"{case}: not in {path}")
            continue
        if then[case].title != table.title:
            notes.append(f"{case}: the old run measured something else: {then[case].title}; now {table.title}")
        for index, line in enumerate(compare(then[case], table)):
            ratio = f"{number(line.ratio)}x" if line.ratio else ""
            times = [duration(time) if time else "-" for time in (line.old, line.new)]
            outcome = Text(line.outcome, style=STYLES.get(line.outcome, ""))
            grid.add_row("" if index else case, line.workload, line.side, *times, ratio, outcome)
        grid.add_section()
    if others := [case for case in then if case not in now]:
        notes.append(f"not in this run: {', '.join(others)}")
    console.print(grid)
    show_notes(console, notes)


def timed(run: Run) -> dict[str, Table]:
    return {case: table for case, table in run.tables.items() if isinstance(table, Table)}


def differences(old: Run, new: Run) -> Iterator[str]:
    """Yield a note for each difference of the machine and the software."""
    for name in SAME:
        before, now = old.origin.get(name), new.origin.get(name)
        if before != now:
            yield f"ANOTHER {name}: {before}, now {now}: times may differ for this reason"
    if old.interrupted:
        yield "the old run was interrupted"


def compare(old: Table, new: Table) -> Iterator[Line]:
    """Yield a line for each row of the new run, then for each row that only the old run has."""
    then, now = ({(row.workload, row.side): row.time for row in table.rows} for table in (old, new))
    for key, time in now.items():
        before = then.get(key)
        if before and time:
            yield Line(*key, before, time, classify(before, time))
        elif before or time:
            yield Line(*key, before, time, "timed only in the old run" if before else "timed only in the new run")
    for key, before in then.items():
        if key not in now and before:
            yield Line(*key, before, None, "only in the old run")


def classify(old: Spread, new: Spread) -> str:
    if new.q3 < old.q1:
        return FASTER
    return SLOWER if new.q1 > old.q3 else WITHIN
