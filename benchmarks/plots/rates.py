"""Step time over the rate of the hosts' links, and the rates at which each codec breaks even."""

import math
import statistics
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.break_even import Curve, at, crossings, faster_in
from benchmarks.ddp_ranks import FP16, PLAIN
from benchmarks.harness import Table
from benchmarks.plots.style import curve_style, new_figure, number_logarithms, peer_style

LINK = "link, Gbit/s"
AGAINST = (PLAIN, FP16)  # the peers for which break-even rates are shown
NO_LIMIT = 2.2  # steps without a limit are drawn at this multiple of the highest rate


def curves_of(table: Table) -> tuple[dict[str, Curve], dict[str, Curve], dict[str, float]]:
    """Return, by side, our curves over the rate, the peers' curves, and the times with links without a limit."""
    ours: dict[str, dict[float, float]] = {}
    peers: dict[str, dict[float, float]] = {}
    free = {}
    for row in table.rows:
        if not row.samples:
            continue
        side = row.side.partition(": ")[0]  # without the codec that "auto" selected
        curve = (ours if row.ours else peers).setdefault(side, {})
        if row.x is None:
            free[side] = statistics.median(row.samples)
        else:
            curve[row.x] = statistics.median(row.samples)
    return ours, peers, free


def by_rate(table: Table) -> Figure:
    """Draw the curves, rings at the crossings of ours and a peer's, and below, for each peer, where ours is faster."""
    ours, peers, free = curves_of(table)
    rates = sorted({rate for curve in (*ours.values(), *peers.values()) for rate in curve})
    against = [peer for peer in AGAINST if peer in peers]
    foot = 0.2 * len(ours) + 0.25
    figure = new_figure(4.4 + foot * len(against), table.title)
    upper, *feet = figure.subplots(
        1 + len(against), 1, squeeze=False, sharex=True, height_ratios=[3.6, *[foot] * len(against)]
    )[:, 0]
    styles = {side: curve_style(index) for index, side in enumerate(ours)}
    styles |= {peer: peer_style(index) for index, peer in enumerate(peers)}
    beyond = NO_LIMIT * (rates[-1] if rates else 1.0)
    for side, curve in (peers | ours).items():
        upper.plot(list(curve), [1e3 * seconds for seconds in curve.values()], **styles[side], label=side)
        if side in free:
            upper.plot(beyond, 1e3 * free[side], **styles[side] | {"linestyle": ""})
    for peer, axes in zip(against, feet, strict=True):
        for side, curve in ours.items():
            for rate, _ in crossings(curve, peers[peer]):
                ring = {"marker": "o", "markersize": 10, "markerfacecolor": "none", "linestyle": ""}
                upper.plot(rate, 1e3 * at(curve, rate), **ring, color=styles[side]["color"])
        stretches(axes, ours, peers[peer], styles)
        faster = [(line, side) for line, side in enumerate(ours) if free.get(side, math.inf) < free.get(peer, 0.0)]
        for line, side in faster:
            axes.plot(beyond, line, **styles[side] | {"linestyle": ""})
        axes.set_title(f"faster than {peer}", loc="left")
    upper.set(xscale="log", yscale="log", ylabel="median ms per step")
    number_logarithms(upper.yaxis)
    upper.legend(loc="upper right")
    (feet or [upper])[-1].set_xlabel("rate of each host's link, Gbit/s (rings: crossings of two curves)")
    ticks = {rate: f"{rate:g}" for rate in rates} | ({beyond: "no limit"} if free else {})
    upper.set_xticks(list(ticks), list(ticks.values()))
    upper.minorticks_off()
    return figure


def stretches(axes: Axes, ours: dict[str, Curve], other: Curve, styles: dict[str, dict[str, Any]]) -> None:
    """Draw a line for each of ours where it is faster, with the rates at which this changes."""
    for line, (side, curve) in enumerate(ours.items()):
        for begin, end in faster_in(curve, other):
            axes.plot([begin, end], [line] * 2, color=styles[side]["color"], linewidth=6, solid_capstyle="butt")
        for rate, below in crossings(curve, other):
            beside = {"xytext": (3, 4) if below else (-3, -4), "ha": "left" if below else "right", "va": "center"}
            axes.annotate(f"{rate:.3g}", (rate, line), textcoords="offset points", **beside, fontsize=8)
    axes.set_yticks(range(len(ours)), list(ours))
    axes.set_ylim(len(ours) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params("y", length=0)
