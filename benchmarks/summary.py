"""One table of all timed results, made from the rows: ours next to its peers, marked where ours is slower."""

from collections.abc import Iterator, Mapping
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from benchmarks.harness import Row, Table
from benchmarks.report import number, show_notes, time_of
from benchmarks.simulation import Simulation

LIMITS = {"% of limit": "memory", "% of line": "line"}
HEADINGS = ("case", "workload", "ours", "time", "peer", "time", "ratio", "% of limit", "correct", "")
SLOWER, NOT_TIMED = "SLOWER", "left out"
NOTES = [
    "time: median of rounds in which the sides of a workload alternate; ratio: time of the peer / time of ours, so "
    f"below 1 ours is slower, which the last column marks as {SLOWER}",
    "% of limit, for ours: % memory of the rate of plain memory streams, or % line of the rate of plain messages, in "
    "the same run",
    "correct: every side is checked against a reference before it is timed; a wrong side is not timed",
]


def show(console: Console, tables: Mapping[str, Table | Simulation]) -> None:
    grid = Grid(title="Summary", box=box.SIMPLE_HEAD, title_style="bold", title_justify="left")
    for index, heading in enumerate(HEADINGS):
        grid.add_column(heading, justify="right" if index in (3, 5, 6, 7) else "left")
    notes = list(NOTES)
    for case, table in tables.items():
        if isinstance(table, Simulation):
            notes.append(f"{case}: {table.title.split(':')[0]}; `python -m benchmarks {case}` shows it")
            continue
        first = True
        for cells, style in lines(table):
            grid.add_row(case if first else "", *cells, style=style)
            first = False
        grid.add_section()
    console.print(grid)
    notes.append("`python -m benchmarks CASE` measures one case in detail, and explains its figures")
    show_notes(console, notes)


def lines(table: Table) -> Iterator[tuple[list[Text | str], str]]:
    """Yield the cells after the name of the case, and their style."""
    rows = [row for row in table.rows if not row.left_out]
    for workload, group in groupby(rows, key=lambda row: row.workload):
        for index, (ours, peer) in enumerate(pairs(list(group))):
            yield cells(workload if index == 0 else "", ours, peer), ""
    missing: dict[tuple[str, str], list[str]] = {}
    for row in table.rows:
        if row.left_out:
            missing.setdefault((row.side, row.check), []).append(row.workload.split(":")[0])
    for (side, why), workloads in missing.items():
        where = workloads[0] if len(workloads) == 1 else f"in {len(workloads)} workloads"
        yield [where, "", "", f"{side}: {why}", "", "", "", "", NOT_TIMED], "dim"


def pairs(rows: list[Row]) -> list[tuple[Row | None, Row | None]]:
    """Return the lines of one workload: our sides with each peer they are compared with, other peers, wrong sides.

    If nothing is compared, the first of our sides is listed without a peer.
    """
    sides = {row.side: row for row in rows}
    found: list[tuple[Row | None, Row | None]] = []
    for row in rows:
        if row.against:
            found.append((row, sides[row.against]) if row.ours else (sides[row.against], row))
    met = {id(row) for pair in found for row in pair}
    alone = [row for row in rows if id(row) not in met and (not row.correct or (row.time and not row.ours))]
    if not found:
        alone += [row for row in rows if row.ours and row.time][:1]
    return found + [(row, None) if row.ours else (None, row) for row in alone]


def cells(workload: str, ours: Row | None, peer: Row | None) -> list[Text | str]:
    both = [row for row in (ours, peer) if row]
    ratio = next((row.ratio for row in both if row.against and {row.against, row.side} == {r.side for r in both}), None)
    correct = all(row.correct for row in both)
    times = [(row.side, time_of(row)) if row else ("", "") for row in (ours, peer)]
    return [
        workload,
        *times[0],
        *times[1],
        f"{number(ratio)}x" if ratio else "",
        share(ours) if ours else "",
        "yes" if correct else Text("WRONG", style="bold red"),
        Text(SLOWER, style="bold red") if ratio and ratio < 1 else "",
    ]


def share(row: Row) -> str:
    return next((f"{row.figures[name]:.0f} % {of}" for name, of in LIMITS.items() if row.figures.get(name)), "")
