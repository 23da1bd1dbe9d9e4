"""Train a small network twice, alternately: plain DDP with torch.optim, and dltrain_ext. Seeds and batches are equal.

torchrun --standalone --nproc-per-node 2 examples/train.py
torchrun --standalone --nproc-per-node 2 examples/train.py --data python-source
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

try:
    import torch
    import torch.distributed as dist
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table
    from tasks import TASKS, Task
    from torch import Tensor, nn
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim.lr_scheduler import LambdaLR

    from dltrain_ext import codecs, comm, ddp, optim
except ModuleNotFoundError as missing:
    sys.exit(f"This example needs {missing.name}. In the repository's root: pip install '.[examples]'")

OPTIMIZERS = {"adamw": (torch.optim.AdamW, optim.AdamW)}  # name -> torch's and ours
SMOOTH = 20  # steps; the final loss and the curves are means over so many, because the loss of one batch is noisy


@dataclass
class Contestant:
    name: str
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    bytes_per_step: Callable[[], float]  # sent by this rank; called after the last step
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    scores: dict[int, float] = field(default_factory=dict)  # step -> score on the test set


def plain(model: nn.Module, args: argparse.Namespace) -> Contestant:
    """PyTorch's own all-reduce and optimizer."""
    model = DistributedDataParallel(model)
    optimizer = OPTIMIZERS[args.optimizer][0](model.parameters(), lr=args.lr)
    # Gloo does not count its bytes, so they are computed: its ring sends 2 (p - 1) messages of n / p bytes.
    n, p = sum(parameter.nbytes for parameter in model.parameters()), dist.get_world_size()
    return Contestant("plain", model, optimizer, lambda: 2 * n * (p - 1) / p)


def ours(model: nn.Module, args: argparse.Namespace) -> Contestant:
    """The changes for dltrain_ext: another optimizer, and one line that registers our all-reduce with DDP."""
    model = DistributedDataParallel(model)
    optimizer = OPTIMIZERS[args.optimizer][1](model.parameters(), lr=args.lr)
    state = ddp.register(model, codec=args.codec, algorithm=args.algorithm)
    return Contestant("ours", model, optimizer, lambda: state.stats()["wire_bytes"] / args.steps)


def train(contestants: list[Contestant], task: Task, args: argparse.Namespace, console: Console) -> None:
    generator = torch.Generator().manual_seed(args.seed)  # the same batches on every rank
    schedules = [LambdaLR(c.optimizer, lambda step: warmup_cosine(step, args.steps)) for c in contestants]
    with bars(contestants, args.steps, console) as progress:
        for step in range(1, args.steps + 1):
            batch = torch.randint(len(task.train[0]), (args.batch_size,), generator=generator)
            inputs, targets = (tensor[batch[dist.get_rank() :: dist.get_world_size()]] for tensor in task.train)
            # Both alternate step by step, in changing order, so that other load on the machine affects both.
            for contestant in contestants if step % 2 else reversed(contestants):
                train_step(contestant, inputs, targets, task)
            for schedule in schedules:
                schedule.step()
            if step % math.ceil(args.steps / 10) == 0 or step == args.steps:
                for contestant in contestants:
                    contestant.scores[step] = evaluate(contestant.model.module, task)
            show(progress, step, contestants, task)


def train_step(contestant: Contestant, inputs: Tensor, targets: Tensor, task: Task) -> None:
    start = time.perf_counter()
    contestant.optimizer.zero_grad()
    value = task.criterion(contestant.model(inputs), targets)
    value.backward()
    contestant.optimizer.step()
    contestant.seconds.append(time.perf_counter() - start)
    contestant.losses.append(value.item())


def warmup_cosine(step: int, steps: int) -> float:
    """Return the factor of the learning rate: it rises over the first tenth of the steps, and then decays to 0."""
    return min(1, (step + 1) / (0.1 * steps)) * (1 + math.cos(math.pi * step / steps)) / 2


@torch.inference_mode()
def evaluate(model: nn.Module, task: Task) -> float:
    """Return the mean score over the test set, of which each rank evaluates a part."""
    parts = (tensor[dist.get_rank() :: dist.get_world_size()].split(64) for tensor in task.test)
    total = torch.zeros(2, dtype=torch.float64)
    for inputs, targets in zip(*parts, strict=True):
        scores = task.score(model(inputs), targets)
        total += torch.tensor([scores.sum(), scores.numel()])
    comm.all_reduce(total)
    return (total[0] / total[1]).item()


def bars(contestants: list[Contestant], steps: int, console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[now]}")
    progress = Progress(*columns, console=console, disable=console.quiet or not console.is_interactive)
    for contestant in contestants:
        progress.add_task(contestant.name, total=steps, now="")
    return progress


def show(progress: Progress, step: int, contestants: list[Contestant], task: Task) -> None:
    """Update the bars on a terminal; otherwise print one line for each evaluation."""
    line = []
    for bar, contestant in zip(progress.task_ids, contestants, strict=True):
        score = f", {task.metric} {task.style.format([*contestant.scores.values()][-1])}" if contestant.scores else ""
        now = f"loss {contestant.losses[-1]:.4f}{score}"
        progress.update(bar, completed=step, now=now)
        line.append(f"{contestant.name} {now}")
    if not progress.console.is_interactive and step in contestants[0].scores:
        progress.console.print(f"step {step}:", "; ".join(line), highlight=False, soft_wrap=True)


