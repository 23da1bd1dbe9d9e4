"""Plots of simulated figures; the title of each says that they are simulated."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from benchmarks.plots.style import curve_style, new_figure
from benchmarks.simulation import Cell, Section

SIMULATED = "SIMULATED, not measured"


def efficiency(section: Section) -> Figure:
    """Draw a row of panels for each model, with a column for each bandwidth and a curve for each codec."""
    models, links = unique(section, "model"), unique(section, "link, Gbit/s")
    ranks = unique(section, "ranks")
    title = f"{SIMULATED}: training efficiency from {ranks[0]:,} to {ranks[-1]:,} ranks, by codec"
    figure = new_figure(2.2 * len(models) + 0.8, title)
    grid = figure.subplots(len(models), len(links), squeeze=False, sharex=True, sharey=True)
    for model, line in zip(models, grid, strict=True):
        for link, axes in zip(links, line, strict=True):
            rows = [row for row in section.rows if (row["model"], row["link, Gbit/s"]) == (model, link)]
            curves(axes, rows, "codec", unique(section, "codec"), "efficiency %")
            axes.set_ylim(0, 103)
        line[0].set_ylabel(f"{model}\nscaling efficiency, %")
    for link, upper, lower in zip(links, grid[0], grid[-1], strict=True):
        upper.set_title(f"{link:g} Gbit/s")
        lower.set_xlabel("ranks")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside right center")
    return figure


def all_reduces(section: Section) -> Figure:
    """Draw a panel for each codec, with a curve for each plan."""
    codecs, plans = unique(section, "codec"), unique(section, "plan")
    title = f"{SIMULATED}: time of an all-reduce, by plan and codec"
    figure = new_figure(3.9, title)
    grid = figure.subplots(1, len(codecs), squeeze=False, sharey=True)
    for codec, axes in zip(codecs, grid[0], strict=True):
        curves(axes, [row for row in section.rows if row["codec"] == codec], "plan", plans, "ms")
        axes.set(title=codec, yscale="log", xlabel="ranks")
    grid[0][0].set_ylabel("all-reduce, ms")
    fullest = max(grid[0], key=lambda axes: len(axes.get_lines()))
    figure.legend(*fullest.get_legend_handles_labels(), loc="outside right center")
    return figure


def topologies(section: Section) -> Figure:
    """Draw a row of panels for each figure, with a column for each layout and a curve for each topology."""
    layouts, figures, names = (unique(section, name) for name in ("hosts", "what", "topology"))
    figure = new_figure(2.4 * len(figures) + 0.8, f"{SIMULATED}: time of an exchange and of a step, by topology")
    grid = figure.subplots(len(figures), len(layouts), squeeze=False, sharex=True, sharey="row")
    for what, line in zip(figures, grid, strict=True):
        for layout, axes in zip(layouts, line, strict=True):
            rows = [row for row in section.rows if (row["hosts"], row["what"]) == (layout, what)]
            curves(axes, rows, "topology", names, "ms")
            axes.set_yscale("log")
        line[0].set_ylabel(f"{what}, ms")
    for layout, upper, lower in zip(layouts, grid[0], grid[-1], strict=True):
        upper.set_title(f"hosts: {layout}")
        lower.set_xlabel("ranks")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside right center")
    return figure


def unique(section: Section, name: str) -> list[Cell]:
    return list(dict.fromkeys(row[name] for row in section.rows))


def curves(axes: Axes, rows: list[dict[str, Cell]], name: str, values: list[Cell], y: str) -> None:
    for index, value in enumerate(values):
        mine = sorted((row["ranks"], row[y]) for row in rows if row[name] == value)
        if mine:
            axes.plot(*zip(*mine, strict=True), **curve_style(index), label=value)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=8))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
