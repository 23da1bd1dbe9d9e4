"""Plots of what was simulated; each says so in its title."""

from pathlib import Path

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from benchmarks.simulation import Cell, Section

# Told apart by those who are colour-blind, too (Okabe and Ito 2008), and by their markers.
STYLES = [
    *zip(("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7"), "osD^vP*", strict=True),
]
SIMULATED = "SIMULATED, not measured"


def efficiency(folder: Path, section: Section) -> Path:
    """A row of panels for each model, a column for each bandwidth, a curve for each codec."""
    models, links = unique(section, "model"), unique(section, "link, Gbit/s")
    size = (3.2 * len(links) + 1.2, 2.9 * len(models) + 0.9)
    figure, grid = pyplot.subplots(
        len(models), len(links), figsize=size, layout="constrained", squeeze=False, sharex=True, sharey=True
    )
    for model, line in zip(models, grid, strict=True):
        for link, axes in zip(links, line, strict=True):
            rows = [row for row in section.rows if (row["model"], row["link, Gbit/s"]) == (model, link)]
            curves(axes, rows, "codec", unique(section, "codec"), "efficiency %")
            axes.set(title=f"{model}, {link:g} Gbit/s", ylim=(0, 103))
        line[0].set_ylabel("scaling efficiency, %")
    ranks = unique(section, "ranks")
    title = f"{SIMULATED}: training efficiency from {ranks[0]:,} to {ranks[-1]:,} ranks, by codec"
    return save(figure, grid[0][0], title, folder / "simulated-efficiency.png")


def all_reduces(folder: Path, section: Section) -> Path:
    """A panel for each codec, a curve for each plan."""
    codecs = unique(section, "codec")
    figure, grid = pyplot.subplots(
        1, len(codecs), figsize=(3.4 * len(codecs) + 1.2, 4.2), layout="constrained", squeeze=False, sharey=True
    )
    for codec, axes in zip(codecs, grid[0], strict=True):
        rows = [row for row in section.rows if row["codec"] == codec]
        curves(axes, rows, "plan", unique(section, "plan"), "ms")
        axes.set(title=codec, yscale="log")
    grid[0][0].set_ylabel("all-reduce, ms")
    fullest = max(grid[0], key=lambda axes: len(axes.get_lines()))
    return save(
        figure, fullest, f"{SIMULATED}: time of an all-reduce, by plan and codec", folder / "simulated-allreduce.png"
    )


def unique(section: Section, name: str) -> list[Cell]:
    return list(dict.fromkeys(row[name] for row in section.rows))


def curves(axes: Axes, rows: list[dict[str, Cell]], name: str, values: list[Cell], y: str) -> None:
    for value, (colour, marker) in zip(values, STYLES, strict=False):
        mine = sorted((row["ranks"], row[y]) for row in rows if row[name] == value)
        if mine:
            axes.plot(*zip(*mine, strict=True), color=colour, marker=marker, markersize=4, label=value)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=8))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.grid(alpha=0.3)
    axes.set_xlabel("ranks")


def save(figure: pyplot.Figure, labelled: Axes, title: str, path: Path) -> Path:
    figure.legend(*labelled.get_legend_handles_labels(), loc="outside right center")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
