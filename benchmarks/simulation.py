"""The results of a case that simulates: figures of a model, where a Table has figures that were timed."""

from dataclasses import dataclass
from typing import ClassVar

Cell = str | float | None


@dataclass
class Section:
    """Rows of figures, all with the same keys.

    The columns `by` are shown. With `across`, rows with equal values in `by` become one line, which shows `value` in a
    column for each value of `across`.
    """

    rows: list[dict[str, Cell]]
    by: list[str]
    across: str = ""
    value: str = ""

    def grid(self) -> tuple[list[str], list[list[Cell]]]:
        """Return the headings, and the lines below them."""
        if not self.across:
            return self.by, [[row[name] for name in self.by] for row in self.rows]
        columns = list(dict.fromkeys(row[self.across] for row in self.rows))
        lines: dict[tuple[Cell, ...], dict[Cell, Cell]] = {}
        for row in self.rows:
            lines.setdefault(tuple(row[name] for name in self.by), {})[row[self.across]] = row[self.value]
        headings = [f"{column:,}" if isinstance(column, int) else str(column) for column in columns]
        headings[0] = f"{self.across} {headings[0]}"
        grid = [[*key, *(cells.get(column) for column in columns)] for key, cells in lines.items()]
        return [*self.by, *headings], grid


@dataclass
class Simulation:
    """The sections of a simulation. Nothing in it is timed or verified, so `correct` is always True."""

    title: str
    sections: dict[str, Section]
    notes: list[str]
    simulated: bool = True
    correct: ClassVar[bool] = True
