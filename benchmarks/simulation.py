"""What a case returns that simulates: figures that come from a model, where a Table has those that were timed."""

from dataclasses import dataclass
from typing import ClassVar

Cell = str | float | None


@dataclass
class Section:
    """Rows of figures, all with the same keys.

    Shown are the columns `by`. With `across`, rows that are alike in these become one line, which has a column for each
    of the values of `across`, and `value` under it.
    """

    rows: list[dict[str, Cell]]
    by: list[str]
    across: str = ""
    value: str = ""

    def grid(self) -> tuple[list[str], list[list[Cell]]]:
        """The headings, and the lines under them."""
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
    """Nothing in it was timed, or could be wrong in a run: it is `correct` as far as its model is."""

    title: str
    sections: dict[str, Section]
    notes: list[str]
    simulated: bool = True
    correct: ClassVar[bool] = True
