"""A run beside an older one, row by row: --compare OLD.json."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from benchmarks.harness import Failure, Spread, Table
from benchmarks.report import duration, number, show_notes
from benchmarks.simulation import Simulation

WITHIN, FASTER, SLOWER = "within the spread", "faster", "slower"
STYLES = {FASTER: "green", SLOWER: "bold red"}
SAME = ("CPU", "cores", "torch", "GPU", "instruction set")  # else it is not the code alone that differs
Times = dict[tuple[str, str], Spread | None]  # by workload and side


class Old(NamedTuple):
    path: Path
    origin: dict[str, str]
    titles: dict[str, str]
    times: dict[str, Times]
    interrupted: bool


class Line(NamedTuple):
    workload: str
    side: str
    old: Spread | None
    new: Spread | None
    verdict: str

    @property
    def ratio(self) -> float | None:
        return self.new.median / self.old.median if self.new and self.old else None


def load(path: Path) -> Old:
    """What --json wrote, of any age; Failure if it is something else."""
    try:
        plain = json.loads(path.read_text())
        origin = {str(name): str(fact) for name, fact in plain["provenance"].items()}
        timed = {case: table for case, table in plain["cases"].items() if "rows" in table}
        titles = {case: str(table["title"]) for case, table in timed.items()}
        times = {case: dict(map(read_row, table["rows"])) for case, table in timed.items()}
    except OSError as error:
        raise Failure(f"--compare {path}: {error.strerror}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise Failure(f"--compare {path}: expected what --json writes, got something else ({reason})") from error
    return Old(path, origin, titles, times, bool(plain.get("interrupted")))


def read_row(row: Mapping[str, Any]) -> tuple[tuple[str, str], Spread | None]:
    samples = [float(sample) for sample in row["samples"]]
    return (str(row["workload"]), str(row["side"])), Spread.of(samples) if samples else None


def show(console: Console, old: Old, origin: Mapping[str, str], tables: Mapping[str, Table | Simulation]) -> None:
    notes = [
        "median (quartiles), in ms; new/old: below 1 it is faster now; the verdict is that of the quartiles: "
        f"{WITHIN} where they overlap"
    ]
    notes += differences(old, origin)
    grid = Grid(title=f"Beside {old.path}", box=box.SIMPLE_HEAD, title_style="bold", title_justify="left")
    for heading in ("case", "workload", "side", "old", "new", "new/old", ""):
        grid.add_column(heading, justify="right" if heading in ("old", "new", "new/old") else "left")
    timed = {case: table for case, table in tables.items() if isinstance(table, Table)}
    for case, table in timed.items():
        if case not in old.times:
            notes.append(f"{case}: not in {old.path}")
            continue
        if old.titles[case] != table.title:
            notes.append(f"{case}: the old run is another: {old.titles[case]}; now {table.title}")
        for index, line in enumerate(compare(old.times[case], table)):
            ratio = f"{number(line.ratio)}x" if line.ratio else ""
            times = [duration(time) if time else "-" for time in (line.old, line.new)]
            verdict = Text(line.verdict, style=STYLES.get(line.verdict, ""))
            grid.add_row("" if index else case, line.workload, line.side, *times, ratio, verdict)
        grid.add_section()
    if others := [case for case in old.times if case not in timed]:
        notes.append(f"not in this run: {', '.join(others)}")
    console.print(grid)
    show_notes(console, notes)


def differences(old: Old, origin: Mapping[str, str]) -> Iterator[str]:
    """Of the machine, and of what runs on it."""
    for name in SAME:
        if old.origin.get(name) != origin.get(name):
            yield f"ANOTHER {name}: {old.origin.get(name)}, now {origin.get(name)}: not the code alone differs"
    if old.interrupted:
        yield "the old run was interrupted"


def compare(old: Times, table: Table) -> Iterator[Line]:
    """The rows of this run, then those that it lacks."""
    new = {(row.workload, row.side): row.time for row in table.rows}
    for key, time in new.items():
        before = old.get(key)
        if before and time:
            yield Line(*key, before, time, judge(before, time))
        elif before or time:
            yield Line(*key, before, time, "timed then alone" if before else "timed now alone")
    for key, before in old.items():
        if key not in new and before:
            yield Line(*key, before, None, "in the old run alone")


def judge(old: Spread, new: Spread) -> str:
    if new.q3 < old.q1:
        return FASTER
    return SLOWER if new.q1 > old.q3 else WITHIN
