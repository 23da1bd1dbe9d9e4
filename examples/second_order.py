"""How many steps does K-FAC save, and what does it cost? Trains from several seeds until a target is reached.

All optimizers have the same weights and batches, and constant learning rates. The learning rates of SGD and AdamW, and
the damping and the limit of K-FAC, were tuned on other seeds. K-FAC is in front of SGD; AdamW updates the parameters
that are in no Linear or Conv2d layer.

python examples/second_order.py
torchrun --standalone --nproc-per-node 4 examples/second_order.py --seeds 2
"""

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

try:
    import torch
    import torch.distributed as dist
    from rich.console import Console
    from rich.table import Table
    from tasks import TASKS, Task
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel

    from dltrain_ext import ddp, kfac, optim
except ModuleNotFoundError as missing:
    sys.exit(f"This example needs {missing.name}. In the repository's root: pip install '.[examples]'")


@dataclass(frozen=True)
class Setting:
    """What was tuned for a data set, and how it is trained."""

    batch: int  # over all ranks together
    target: float  # of the metric of the task
    most: int  # steps
    sgd: float  # learning rates
    adamw: float
    kfac: dict[str, Any]


SETTINGS = {
    "digits": Setting(256, 0.97, 100, sgd=0.1, adamw=8e-3, kfac={"damping": 1e-3, "kl_clip": 1e-3}),
    "python-source": Setting(32, 2.9, 140, sgd=0.1, adamw=4e-3, kfac={"damping": 1e-3, "kl_clip": 1e-3}),
}
CONTESTANTS = ("sgd", "adamw", "kfac")
NAMES = {"sgd": "SGD", "adamw": "AdamW", "kfac": "K-FAC"}
KFAC_LR = 0.1  # of SGD behind K-FAC, whose steps kl_clip makes shorter


class Run(NamedTuple):
    steps: int | None  # None if the target was not reached
    seconds: float  # of the steps, without evaluations


def make(contestant: str, model: nn.Module, setting: Setting) -> tuple[list[torch.optim.Optimizer], kfac.KFAC | None]:
    """Return the optimizers of all parameters, and what preconditions the gradients of some."""
    if contestant == "adamw":
        return [optim.AdamW(model.parameters(), setting.adamw)], None
    if contestant == "sgd":
        return [optim.SGD(model.parameters(), setting.sgd, momentum=0.9)], None
    preconditioner = kfac.KFAC(model, lr=KFAC_LR, factor_update_steps=1, **setting.kfac)
    inside = {id(p) for name in preconditioner.layers for p in model.get_submodule(name).parameters()}
    layers = [p for p in model.parameters() if id(p) in inside]
    others = [p for p in model.parameters() if id(p) not in inside]
    by_layer = optim.SGD(layers, KFAC_LR, momentum=0.9)
    return [by_layer, optim.AdamW(others, setting.adamw)] if others else [by_layer], preconditioner


def batches(examples: int, size: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in itertools.count():
        yield from torch.randperm(examples, generator=generator)[: examples // size * size].split(size)


def reached(task: Task, model: nn.Module, target: float) -> bool:
    inputs, targets = task.test
    with torch.no_grad():
        score = task.score(model(inputs), targets).double().mean().item()
    return score >= target if task.higher_is_better else score <= target


def train(task: Task, setting: Setting, contestant: str, seed: int) -> Run:
    torch.manual_seed(seed)
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = module = task.model()
    if dist.is_initialized():
        model = DistributedDataParallel(module)
        ddp.register(model, codec="fp16")
    optimizers, preconditioner = make(contestant, module, setting)
    inputs, targets = task.train
    seconds = 0.0
    for step, batch in enumerate(itertools.islice(batches(len(inputs), setting.batch, seed), setting.most), 1):
        began = time.perf_counter()
        part = batch[rank::world_size]
        model.zero_grad()
        task.criterion(model(inputs[part]), targets[part]).backward()
        if preconditioner is not None:
            preconditioner.step()
        for optimizer in optimizers:
            optimizer.step()
        seconds += time.perf_counter() - began
        if reached(task, module, setting.target):  # the same on all ranks, as the weights are
            return Run(step, seconds)
    return Run(None, seconds)


def mean(numbers: list[float], style: str) -> str:
    spread = f" ± {statistics.stdev(numbers):{style}}" if len(numbers) > 1 else ""
    return f"{statistics.fmean(numbers):{style}}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=list(SETTINGS), default="digits")
    parser.add_argument("--optimizers", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--target", type=float, help="of the metric (default: that of the data)")
    parser.add_argument("--inverses", type=int, default=1, help="steps between them (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, help="(default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    console = Console(quiet=dist.is_initialized() and dist.get_rank() > 0)
    task, setting = TASKS[args.data](), SETTINGS[args.data]
    setting = replace(setting, kfac=setting.kfac | {"inv_update_steps": args.inverses})
    if args.target is not None:
        setting = replace(setting, target=args.target)
    goal = f"{task.metric} {task.style.format(setting.target)}"
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    table = Table("optimizer", "seeds that reach it", "steps", "ms a step", "seconds", title=f"{args.data}: {goal}")
    for contestant in args.optimizers:
        runs = [train(task, setting, contestant, seed) for seed in seeds]
        steps = [float(run.steps or setting.most) for run in runs]
        milliseconds = statistics.median(1e3 * run.seconds / (run.steps or setting.most) for run in runs)
        table.add_row(
            NAMES[contestant],
            f"{sum(run.steps is not None for run in runs)} of {len(runs)}",
            mean(steps, ".1f"),
            f"{milliseconds:.1f}",
            mean([run.seconds for run in runs], ".2f"),
        )
    console.print(table)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
