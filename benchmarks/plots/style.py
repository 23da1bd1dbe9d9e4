"""The style that all plots share: colours, the width of a page, the file formats."""

import textwrap
from pathlib import Path
from typing import Any

from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

# These colours can be distinguished with colour blindness (Okabe and Ito 2008); the markers differ, too.
STYLES = [
    *zip(("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#000000"), "osD^vP*", strict=True),
]
LINES = ("-", "--")  # the second is used after all colours
OURS, PEER, FAINT = "#0072B2", "#E69F00", "#767676"
PEERS = [(FAINT, "x"), ("#000000", "+"), ("#A0522D", "1")]
WIDTH = 8.4  # inches, the column width of a README

SETTINGS: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "lines.markersize": 4.5,
    "legend.fontsize": 8.5,
    "figure.titlesize": 10.5,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",  # text is not converted to paths
    "svg.hashsalt": "dltrain",  # the same results give the same file
}


def new_figure(height: float, title: str) -> Figure:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.suptitle("\n".join(textwrap.wrap(title, 90)))
    return figure


def curve_style(index: int) -> dict[str, Any]:
    colour, marker = STYLES[index % len(STYLES)]
    return {"color": colour, "marker": marker, "linestyle": LINES[index // len(STYLES) % len(LINES)]}


def peer_style(index: int) -> dict[str, Any]:
    colour, marker = PEERS[index % len(PEERS)]
    return {"color": colour, "marker": marker, "linestyle": ":"}


def number_logarithms(axis: Axis) -> None:
    """Label the axis at 1, 2, 5 times powers of ten, without exponents."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_locator(NullLocator())


def save(figure: Figure, path: Path) -> list[Path]:
    """Save the figure as PNG and as SVG, at a path without suffix; return both paths."""
    paths = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg")]
    figure.savefig(paths[0], dpi=130)
    figure.savefig(paths[1], metadata={"Date": None})
    return paths
