"""Train with larger and larger batches for the same number of epochs: SGD, LARS, AdamW and LAMB on the digits.

The learning rate grows with the batch: in proportion (linear scaling rule; Goyal et al. 2017) or with its square root
(You et al. 2020, for LAMB). It rises to its peak over the first epochs (gradual warm-up; Goyal et al. 2017), and then
decays polynomially to 0 (as for LARS in You, Gitman & Ginsburg 2017).

With --statistics the model has batch normalization. "ghost" takes the statistics of each replica's part of the batch
(Hoffer et al. 2017), as DDP does with BatchNorm; "sync" takes those of the whole batch, as SyncBatchNorm does. Replicas
are simulated in one process: torch's SyncBatchNorm exchanges statistics between ranks only on GPUs.

python examples/large_batch.py
python examples/large_batch.py --statistics none ghost sync --seeds 5
python examples/large_batch.py --rules sqrt --optimizers lamb adamw --batches 256 512
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any

try:
    import torch
    import torch.nn.functional as F
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator, PercentFormatter
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table
    from tasks import TASKS, Task, loss
    from torch import Tensor, nn
    from torch.optim.lr_scheduler import LinearLR, PolynomialLR, SequentialLR

    from dltrain_ext import optim
except ModuleNotFoundError as missing:
    sys.exit(f"This example needs {missing.name}. In the repository's root: pip install '.[examples]'")

NAMES = {"sgd": "SGD", "lars": "LARS", "adamw": "AdamW", "lamb": "LAMB"}
COLORS = {"sgd": "tab:orange", "lars": "tab:blue", "adamw": "tab:green", "lamb": "tab:purple"}
LAYER_WISE, RIVALS = ("lars", "lamb"), ("sgd", "adamw")

# Learning rates at batch 16, tuned with 3 seeds and --validation: the best of five for each optimizer, half a decade
# apart, none at an edge. No other batch was tuned. Grids without normalization: SGD and larc 0.003 to 0.3, LARS 0.3 to
# 30, AdamW 0.0003 to 0.03, LAMB 0.001 to 0.1.
BASE_LR = {"sgd": 0.03, "adamw": 0.003, "lamb": 0.01}
LARS_LR = {"paper": 3.0, "tensorflow": 3.0, "larc": 0.03}
# The same with batch normalization. At batch 16 there is one replica, so both statistics are the same. Of LARS, only
# the preset paper was tuned, without 30.
NORMALIZED_LR = {"sgd": 0.03, "lars": 1.0, "adamw": 0.001, "lamb": 0.01}

RULES = {"linear": lambda factor: factor, "sqrt": math.sqrt, "none": lambda factor: 1.0}
PUBLISHED_RULE = {"sgd": "linear", "lars": "linear", "adamw": "sqrt", "lamb": "sqrt"}

STATISTICS = {"none": "no normalization", "ghost": "ghost statistics", "sync": "synchronized statistics"}


@dataclass(frozen=True)
class Run:
    statistics: str
    rule: str
    optimizer: str
    batch: int
    seed: int
    lr: float  # at its peak
    accuracy: float


Scores = dict[str, dict[int, list[float]]]  # optimizer -> batch -> the accuracy with each seed
Cells = dict[tuple[str, str], Scores]  # (statistics, rule) -> scores


class GhostBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d in a DistributedDataParallel whose replicas have `replica_batch` images at most, in one process.

    Each replica's part of a batch is normalized by its own mean and variance. The running statistics are those of the
    first replica, because DDP broadcasts rank 0's.
    """

    def __init__(self, features: int, replica_batch: int) -> None:
        super().__init__(features)
        self.replica_batch = replica_batch

    def forward(self, images: Tensor) -> Tensor:
        if not self.training:
            return super().forward(images)
        first, *others = images.tensor_split(math.ceil(len(images) / self.replica_batch))
        parts = [F.batch_norm(some, None, None, self.weight, self.bias, True, eps=self.eps) for some in others]
        return torch.cat([super().forward(first), *parts])


def with_statistics(model: Iterable[nn.Module], statistics: str, replica_batch: int) -> nn.Sequential:
    """Return the layers with batch normalization after each convolution, or as they are for "none"."""
    layers = []
    for layer in model:
        layers.append(layer)
        if isinstance(layer, nn.Conv2d) and statistics == "ghost":
            layers.append(GhostBatchNorm2d(layer.out_channels, replica_batch))
        elif isinstance(layer, nn.Conv2d) and statistics == "sync":
            layers.append(nn.SyncBatchNorm(layer.out_channels))  # the whole batch is in this process
    return nn.Sequential(*layers)


