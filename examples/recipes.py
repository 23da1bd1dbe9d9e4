"""The models and hyper-parameters of convergence.py, tuned only with plain DDP and used for every codec."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from large_batch import LARS_LR, make, scaled_lr, schedule
from tasks import Task
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from train import warmup_cosine

from dltrain_ext import optim

Parameters = Iterable[nn.Parameter]
BATCH, BASE_BATCH = 512, 16  # of the large-batch recipe; its learning rate is scaled from BASE_BATCH


@dataclass(frozen=True)
class Recipe:
    title: str
    data: str
    steps: int
    batch_size: int  # over all ranks together
    lr: float  # at its peak
    optimizer: str
    schedule: str
    build: Callable[[Parameters, "Recipe"], tuple[torch.optim.Optimizer, LRScheduler]]

    def about(self, task: Task) -> dict[str, Any]:
        """Return the settings of the runs, which the report shows."""
        names = ("title", "data", "steps", "batch_size", "lr", "optimizer", "schedule")
        of_task = ("metric", "style", "higher_is_better")
        return {name: getattr(self, name) for name in names} | {name: getattr(task, name) for name in of_task}

    def batches(self, examples: int, seed: int) -> Iterator[Tensor]:
        """Yield batches, epoch after epoch. Each epoch has another order, which is the same on all ranks."""
        generator = torch.Generator().manual_seed(seed)
        orders = (torch.randperm(examples, generator=generator) for _ in itertools.count())
        batches = itertools.chain.from_iterable(order.split(self.batch_size) for order in orders)
        enough = (batch for batch in batches if len(batch) >= dist.get_world_size())  # an epoch's last may be too small
        return itertools.islice(enough, self.steps)


def adamw(params: Parameters, recipe: Recipe) -> tuple[torch.optim.Optimizer, LRScheduler]:
    optimizer = optim.AdamW(params, recipe.lr)
    return optimizer, LambdaLR(optimizer, lambda step: warmup_cosine(step, recipe.steps))


def lars(params: Parameters, recipe: Recipe) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Make LARS as in large_batch.py, where 3 of 12 epochs are warm-up."""
    optimizer = make("lars", params, recipe.lr, preset="paper")
    return optimizer, schedule(optimizer, LARS_LR["paper"], warmup=max(1, recipe.steps // 4), steps=recipe.steps)


def with_adamw(data: str, steps: int, batch_size: int, lr: float) -> Recipe:
    return Recipe(data, data, steps, batch_size, lr, "AdamW", "warm-up over a tenth, then a cosine", adamw)


RECIPES = {
    "digits": with_adamw("digits", steps=300, batch_size=64, lr=2e-3),
    "python-source": with_adamw("python-source", steps=120, batch_size=32, lr=4e-3),
    "photographs": with_adamw("photographs", steps=300, batch_size=64, lr=3e-3),
    "large-batch": Recipe(
        title=f"digits, batch {BATCH}, LARS",
        data="digits",
        steps=36,  # 12 epochs
        batch_size=BATCH,
        lr=scaled_lr(LARS_LR["paper"], BATCH, BASE_BATCH, "linear"),
        optimizer="LARS(momentum=0.9, preset='paper', adapt=True)",
        schedule="warm-up over a quarter, then (what is left) ** 2",
        build=lars,
    ),
}
