"""The error of each codec over its bits per element."""

import math

from matplotlib.figure import Figure

from benchmarks.harness import Row, Table
from benchmarks.plots.style import curve_style, new_figure

BITS, ERROR = "bits/element", "rms error, "
ALIKE = 0.1  # codecs whose bits differ by a smaller fraction are drawn next to each other
APART, ASIDE = 0.11, 0.025  # distances, as fractions of the bits: between codecs, and between the points of a codec


def by_bits(table: Table) -> Figure:
    """Draw a group of points for each codec, with one point for each kind of data."""
    rows = sorted((row for row in table.rows if row.figures.get(BITS)), key=bits)
    data = list(dict.fromkeys(name for row in rows for name in row.figures if name.startswith(ERROR)))
    lossy = [row for row in rows if any(row.figures.get(name) for name in data)]
    clusters = gather(lossy)
    figure = new_figure(4.4, f"Error of each codec over its bits per element: {table.title}")
    axes = figure.subplots()
    for cluster in clusters:
        for position, row in enumerate(cluster):
            center = bits(row) * (1 + APART * (position - (len(cluster) - 1) / 2))
            lowest = min(error for name in data if (error := row.figures.get(name)))
            for index, name in enumerate(data):
                x = center * (1 + ASIDE * (index - (len(data) - 1) / 2))
                style = curve_style(index) | {"linestyle": "", "markersize": 6}
                axes.plot(x, row.figures.get(name) or math.nan, **style, label=name.removeprefix(ERROR))
            below = {"xytext": (0, -8), "textcoords": "offset points", "ha": "center", "va": "top"}
            axes.annotate(row.side, (center, lowest), **below, fontweight="bold")
    axes.set(xscale="log", yscale="log", xlabel="bits per element", ylabel="rms error over the rms of the data")
    labels = [", ".join(dict.fromkeys(f"{bits(row):.4g}" for row in cluster)) for cluster in clusters]
    axes.set_xticks([bits(cluster[0]) for cluster in clusters], labels)
    axes.minorticks_off()
    axes.margins(0.08, 0.15)
    if exact := [row.side for row in rows if row not in lossy]:
        axes.set_title(f"without any error: {', '.join(exact)}", loc="left")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(handles.values(), handles.keys(), title="data")
    return figure


def bits(row: Row) -> float:
    return row.figures[BITS] or 0.0


def gather(rows: list[Row]) -> list[list[Row]]:
    """Group the codecs that need about the same number of bits."""
    clusters: list[list[Row]] = []
    for row in rows:
        if clusters and bits(row) < bits(clusters[-1][0]) * (1 + ALIKE):
            clusters[-1].append(row)
        else:
            clusters.append([row])
    return clusters