def make(name: str, params: Iterable[torch.nn.Parameter], lr: float, preset: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return optim.SGD(params, lr, momentum=0.9)
    if name == "adamw":
        return optim.AdamW(params, lr)
    if name == "lamb":
        return optim.LAMB(params, lr, preset="paper")
    # A trust ratio for every tensor, as in Algorithm 1 of the paper. Without it, biases would move by the plain, large
    # learning rate: without normalization the best accuracy was then only 98 %, even at batch 16.
    return optim.LARS(params, lr, momentum=0.9, preset=preset, adapt=True)


def scaled_lr(base_lr: float, batch: int, base_batch: int, rule: str) -> float:
    """Scale the learning rate by k, by the square root of k, or not, for k times the base batch."""
    return base_lr * RULES[rule](batch / base_batch)


def schedule(optimizer: torch.optim.Optimizer, base_lr: float, warmup: int, steps: int) -> SequentialLR:
    """Raise the learning rate linearly from the base to the optimizer's in `warmup` steps, then decay it to 0.

    The decay is quadratic in the remaining steps. A learning rate that is not above the base is constant in warm-up.
    """
    (group,) = optimizer.param_groups
    climb = LinearLR(optimizer, start_factor=min(1.0, base_lr / group["lr"]), total_iters=warmup)
    decay = PolynomialLR(optimizer, total_iters=steps - warmup, power=2.0)
    return SequentialLR(optimizer, [climb, decay], milestones=[warmup])


def train(
    task: Task,
    statistics: str,
    name: str,
    batch: int,
    seed: int,
    lr: float,
    args: argparse.Namespace,
    done: Callable[[], Any],
) -> float:
    """Return the accuracy after training."""
    torch.manual_seed(seed)  # weights and order are the same for every optimizer
    model = with_statistics(task.model(), statistics, args.replica_batch)
    optimizer = make(name, model.parameters(), lr, args.preset)
    inputs, targets = task.train
    steps = math.ceil(len(inputs) / batch)  # per epoch
    lrs = schedule(optimizer, args.base_lr[statistics][name], args.warmup * steps, args.epochs * steps)
    for _ in range(args.epochs):
        for some in torch.randperm(len(inputs)).split(batch):
            optimizer.zero_grad()
            loss(model(inputs[some]), targets[some]).backward()
            optimizer.step()
            lrs.step()
        done()
    model.eval()
    with torch.inference_mode():
        return task.score(model(task.test[0]), task.test[1]).double().mean().item()


def train_all(task: Task, args: argparse.Namespace, console: Console) -> list[Run]:
    runs: list[Run] = []
    done: dict[tuple[Any, ...], float] = {}  # at the base batch all rules have the same learning rate: train once
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("epochs")
    cells = [*itertools.product(args.statistics, args.rules, args.batches)]
    with Progress(*columns, console=console, disable=not console.is_interactive) as progress:
        bar = progress.add_task("", total=len(cells) * len(args.optimizers) * args.seeds * args.epochs)
        for statistics, rule, batch in cells:
            for name in args.optimizers:
                lr = scaled_lr(args.base_lr[statistics][name], batch, args.base_batch, rule)
                progress.update(bar, description=f"{STATISTICS[statistics]}, {rule}, batch {batch}, {NAMES[name]}")
                for seed in range(args.seeds):
                    case = (statistics, name, batch, seed, lr)
                    if case in done:
                        progress.advance(bar, args.epochs)
                    else:
                        done[case] = train(task, *case, args, lambda: progress.advance(bar))
                    runs.append(Run(statistics, rule, name, batch, seed, lr, done[case]))
            if not console.is_interactive:
                scores = by_cell(runs)[statistics, rule]
                means = [f"{NAMES[name]} {mean_std(of[batch])} %" for name, of in scores.items()]
                where = f"{STATISTICS[statistics]}, {rule}, batch {batch}:"
                console.print(where, ", ".join(means), highlight=False, soft_wrap=True)
    return runs


def by_cell(runs: Iterable[Run]) -> Cells:
    cells: Cells = {}
    for run in runs:
        scores = cells.setdefault((run.statistics, run.rule), {})
        scores.setdefault(run.optimizer, {}).setdefault(run.batch, []).append(run.accuracy)
    return cells


def mean_std(scores: list[float]) -> str:
    """Return the mean and the standard deviation in percent."""
    mean = f"{100 * fmean(scores):.2f}"
    return mean if len(scores) == 1 else f"{mean} ± {100 * stdev(scores):.2f}"


def compare(scores: list[float], others: list[float]) -> str:
    """Compare the means: within one standard deviation, pooled over the two, ahead, or behind."""
    difference = fmean(scores) - fmean(others)
    deviation = math.sqrt((variance(scores) + variance(others)) / 2)
    if abs(difference) <= deviation:
        return "within"
    return "ahead" if difference > 0 else "behind"


def places(ours: Mapping[int, list[float]], theirs: Mapping[int, list[float]]) -> str:
    """Say at which batches our scores are ahead, behind, or neither."""
    phrases = {
        "ahead": "ahead by more than a standard deviation at batch",
        "behind": "behind by more than a standard deviation at batch",
        "within": "within a standard deviation at batch",
    }
    where: dict[str, list[int]] = {word: [] for word in phrases}
    for batch in sorted(ours):
        where[compare(ours[batch], theirs[batch])].append(batch)
    return "; ".join(f"{phrases[word]} {', '.join(map(str, found))}" for word, found in where.items() if found)


def summary(cells: Cells) -> list[str]:
    """Return sentences that say where LARS and LAMB help and where not, and what ghost statistics change.

    Each optimizer has its published rule, if that has been run, else the first one; so no rule is chosen by its result.
    """
    if any(len(some) < 2 for scores in cells.values() for of in scores.values() for some in of.values()):
        return ["To compare optimizers or statistics, run two seeds or more."]
    kinds = list(dict.fromkeys(statistics for statistics, _ in cells))
    rules = list(dict.fromkeys(rule for _, rule in cells))
    names = list(next(iter(cells.values())))
    rule = {name: PUBLISHED_RULE[name] if PUBLISHED_RULE[name] in rules else rules[0] for name in names}
    shown = {name: f"{NAMES[name]} ({rule[name]})" for name in names}
    lines = []
    rivals = [name for name in RIVALS if name in names]
    for statistics in kinds:
        scores = {name: cells[statistics, rule[name]][name] for name in names}
        for name in (name for name in LAYER_WISE if name in names and rivals):
            best = {batch: max((scores[rival][batch] for rival in rivals), key=fmean) for batch in scores[name]}
            against = f"{'the better of ' if len(rivals) > 1 else ''}{' and '.join(shown[rival] for rival in rivals)}"
            lines.append(
                f"{STATISTICS[statistics].capitalize()}: {shown[name]} against {against}: {places(scores[name], best)}."
            )
    if {"ghost", "sync"} <= {*kinds}:
        for name in names:
            ghost, sync = (cells[kind, rule[name]][name] for kind in ("ghost", "sync"))
            lines.append(f"Ghost against synchronized statistics, {shown[name]}: {places(ghost, sync)}.")
    return lines or ["To say where LARS or LAMB helps, run one of them and SGD or AdamW."]


def table(cells: Cells, task: Task, args: argparse.Namespace) -> Table:
    spread = ", mean ± standard deviation" if args.seeds > 1 else ""
    rates = [
        f"{STATISTICS[kind]}: {', '.join(f'{NAMES[name]} {args.base_lr[kind][name]:g}' for name in args.optimizers)}"
        for kind in args.statistics
    ]
    view = Table(
        title=f"digits: {task.metric} in %{spread}",
        caption=f"{args.epochs} epochs, {args.warmup} of them warm-up; seeds: {args.seeds}\n"
        f"learning rates at batch {args.base_batch}, where all rules are the same:\n" + "\n".join(rates),
    )
    view.add_column("statistics")
    view.add_column("scaling")
    view.add_column("batch", justify="right")
    view.add_column("steps", justify="right")
    for name in args.optimizers:
        view.add_column(f"{NAMES[name]} ({args.preset})" if name == "lars" else NAMES[name], justify="right")
    for (statistics, rule), scores in cells.items():
        for batch in args.batches:
            steps = args.epochs * math.ceil(len(task.train[0]) / batch)
            means = [mean_std(scores[name][batch]) for name in args.optimizers]
            view.add_row(statistics, rule, str(batch), str(steps), *means, end_section=batch == args.batches[-1])
    return view


def picture(cells: Cells, task: Task, args: argparse.Namespace) -> Figure:
    """Draw the errors on a logarithmic axis, so that failed runs and small errors are both visible."""
    rows, columns = len(args.statistics), len(args.rules)
    figure = Figure(figsize=(2 + 5 * columns, 1 + 4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axes, ((statistics, rule), scores) in zip(panels.flat, cells.items(), strict=True):
        axes.grid(alpha=0.3)
        for name in args.optimizers:
            errors = [[1 - accuracy for accuracy in scores[name][batch]] for batch in args.batches]
            means = [fmean(some) for some in errors]
            axes.plot(args.batches, means, marker="o", color=COLORS[name], label=NAMES[name])
            for batch, some in zip(args.batches, errors, strict=True):
                axes.scatter([batch] * len(some), some, s=12, color=COLORS[name], alpha=0.4)
        axes.set_xscale("log", base=2)
        axes.set_xticks(args.batches, [str(batch) for batch in args.batches])
        axes.set_yscale("symlog", linthresh=1 / len(task.test[0]))  # linear below one image, to show errors of 0
        axes.set_yticks([0, 0.003, 0.01, 0.03, 0.1, 0.3, 1])
        axes.yaxis.set(major_formatter=PercentFormatter(1, decimals=1), minor_locator=NullLocator())
        axes.set(ylim=(0, 1), title=f"{STATISTICS[statistics]}, {rule} scaling")
    panels[0, 0].legend()
    figure.supxlabel("batch")
    figure.supylabel("test error" if task.metric == "test accuracy" else "validation error")
    figure.suptitle(f"digits, {args.epochs} epochs: each seed")
    return figure


def tuning_task(task: Task) -> Task:
    """Return the task with every fifth example of the training set held out, in place of the test set."""
    held_out = torch.arange(len(task.train[0])) % 5 == 0
    inputs, targets = task.train
    return replace(
        task,
        train=(inputs[~held_out], targets[~held_out]),
        test=(inputs[held_out], targets[held_out]),
        metric="validation accuracy",
    )


def parse_args() -> argparse.Namespace:
    def positive(text: str) -> int:
        if int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text} is below 1")
        return int(text)

    def rate(text: str) -> float:
        if not 0 < float(text) < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
        return float(text)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", choices=NAMES, default=[*NAMES])
    parser.add_argument("--batches", nargs="+", type=positive, default=[16, 64, 256, 1024])
    parser.add_argument("--epochs", type=positive, default=12)
    parser.add_argument("--warmup", type=positive, default=3, help="warm-up epochs, included in --epochs")
    parser.add_argument("--seeds", type=positive, default=3, help="number of seeds: 0, 1, ...")
    parser.add_argument(
        "--rules",
        nargs="+",
        choices=RULES,
        default=["linear", "sqrt"],
        help="how the learning rate grows with the batch",
    )
    parser.add_argument(
        "--statistics",
        nargs="+",
        choices=STATISTICS,
        default=["none"],
        help="none: a model without normalization; ghost, sync: batch normalization by replica, or over the batch",
    )
    parser.add_argument("--replica-batch", type=positive, default=16, help="images of a replica, for ghost statistics")
    parser.add_argument(
        "--base-batch", type=positive, default=16, help="batch for which the next four options are given"
    )
    for name, title in NAMES.items():
        parser.add_argument(f"--{name}-lr", type=rate, help=f"of {title}, for all statistics; default: as tuned")
    parser.add_argument("--preset", choices=LARS_LR, default="paper", help="variant of LARS")
    parser.add_argument("--validation", action="store_true", help="evaluate on a part of the training set, to tune")
    parser.add_argument("--out", type=Path, default=Path("large_batch.png"), help="file for the picture of all errors")
    parser.add_argument("--json", type=Path, help="also write all runs to this file")
    args = parser.parse_args()
    if args.warmup >= args.epochs:
        parser.error(f"--warmup {args.warmup}: expected fewer than the {args.epochs} epochs")
    for several in ("optimizers", "rules", "statistics"):
        setattr(args, several, list(dict.fromkeys(getattr(args, several))))
    args.batches = sorted(set(args.batches))
    if "lars" in args.optimizers and args.preset != "paper" and {*args.statistics} - {"none"} and not args.lars_lr:
        parser.error(f"--preset {args.preset}: expected --lars-lr, since it was not tuned with batch normalization")
    plain = BASE_LR | {"lars": LARS_LR[args.preset]}
    given = {name: lr for name in NAMES if (lr := getattr(args, f"{name}_lr")) is not None}
    args.base_lr = {kind: (plain if kind == "none" else NORMALIZED_LR) | given for kind in args.statistics}
    return args


def main() -> None:
    args = parse_args()
    task = TASKS["digits"]()
    if args.validation:
        task = tuning_task(task)
    if args.batches[-1] > (examples := len(task.train[0])):
        sys.exit(f"--batches {args.batches[-1]}: the training set has only {examples} examples")
    torch.set_num_threads(1)  # the steps are small: a second thread gains little, and on a busy machine it costs time
    console = Console()
    runs = train_all(task, args, console)
    cells = by_cell(runs)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    picture(cells, task, args).savefig(args.out, dpi=120)
    if args.json:
        options = ("epochs", "warmup", "base_batch", "base_lr", "replica_batch", "preset", "validation")
        report = {name: getattr(args, name) for name in options} | {"runs": [*map(asdict, runs)]}
        args.json.write_text(json.dumps(report, indent=1))
    console.print(f"errors: {args.out}", soft_wrap=True)
    for line in summary(cells):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(table(cells, task, args))


if __name__ == "__main__":
    main()
