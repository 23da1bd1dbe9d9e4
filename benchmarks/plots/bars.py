"""Horizontal bars with a panel for each workload: times, and percentages of the memory limit."""

from collections.abc import Callable
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.harness import Row, Spread, Table
from benchmarks.plots.style import FAINT, OURS, PEER, new_figure

LIMIT = "% of limit"


def times(table: Table) -> Figure:
    """Draw the times of all timed rows."""

    def draw(axes: Axes, rows: list[Row]) -> None:
        spreads = [row.time for row in rows if row.time]
        middle = [1e3 * time.median for time in spreads]
        errors = [
            [1e3 * (time.median - time.q1) for time in spreads],
            [1e3 * (time.q3 - time.median) for time in spreads],
        ]
        bars(axes, rows, middle, [in_words(time) for time in spreads], errors)
        axes.set_xlim(0, 1.25 * max(1e3 * time.q3 for time in spreads))

    return panels(table, [row for row in table.rows if row.time], "ms, median and quartiles", draw)


def limits(table: Table) -> Figure:
    """Draw the percentage of the limit of each row that has one, and its time, as sides may move different bytes."""

    def draw(axes: Axes, rows: list[Row]) -> None:
        shares = [row.figures[LIMIT] or 0.0 for row in rows]
        labels = [f"{row.figures[LIMIT]:.0f} %, {in_words(row.time)}" for row in rows if row.time]
        bars(axes, rows, shares, labels)
        axes.axvline(100, color=FAINT, linestyle="--", linewidth=1)
        axes.set_xlim(0, 1.5 * max(100, *shares))
        axes.set_xticks(range(0, 101, 25))

    rows = [row for row in table.rows if row.time and row.figures.get(LIMIT) is not None]
    return panels(table, rows, "% of the memory limit (dashed) in the same run, and median time", draw)


def panels(table: Table, rows: list[Row], label: str, draw: Callable[[Axes, list[Row]], None]) -> Figure:
    """Draw a panel for each workload, in two columns if there are four or more."""
    groups = {workload: list(group) for workload, group in groupby(rows, key=lambda row: row.workload)}
    columns = 1 if len(groups) < 4 else 2
    lines = [list(groups.items())[at : at + columns] for at in range(0, len(groups), columns)]
    heights = [max(len(group) for _, group in line) + 1.6 for line in lines]
    figure = new_figure(0.2 * sum(heights) + 1.1, table.title)
    grid = figure.subplots(len(lines), columns, squeeze=False, height_ratios=heights)
    for axes in grid.flat[len(groups) :]:
        axes.set_axis_off()
    for axes, (workload, group) in zip(grid.flat, groups.items(), strict=False):
        draw(axes, group)
        axes.set_title(workload, loc="left", fontweight="bold")
        axes.set_ylim(len(group) - 0.4, -0.6)  # first row on top; bars of the same width in all panels of a line
        axes.grid(visible=False, axis="y")
    figure.supxlabel(label, fontsize=9)
    named = [
        Patch(facecolor=OURS, edgecolor="white", label="ours"),
        Patch(facecolor=PEER, edgecolor="white", hatch="///", label="peers"),
    ]
    figure.legend(handles=named, loc="outside lower right", ncols=2)
    return figure


def bars(
    axes: Axes, rows: list[Row], values: list[float], labels: list[str], errors: list[list[float]] | None = None
) -> None:
    ours = [row.ours or row.side.startswith("ours") for row in rows]  # some of ours are timed against another of ours
    drawn = axes.barh(
        range(len(rows)),
        values,
        0.75,
        xerr=errors,
        color=[OURS if mine else PEER for mine in ours],
        hatch=["" if mine else "///" for mine in ours],
        edgecolor="white",
        error_kw={"elinewidth": 1, "capsize": 2},
    )
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    axes.bar_label(drawn, labels, padding=5, fontsize=8, bbox=behind)
    axes.set_yticks(range(len(rows)), [row.side for row in rows])


def in_words(time: Spread) -> str:
    return f"{1e3 * time.median:.3g} ms" if time.median >= 1e-3 else f"{1e6 * time.median:.3g} us"
