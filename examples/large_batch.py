"""Train with larger and larger batches for the same number of epochs: SGD, LARS and AdamW of dltrain_ext on digits.

The learning rate grows with the batch (linear scaling rule), rises to its peak over the first epochs (gradual warm-up;
both Goyal et al. 2017), and then decays polynomially to 0 (as for LARS in You, Gitman & Ginsburg 2017).

python examples/large_batch.py
python examples/large_batch.py --rule sqrt --optimizers lars adamw --batches 256 512
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

try:
    import torch
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator, PercentFormatter
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table
    from tasks import TASKS, Task, loss
    from torch.optim.lr_scheduler import LinearLR, PolynomialLR, SequentialLR

    from dltrain_ext import optim
except ModuleNotFoundError as missing:
    sys.exit(f"This example needs {missing.name}. In the repository's root: pip install '.[examples]'")

NAMES = {"sgd": "SGD", "lars": "LARS", "adamw": "AdamW"}
COLORS = {"sgd": "tab:orange", "lars": "tab:blue", "adamw": "tab:green"}

# Learning rates at batch 16, tuned with 3 seeds and --validation: the best of five for each optimizer, half a decade
# apart (SGD and larc 0.003 to 0.3, LARS 0.3 to 30, AdamW 0.0003 to 0.03), none at an edge. No other batch was tuned.
BASE_LR = {"sgd": 0.03, "adamw": 0.003}
LARS_LR = {"paper": 3.0, "tensorflow": 3.0, "larc": 0.03}

RULES = {"linear": lambda factor: factor, "sqrt": math.sqrt, "none": lambda factor: 1.0}


@dataclass(frozen=True)
class Run:
    optimizer: str
    batch: int
    seed: int
    lr: float  # at its peak
    accuracy: float


Scores = dict[str, dict[int, list[float]]]  # optimizer -> batch -> the accuracy with each seed


def make(name: str, params: Iterable[torch.nn.Parameter], lr: float, preset: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return optim.SGD(params, lr, momentum=0.9)
    if name == "adamw":
        return optim.AdamW(params, lr)
    # A trust ratio for every tensor, as in Algorithm 1 of the paper. Without it, biases would move by the plain, large
    # learning rate, and this model has no normalization: the best accuracy was then only 98 %, even at batch 16.
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


def train(task: Task, name: str, batch: int, seed: int, args: argparse.Namespace, done: Callable[[], Any]) -> Run:
    torch.manual_seed(seed)  # weights and order are the same for every optimizer
    model = task.model()
    lr = scaled_lr(args.base_lr[name], batch, args.base_batch, args.rule)
    optimizer = make(name, model.parameters(), lr, args.preset)
    inputs, targets = task.train
    steps = math.ceil(len(inputs) / batch)  # per epoch
    lrs = schedule(optimizer, args.base_lr[name], args.warmup * steps, args.epochs * steps)
    for _ in range(args.epochs):
        for some in torch.randperm(len(inputs)).split(batch):
            optimizer.zero_grad()
            loss(model(inputs[some]), targets[some]).backward()
            optimizer.step()
            lrs.step()
        done()
    with torch.inference_mode():
        accuracy = task.score(model(task.test[0]), task.test[1]).double().mean().item()
    return Run(name, batch, seed, lr, accuracy)


def train_all(task: Task, args: argparse.Namespace, console: Console) -> list[Run]:
    runs: list[Run] = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("epochs")
    with Progress(*columns, console=console, disable=not console.is_interactive) as progress:
        bar = progress.add_task("", total=len(args.batches) * len(args.optimizers) * args.seeds * args.epochs)
        for batch in args.batches:
            for name in args.optimizers:
                progress.update(bar, description=f"batch {batch}, {NAMES[name]}")
                for seed in range(args.seeds):
                    runs.append(train(task, name, batch, seed, args, lambda: progress.advance(bar)))
            if not console.is_interactive:
                means = [f"{NAMES[name]} {mean_std(of[batch])}" for name, of in by_batch(runs).items()]
                console.print(f"batch {batch}:", ", ".join(means), highlight=False, soft_wrap=True)
    return runs


def by_batch(runs: Iterable[Run]) -> Scores:
    scores: Scores = {}
    for run in runs:
        scores.setdefault(run.optimizer, {}).setdefault(run.batch, []).append(run.accuracy)
    return scores


def mean_std(scores: list[float]) -> str:
    mean = f"{100 * statistics.fmean(scores):.2f}"
    return f"{mean} %" if len(scores) == 1 else f"{mean} ± {100 * statistics.stdev(scores):.2f} %"


def compare(scores: list[float], others: list[float]) -> str:
    """Compare the means: within one standard deviation, pooled over the two, ahead, or behind."""
    difference = statistics.fmean(scores) - statistics.fmean(others)
    deviation = math.sqrt((statistics.variance(scores) + statistics.variance(others)) / 2)
    if abs(difference) <= deviation:
        return "within"
    return "ahead" if difference > 0 else "behind"


def summary(scores: Scores) -> list[str]:
    """Return sentences that say where LARS helps and where not, according to these scores."""
    rivals = [name for name in scores if name != "lars"]
    if "lars" not in scores or not rivals:
        return ["To say where LARS helps, run LARS and another optimizer."]
    if any(len(some) < 2 for of in scores.values() for some in of.values()):
        return ["To say where LARS helps, run two seeds or more."]
    phrases = {
        "ahead": "ahead by more than a standard deviation at batch",
        "behind": "behind by more than a standard deviation at batch",
        "within": "within a standard deviation at batch",
    }
    lines, helps = [], set(scores["lars"])
    for rival in rivals:
        where: dict[str, list[int]] = {word: [] for word in phrases}
        for batch, ours in scores["lars"].items():
            where[compare(ours, scores[rival][batch])].append(batch)
        parts = [f"{phrases[word]} {listed(batches)}" for word, batches in where.items() if batches]
        lines.append(f"LARS against {NAMES[rival]}: {'; '.join(parts)}.")
        helps &= set(where["ahead"])
    if len(rivals) > 1:
        others = " and ".join(NAMES[rival] for rival in rivals)
        lines.append(f"LARS is ahead of both {others} at {f'batch {listed(helps)}' if helps else 'no batch size'}.")
    return lines


def listed(batches: Iterable[int]) -> str:
    return ", ".join(str(batch) for batch in sorted(batches))


def table(scores: Scores, task: Task, args: argparse.Namespace) -> Table:
    spread = ", mean ± standard deviation" if args.seeds > 1 else ""
    view = Table(
        title=f"digits: {task.metric}{spread}",
        caption=f"{args.epochs} epochs, {args.warmup} of them warm-up; seeds: {args.seeds}\n"
        f"learning rates are for batch {args.base_batch}; rule: {args.rule}",
    )
    view.add_column("batch", justify="right")
    view.add_column("steps", justify="right")
    for name in args.optimizers:
        form = f" ({args.preset})" if name == "lars" else ""
        view.add_column(f"{NAMES[name]}{form}\nlr {args.base_lr[name]:g}", justify="right")
    for batch in args.batches:
        steps = args.epochs * math.ceil(len(task.train[0]) / batch)
        view.add_row(str(batch), str(steps), *(mean_std(scores[name][batch]) for name in args.optimizers))
    return view


def picture(scores: Scores, task: Task, args: argparse.Namespace) -> Figure:
    """Draw the errors on a logarithmic axis, so that failed runs and small errors are both visible."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    for name in args.optimizers:
        errors = [[1 - accuracy for accuracy in scores[name][batch]] for batch in args.batches]
        axes.plot(
            args.batches, [statistics.fmean(some) for some in errors], marker="o", color=COLORS[name], label=NAMES[name]
        )
        for batch, some in zip(args.batches, errors, strict=True):
            axes.scatter([batch] * len(some), some, s=12, color=COLORS[name], alpha=0.4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(args.batches, [str(batch) for batch in args.batches])
    axes.set_yscale("symlog", linthresh=1 / len(task.test[0]))  # linear below one image, to show errors of 0
    axes.set_yticks([0, 0.003, 0.01, 0.03, 0.1, 0.3, 1])
    axes.yaxis.set(major_formatter=PercentFormatter(1, decimals=1), minor_locator=NullLocator())
    axes.set(
        ylim=(0, 1),
        xlabel="batch",
        ylabel="test error",
        title=f"digits, {args.epochs} epochs: {args.rule} scaling, each seed",
    )
    axes.legend()
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
    parser.add_argument("--batches", nargs="+", type=positive, default=[16, 32, 64, 128, 256, 512])
    parser.add_argument("--epochs", type=positive, default=12)
    parser.add_argument("--warmup", type=positive, default=3, help="warm-up epochs, included in --epochs")
    parser.add_argument("--seeds", type=positive, default=3, help="number of seeds: 0, 1, ...")
    parser.add_argument("--rule", choices=RULES, default="linear", help="how the learning rate grows with the batch")
    parser.add_argument(
        "--base-batch", type=positive, default=16, help="batch for which the next three options are given"
    )
    parser.add_argument("--sgd-lr", type=rate, default=BASE_LR["sgd"])
    parser.add_argument("--lars-lr", type=rate, help=f"default by preset: {LARS_LR}")
    parser.add_argument("--adamw-lr", type=rate, default=BASE_LR["adamw"])
    parser.add_argument("--preset", choices=LARS_LR, default="paper", help="variant of LARS")
    parser.add_argument("--validation", action="store_true", help="evaluate on a part of the training set, to tune")
    parser.add_argument("--out", type=Path, default=Path("large_batch.png"), help="file for the picture of all errors")
    parser.add_argument("--json", type=Path, help="also write all runs to this file")
    args = parser.parse_args()
    if args.warmup >= args.epochs:
        parser.error(f"--warmup {args.warmup}: expected fewer than the {args.epochs} epochs")
    args.optimizers, args.batches = list(dict.fromkeys(args.optimizers)), sorted(set(args.batches))
    args.base_lr = {"sgd": args.sgd_lr, "lars": args.lars_lr or LARS_LR[args.preset], "adamw": args.adamw_lr}
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
    scores = by_batch(runs)
    console.print(table(scores, task, args))
    for line in summary(scores):
        console.print(line, highlight=False, soft_wrap=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    picture(scores, task, args).savefig(args.out, dpi=120)
    console.print(f"errors: {args.out}", soft_wrap=True)
    if args.json:
        options = {"epochs": args.epochs, "warmup": args.warmup, "rule": args.rule, "base_batch": args.base_batch}
        args.json.write_text(json.dumps({**options, "preset": args.preset, "runs": [*map(asdict, runs)]}, indent=1))


if __name__ == "__main__":
    main()
