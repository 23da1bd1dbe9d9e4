"""The report of convergence.py: a table for each recipe, where not to compress, and the picture."""

import math
import statistics
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from rich.markup import escape
from rich.table import Table
from scipy.stats import t as student

# Colours of Okabe and Ito, which can be distinguished with colour blindness, and a marker for each.
LOOKS = {"plain": ("black", "D"), "within": ("#0072B2", "o"), "better": ("#009E73", "^"), "worse": ("#D55E00", "v")}
FINE = {"within", "better"}


@dataclass(frozen=True)
class Run:
    recipe: str
    contestant: str
    seed: int
    score: float | None = None  # None: not finite
    loss: float | None = None  # mean over the last training batches and all ranks; None: not finite
    wire_bytes: float | None = None  # bytes sent per step and rank
    seconds: float | None = None
    error: str | None = None  # why it does not run


@dataclass(frozen=True)
class Comparison:
    outcome: str
    differences: tuple[float, ...] = ()  # score minus plain's score, for each seed
    deviations: float | None = None  # their mean, in standard deviations of plain; None: plain's deviation is 0


def trouble(runs: list[Run]) -> str | None:
    """Return why the runs have no mean; None if they have one."""
    if errors := [run.error for run in runs if run.error is not None]:
        return f"does not run: {errors[0]}"
    diverged = sum(run.score is None or run.loss is None for run in runs)
    return f"diverged: {diverged} of {len(runs)}" if diverged else None


def compare(runs: list[Run], plain: list[Run], higher_is_better: bool) -> Comparison:
    """Classify the mean: within one standard deviation of plain's mean, better, or worse."""
    if found := trouble(runs):
        return Comparison(found.split(":")[0])
    if trouble(plain):
        return Comparison("unknown")
    differences = tuple(run.score - base.score for run, base in zip(runs, plain, strict=True))
    difference, deviation = statistics.fmean(differences), statistics.stdev(run.score for run in plain)
    if abs(difference) <= deviation:
        outcome = "within"
    else:
        outcome = "better" if (difference > 0) == higher_is_better else "worse"
    return Comparison(outcome, differences, difference / deviation if deviation else None)


def bound(differences: tuple[float, ...], higher_is_better: bool) -> float:
    """Return how much worse than plain the mean is at most, with a confidence of 95 % (one-sided t interval)."""
    worse = [-difference if higher_is_better else difference for difference in differences]
    error = statistics.stdev(worse) / math.sqrt(len(worse))
    return statistics.fmean(worse) + float(student.ppf(0.95, len(worse) - 1)) * error


def by_contestant(runs: list[Run], recipe: str) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.recipe == recipe:
            groups.setdefault(run.contestant, []).append(run)
    return groups


def mean_std(figures: list[float], style: str) -> str:
    return f"{style.format(statistics.fmean(figures))} ± {style.replace('+', '').format(statistics.stdev(figures))}"


def score_of(runs: list[Run], style: str) -> str:
    return trouble(runs) or mean_std([run.score for run in runs], style)


def line(runs: list[Run], about: dict[str, Any]) -> str:
    """Return the line that is printed after all seeds of a contestant."""
    return f"{about['title']}, {runs[0].contestant}: {about['metric']} {score_of(runs, about['style'])}"


def table(groups: dict[str, list[Run]], about: dict[str, Any], world_size: int) -> Table:
    plain, style = groups["plain"], about["style"]
    view = Table(
        title=f"{about['title']}: mean ± standard deviation of {len(plain)} seeds",
        caption=f"{about['steps']} steps of batch {about['batch_size']}, {world_size} ranks; lr {about['lr']:g}\n"
        f"{about['optimizer']}; {about['schedule']}",
    )
    view.add_column("gradients as")
    heads = (
        "bytes",
        about["metric"],
        "from plain,\nseed by seed",
        "at most worse\nby (95 %)",
        "in plain's\ndeviations",
    )
    for head in heads:
        view.add_column(head, justify="right")
    for contestant, runs in groups.items():
        found = compare(runs, plain, about["higher_is_better"])
        sent = runs[0].wire_bytes
        share = "" if sent is None else f"{sent / plain[0].wire_bytes:.1%}"
        differences, most, outcome = "", "", found.outcome
        if contestant == "plain":
            outcome = ""
        elif found.differences:
            differences = mean_std([*found.differences], style.replace("{:", "{:+"))
            most = style.format(bound(found.differences, about["higher_is_better"]))
        if outcome and found.deviations is not None:
            outcome = f"{found.deviations:+.1f} {outcome}"
        view.add_row(contestant, share, escape(score_of(runs, style)), differences, most, outcome)
    return view


