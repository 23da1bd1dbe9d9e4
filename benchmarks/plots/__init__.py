"""Draw the results that --json FILE has saved, each plot as PNG and as SVG."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from benchmarks import saved_results
from benchmarks.harness import Table
from benchmarks.plots import bars, errors, rates, simulated, sizes
from benchmarks.plots.style import SETTINGS, save
from benchmarks.simulation import Simulation

OF_SECTIONS = {
    "all-reduce": ("simulated-allreduce", simulated.all_reduces),
    "topologies": ("simulated-topologies", simulated.topologies),
    "training": ("simulated-efficiency", simulated.efficiency),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a file that --json wrote")
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of the plots, named by their cases")


def run(options: argparse.Namespace) -> int:
    for name, table in saved_results.load(options.file, "FILE").tables.items():
        for path in draw(options.folder, name, table):
            print(f"wrote {path}")
    return 0


def draw(folder: Path, name: str, table: Table | Simulation) -> list[Path]:
    """Draw all plots that the table has data for; return their files."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(SETTINGS):
        return [path for stem, figure in figures(name, table) for path in save(figure, folder / stem)]


def figures(name: str, table: Table | Simulation) -> Iterator[tuple[str, Figure]]:
    if isinstance(table, Simulation):
        for part, section in table.sections.items():
            if part in OF_SECTIONS:
                stem, make = OF_SECTIONS[part]
                yield stem, make(section)
        return
    timed = [row for row in table.rows if row.time]
    if table.x_label == rates.LINK:
        yield name, rates.by_rate(table)
    elif len({row.x for row in timed}) > 1:
        yield name, sizes.by_size(table)
    elif timed:
        yield name, bars.times(table)
    if any(row.figures.get(bars.LIMIT) is not None for row in timed):
        yield f"{name}-limit", bars.limits(table)
    if any(errors.BITS in row.figures for row in table.rows):
        yield f"{name}-error", errors.by_bits(table)
