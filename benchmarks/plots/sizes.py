"""Time over message size: a curve for each side and, below, the fastest plan of each range of sizes."""

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks.break_even import crossings
from benchmarks.harness import Table
from benchmarks.plots.style import curve_style, new_figure, number_logarithms, peer_style

AUTO = "auto"
LETTER = 0.075  # inches


@dataclass
class Curve:
    """A side at all sizes; `kind` is the codec and the levels of its plan. The name of a peer includes its kind."""

    name: str
    kind: str
    ours: bool
    seconds: dict[float, float] = field(default_factory=dict)
    chosen: dict[float, str] = field(default_factory=dict)  # plans that auto selected, by size


def curves_of(table: Table) -> list[Curve]:
    found: dict[str, Curve] = {}
    for row in table.rows:
        if row.x is not None and row.samples:
            side, _, chosen = row.side.partition(": ")
            plan, _, kind = side.partition(" ")
            curve = found.setdefault(side, Curve(plan.rstrip(",") if row.ours else side, kind, row.ours))
            curve.seconds[row.x] = statistics.median(row.samples)
            if chosen:
                curve.chosen[row.x] = chosen
    return list(found.values())


def by_size(table: Table) -> Figure:
    """Draw a panel for each kind; peers whose kind is none of ours are in all panels."""
    curves = curves_of(table)
    kinds = list(dict.fromkeys(curve.kind for curve in curves if curve.ours)) or [""]
    styles = style_of_each(curves)
    columns = 1 if len(kinds) == 1 else 2
    lines = -(-len(kinds) // columns)
    figure = new_figure(4.9 if columns == 1 else 3.9 * lines + 0.5, table.title)
    # With the constrained layout nested axes may differ in width; subplots of one grid have the same width.
    grid = figure.subplots(2 * lines, columns, squeeze=False, sharex=True, height_ratios=[5, 1] * lines)
    for axes in grid.flat:
        axes.set_visible(False)
    for index, kind in enumerate(kinds):
        upper, foot = grid[2 * (index // columns)][index % columns], grid[2 * (index // columns) + 1][index % columns]
        elsewhere = set(kinds) - {kind, ""}
        shown = [c for c in curves if c.kind == kind or (not c.ours and c.kind not in elsewhere)]
        for axes in (upper, foot):
            axes.set_visible(True)
        for curve in shown:
            upper.plot(*line(curve), **styles[curve.name], label=curve.name)
        upper.set(xscale="log", yscale="log", ylabel="median ms" if index % columns == 0 else "")
        number_logarithms(upper.yaxis)
        upper.set_title(kind or ("raw" if len(kinds) > 1 else ""), loc="left", fontweight="bold")
        bands(foot, shown, styles, inches=6.2 if columns == 1 else 2.7)
        name_sizes(foot, sorted({x for curve in curves for x in curve.seconds}))
        foot.set_xlabel(table.x_label if index >= len(kinds) - columns else "")
    by_name = {}
    for axes in grid.flat:
        by_name |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(by_name.values(), by_name.keys(), loc="outside right center")
    return figure


def style_of_each(curves: list[Curve]) -> dict[str, dict[str, Any]]:
    ours = list(dict.fromkeys(curve.name for curve in curves if curve.ours and curve.name != AUTO))
    peers = list(dict.fromkeys(curve.name for curve in curves if not curve.ours))
    styles = {plan: curve_style(index) for index, plan in enumerate(ours)}
    styles |= {plan: peer_style(index) for index, plan in enumerate(peers)}
    return styles | {AUTO: {"color": "#000000", "marker": "o", "markerfacecolor": "none", "linestyle": "-."}}


def line(curve: Curve) -> tuple[list[float], list[float]]:
    return list(curve.seconds), [1e3 * seconds for seconds in curve.seconds.values()]


def fastest(curves: list[Curve]) -> list[tuple[float, float, str]]:
    """Return ranges of sizes, with the fastest plan of each; a range ends where two curves cross."""
    by_plan = {curve.name: curve.seconds for curve in curves}
    sizes = sorted({x for seconds in by_plan.values() for x in seconds})
    best = [min((s for s in by_plan if x in by_plan[s]), key=lambda s: by_plan[s][x]) for x in sizes]
    stretches, begin = [], sizes[0]
    for x, following, plan, then in zip(sizes, sizes[1:], best, best[1:], strict=False):
        if plan != then:
            ends = {at: by_plan[plan][at] for at in (x, following) if at in by_plan[plan]}
            met = crossings(ends, by_plan[then])
            end = met[0][0] if met else (x * following) ** 0.5
            stretches.append((begin, end, plan))
            begin = end
    return [*stretches, (begin, sizes[-1], best[-1])]


def bands(axes: Axes, curves: list[Curve], styles: dict[str, dict[str, Any]], inches: float) -> None:
    """Draw the fastest plan, named if its range is long enough, and below it the plan that auto selected, if known.

    `inches`: the approximate width of the axes."""
    # auto is one of our plans, so it is a curve of its own only where no plan was timed by name.
    plans = any(curve.ours and curve.name != AUTO for curve in curves)
    named = [curve for curve in curves if curve.name != AUTO or not plans]
    rows = []
    if named:
        rows.append("fastest")
        stretches = fastest(named)
        whole = math.log(stretches[-1][1] / stretches[0][0])
        for begin, end, name in stretches:
            colour = styles[name]["color"]
            axes.fill_betweenx([0.1, 0.9], begin, end, facecolor=colour, edgecolor="white", linewidth=0.8)
            if inches * math.log(end / begin) / whole > LETTER * len(name):
                text = "white" if sum(to_rgb(colour)) < 1.5 else "black"
                axes.text((begin * end) ** 0.5, 0.5, name, ha="center", va="center", fontsize=7.5, color=text)
    for curve in curves:
        if curve.chosen:
            rows.append("selected by auto")
            for x, plan in curve.chosen.items():
                if plan in styles:
                    axes.plot(x, 1.5, **styles[plan] | {"markersize": 7, "linestyle": ""})
                else:  # the plan was not timed by name
                    axes.text(x, 1.5, plan, ha="center", va="center", fontsize=7.5)
    axes.set_yticks([0.5 + at for at in range(len(rows))], rows)
    axes.set_ylim(max(1, len(rows)), 0)
    axes.grid(visible=False, axis="y")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params("y", length=0)


def name_sizes(axes: Axes, sizes: list[float]) -> None:
    axes.set_xscale("log")
    every = -(-len(sizes) // 7)
    axes.set_xticks(sizes[::every])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: in_units(x)))
    axes.xaxis.set_minor_locator(NullLocator())


def in_units(nbytes: float) -> str:
    exponent = 3 if nbytes >= 2**30 else 2 if nbytes >= 2**20 else 1 if nbytes >= 2**10 else 0
    return f"{nbytes / 1024**exponent:.4g} {['B', 'KiB', 'MiB', 'GiB'][exponent]}"