def markdown(runs: list[Run], recipes: dict[str, Any]) -> str:
    """Return a table with a row per contestant and a column per recipe. In brackets: the difference from plain's mean
    in plain's standard deviations; in bold: worse by more than one."""
    plain = {name: by_contestant(runs, name)["plain"] for name in recipes}
    rows = [["gradients as", "bytes", *(f"{about['title']}: {about['metric']}" for about in recipes.values())]]
    for contestant in dict.fromkeys(run.contestant for run in runs):
        cells, shares = [], set()
        for name, about in recipes.items():
            some = by_contestant(runs, name)[contestant]
            found = compare(some, plain[name], about["higher_is_better"])
            cell = score_of(some, about["style"])
            if contestant != "plain" and found.deviations is not None:
                cell += f" ({found.deviations:+.1f})"
            cells.append(cell if contestant == "plain" or found.outcome in FINE else f"**{cell}**")
            if some[0].wire_bytes is not None:
                shares.add(f"{some[0].wire_bytes / plain[name][0].wire_bytes:3.0%}")
        rows.append([contestant, " to ".join(sorted({min(shares), max(shares)})) if shares else "", *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows)


def summary(runs: list[Run], recipes: dict[str, Any]) -> list[str]:
    """Return sentences that say where not to compress, according to these runs."""
    where: dict[str, dict[str, list[str]]] = {}  # contestant -> outcome -> recipes
    for name, about in recipes.items():
        groups = by_contestant(runs, name)
        for contestant, some in groups.items():
            found = compare(some, groups["plain"], about["higher_is_better"])
            by = "" if found.deviations is None else f" ({found.deviations:+.1f})"
            where.setdefault(contestant, {}).setdefault(found.outcome, []).append(about["title"] + by)
    del where["plain"]
    lines = []
    for contestant, found in where.items():
        bad = [
            f"{outcome} on {' and '.join(found[outcome])}" for outcome in found if outcome not in ("within", "better")
        ]
        if bad:
            lines.append(f"{contestant}: {'; '.join(bad)}")
    good = [contestant for contestant, found in where.items() if found.keys() <= FINE]
    seeds = len({run.seed for run in runs})
    return [
        "When not to use them, according to these runs (in brackets: the difference in standard deviations of plain):"
        if lines
        else "None is worse than plain by more than its standard deviation.",
        *lines,
        f"Within a standard deviation of plain, or better, everywhere: {', '.join(good) or 'none'}.",
        f"Chance alone moves a mean of {seeds} seeds by {1 / math.sqrt(seeds):.2f} standard deviations.",
    ]


def picture(runs: list[Run], recipes: dict[str, Any]) -> Figure:
    """Draw a panel for each recipe: the seeds pale, their mean dark, and plain's standard deviation as a band."""
    across = min(2, len(recipes))
    down = math.ceil(len(recipes) / across)
    figure = Figure(figsize=(10, 0.6 + 3.9 * down), layout="constrained")
    names = list(dict.fromkeys(run.contestant for run in runs))
    panels = figure.subplots(down, across, squeeze=False, sharey=True)
    for axes in panels.flat[len(recipes) :]:
        axes.remove()
    for axes, (name, about) in zip(panels.flat, recipes.items(), strict=False):
        panel(axes, by_contestant(runs, name), names, about)
    marks = [
        Line2D([], [], color=color, marker=mark, linestyle="", label=word) for word, (color, mark) in LOOKS.items()
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False)
    return figure


def panel(axes: Any, groups: dict[str, list[Run]], names: list[str], about: dict[str, Any]) -> None:
    plain = [run.score for run in groups["plain"]]
    if not trouble(groups["plain"]):
        mean, deviation = statistics.fmean(plain), statistics.stdev(plain)
        axes.axvspan(mean - deviation, mean + deviation, color="0.88", linewidth=0)
        axes.axvline(mean, color="0.5", linewidth=1)
    for contestant, runs in groups.items():
        row = names.index(contestant)
        found = compare(runs, groups["plain"], about["higher_is_better"])
        if problem := trouble(runs):
            axes.text(0.5, row, problem.split(":")[0], transform=axes.get_yaxis_transform(), ha="center", va="center")
            continue
        color, mark = LOOKS.get("plain" if contestant == "plain" else found.outcome, ("0.5", "o"))
        scores = [run.score for run in runs]
        axes.scatter(scores, [row] * len(scores), s=22, color=color, alpha=0.4, linewidth=0)
        axes.scatter([statistics.fmean(scores)], [row], s=52, color=color, marker=mark)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="y", alpha=0.25)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda score, _: about["style"].format(score)))
    axes.locator_params(axis="x", nbins=5)
    better = "right" if about["higher_is_better"] else "left"
    axes.set(title=about["title"], xlabel=f"{about['metric']} (better: {better})")