def measure(contestant: Contestant, task: Task, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one contestant, averaged over the ranks."""
    figures = [contestant.bytes_per_step(), statistics.median(contestant.seconds), *contestant.losses]
    means = torch.tensor(figures, dtype=torch.float64)
    comm.all_reduce(means, "avg")
    bytes_per_step, step_seconds, *losses = means.tolist()
    return {
        "score": contestant.scores[args.steps],
        "final_loss": statistics.fmean(losses[-SMOOTH:]),
        "wire_bytes_per_step": bytes_per_step,
        "step_ms": 1000 * step_seconds,
        "throughput": args.batch_size * task.train[1][0].numel() / step_seconds,
        "losses": losses,
        "scores": contestant.scores,
    }


def table(results: dict[str, dict[str, Any]], task: Task, args: argparse.Namespace) -> Table:
    apart = max(abs(a - b) for a, b in zip(results["plain"]["losses"], results["ours"]["losses"], strict=True))
    view = Table(
        "same seeds, same batches",
        title=f"{args.data}: {args.steps} steps, world size {dist.get_world_size()}",
        caption=f"* computed: Gloo's ring sends 2 n (p - 1) / p\nThe two losses differ by at most {apart:.1g}.",
    )
    view.add_column(f"plain DDP\ntorch {args.optimizer}", justify="right")
    view.add_column(f"dltrain_ext\n{args.optimizer}, {args.algorithm}, {args.codec}", justify="right")

    def row(label: str, key: str, style: str, mark: str = "") -> None:
        view.add_row(label, mark + style.format(results["plain"][key]), style.format(results["ours"][key]))

    row(task.metric, "score", task.style)
    row(f"training loss, last {min(args.steps, SMOOTH)} steps", "final_loss", "{:.5f}")
    row("bytes sent, per step and rank", "wire_bytes_per_step", "{:,.0f}", mark="* ")
    row("median step, ms", "step_ms", "{:.2f}")
    row(f"{task.unit} per second", "throughput", "{:,.0f}")
    return view


def picture(results: dict[str, dict[str, Any]], task: Task, args: argparse.Namespace) -> Figure:
    """Draw plain broad and pale beneath ours, so that both are visible where they agree."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    losses, scores = figure.subplots(1, 2)
    for axes in (losses, scores):
        axes.grid(alpha=0.3)
    for (name, result), color, width in zip(results.items(), ("tab:orange", "tab:blue"), (5, 1.2), strict=True):
        look = {"color": color, "linewidth": width, "alpha": 0.5 if name == "plain" else 1}
        curve = torch.tensor(result["losses"])
        window = min(SMOOTH, len(curve))
        losses.plot(range(window, len(curve) + 1), curve.unfold(0, window, 1).mean(1), label=name, **look)
        scores.plot(result["scores"].keys(), result["scores"].values(), label=name, marker="o", **look)
    losses.set(title=f"training loss, mean of {window} steps", xlabel="step", yscale="log")
    losses.yaxis.set(major_formatter=LogFormatter(), minor_formatter=LogFormatter())
    scores.set(title=task.metric, xlabel="step")
    losses.legend()
    figure.suptitle(f"{args.data}, {args.optimizer}: plain DDP and dltrain_ext ({args.algorithm}, {args.codec})")
    return figure


def parse_args() -> argparse.Namespace:
    def positive(text: str) -> int:
        if int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text} is below 1")
        return int(text)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=TASKS, default="digits")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--algorithm", choices=["auto", "butterfly", *comm.ALGORITHMS], default="auto")
    parser.add_argument("--codec", choices=codecs.CODECS, default="raw", help="codec of the sent gradients (raw)")
    parser.add_argument("--steps", type=positive, help="default: depends on --data, as for the next two options")
    parser.add_argument("--batch-size", type=positive, help="batch size over all ranks together")
    parser.add_argument("--lr", type=float, help="learning rate at its peak")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the batches")
    parser.add_argument("--out", type=Path, default=Path("train.png"), help="file for the picture of both curves")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    args = parser.parse_args()
    if args.batch_size and args.batch_size < (ranks := int(os.environ.get("WORLD_SIZE", 1))):
        parser.error(f"--batch-size {args.batch_size}: {ranks} ranks need at least one example each")
    return args


@record  # so that torchrun's final report contains the error message of the rank that failed
def main() -> None:
    args = parse_args()
    if "RANK" in os.environ:  # torchrun set it
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    console = Console(quiet=dist.get_rank() != 0)
    if dist.get_world_size() == 1:
        two = "torchrun --standalone --nproc-per-node 2 examples/train.py"
        console.print("One rank sends no gradients. Two:", two, highlight=False, soft_wrap=True)

    task = TASKS[args.data]()
    for option in ("steps", "batch_size", "lr"):
        if getattr(args, option) is None:
            setattr(args, option, getattr(task, option))
    contestants = []
    for build in (plain, ours):
        torch.manual_seed(args.seed)
        contestants.append(build(task.model(), args))

    train(contestants, task, args, console)
    results = {contestant.name: measure(contestant, task, args) for contestant in contestants}
    console.print(table(results, task, args))
    if dist.get_rank() == 0:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        picture(results, task, args).savefig(args.out, dpi=120)
        console.print(f"curves: {args.out}", soft_wrap=True)
        if args.json:
            args.json.write_text(json.dumps({"world_size": dist.get_world_size(), **results}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
