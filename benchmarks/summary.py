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
HEADINGS = ("ours", "time", "peer", "time", "ratio", "% of limit", "")
SLOWER, WRONG = "SLOWER", "WRONG"
NOTES = [
    "time: median of rounds in which the sides of a workload alternate; ratio: time of the peer / time of ours, so "
    f"below 1 ours is slower, which the last column marks as {SLOWER}",
    "% of limit, for ours: % memory of the rate of plain memory streams, or % line of the rate of plain messages, in "
    "the same run",
    f"every side is checked against a reference before it is timed; a wrong side is marked as {WRONG}, and not timed",
]


def show(console: Console, tables: Mapping[str, Table | Simulation]) -> None:
    grid = Grid(title="Summary", box=box.SIMPLE_HEAD, title_style="bold", title_justify="left")
    for index, heading in enumerate(HEADINGS):
        justify = "right" if index in (1, 3, 4, 5) else "left"
        grid.add_column(heading, justify=justify, min_width=38 if index == 0 else None)
    notes = list(NOTES)
    for case, table in tables.items():
        if isinstance(table, Simulation):
            notes.append(f"{case}: {table.title.split(':')[0]}; `python -m benchmarks {case}` shows it")
            continue
        grid.add_row(Text(case, style="bold"))
        for line in lines(table):
            grid.add_row(*line)
        grid.add_section()
        notes += [f"{case} left out {what}" for what in left_out(table)]
    console.print(grid)
    notes.append("`python -m benchmarks CASE` measures one case in detail, and explains its figures")
    show_notes(console, notes)


def lines(table: Table) -> Iterator[list[Text | str]]:
    """Yield the cells of a line for each workload, and below it of one for each pair that is compared."""
    rows = [row for row in table.rows if not row.left_out]
    for workload, group in groupby(rows, key=lambda row: row.workload):
        shown = None
        for index, (ours, peer) in enumerate(pairs(list(group))):
            if index == 0:
                yield [f" {workload}"]
            yield cells(ours, peer, repeats=ours is not None and ours is shown)
            shown = ours


def left_out(table: Table) -> Iterator[str]:
    missing: dict[tuple[str, str], int] = {}
    for row in table.rows:
        if row.left_out:
            missing[row.side, row.check] = missing.get((row.side, row.check), 0) + 1
    for (side, why), count in missing.items():
        yield f"{side}{f', in {count} workloads' if count > 1 else ''}: {why}"


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


def cells(ours: Row | None, peer: Row | None, repeats: bool) -> list[Text | str]:
    """Return the cells of two sides; if our side repeats that of the line above, its name and time are not shown."""
    both = [row for row in (ours, peer) if row]
    ratio = next((row.ratio for row in both if row.against and {row.against, row.side} == {r.side for r in both}), None)
    times = [(row.side, time_of(row)) if row else ("", "") for row in (ours, peer)]
    name, time = ("", "") if repeats else times[0]
    mark = "" if all(row.correct for row in both) else WRONG
    return [
        f"  {name}",
        time,
        *times[1],
        f"{number(ratio)}x" if ratio else "",
        share(ours) if ours and not repeats else "",
        Text(mark or (SLOWER if ratio and ratio < 1 else ""), style="bold red"),
    ]


def share(row: Row) -> str:
    return next((f"{row.figures[name]:.0f} % {of}" for name, of in LIMITS.items() if row.figures.get(name)), "")
