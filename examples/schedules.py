"""Schedules of the learning rate by name: each run is saved in the middle, resumed, and compared with one that goes on.

The schedulers are torch's. The metric of "plateau" is an average over all ranks, so that all of them decide alike.
Run: torchrun --standalone --nproc-per-node 2 examples/schedules.py
     torchrun --standalone --nproc-per-node 2 examples/schedules.py --schedules warmup-cosine plateau --steps 200
"""

import math
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Callable
from itertools import islice
from pathlib import Path

try:
    import torch
    from rich.console import Console
    from rich.table import Table
    from shared import TASK, accuracy, batches, finish, parser, rank_and_size, start
    from tasks import loss
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import (
        CosineAnnealingLR,
        ExponentialLR,
        LambdaLR,
        LinearLR,
        LRScheduler,
        MultiStepLR,
        PolynomialLR,
        ReduceLROnPlateau,
        SequentialLR,
        StepLR,
    )

    from dltrain_ext import amp, comm, ddp, optim
except ModuleNotFoundError as missing:
    sys.exit(f"This example needs {missing.name}. In the repository's root: pip install '.[examples]'")

EVERY = 5  # steps between two evaluations of the metric of "plateau"


def warmup(optimizer: Optimizer, steps: int) -> LRScheduler:
    return LinearLR(optimizer, start_factor=0.1, total_iters=max(1, steps // 10))


def piecewise(optimizer: Optimizer, steps: int) -> LRScheduler:
    milestones, factors = (steps // 3, steps // 2), (1.0, 0.3, 0.1)
    return LambdaLR(optimizer, lambda t: factors[bisect_right(milestones, t)])


def multi_step(optimizer: Optimizer, steps: int) -> LRScheduler:
    return MultiStepLR(optimizer, [steps // 2, 3 * steps // 4], gamma=0.1)


def step(optimizer: Optimizer, steps: int) -> LRScheduler:
    return StepLR(optimizer, step_size=max(1, steps // 4), gamma=0.5)


def exponential(optimizer: Optimizer, steps: int) -> LRScheduler:
    return ExponentialLR(optimizer, gamma=0.01 ** (1 / steps))


def polynomial(optimizer: Optimizer, steps: int) -> LRScheduler:
    return PolynomialLR(optimizer, total_iters=steps, power=2.0)


def cosine(optimizer: Optimizer, steps: int) -> LRScheduler:
    return CosineAnnealingLR(optimizer, T_max=steps)


def inverse_sqrt(optimizer: Optimizer, steps: int) -> LRScheduler:
    return LambdaLR(optimizer, lambda t: 1 / math.sqrt(t + 1))


def warmup_inverse_sqrt(optimizer: Optimizer, steps: int) -> LRScheduler:
    rises, holds = max(1, steps // 10), max(1, steps // 5)  # the number of the last step of each part
    return LambdaLR(optimizer, lambda t: min((t + 1) / rises, 1.0, math.sqrt(holds / (t + 1))))


def alpha_beta(optimizer: Optimizer, steps: int) -> LRScheduler:
    """The rate is alpha / sqrt(beta + t) with alpha = lr sqrt(beta), so that it begins at lr."""
    beta = max(1, steps // 10)
    return LambdaLR(optimizer, lambda t: math.sqrt(beta / (beta + t)))


def warmup_cosine(optimizer: Optimizer, steps: int) -> LRScheduler:
    rises = max(1, steps // 10)
    parts = [warmup(optimizer, steps), CosineAnnealingLR(optimizer, T_max=max(1, steps - rises))]
    return SequentialLR(optimizer, parts, milestones=[rises])


def plateau(optimizer: Optimizer, steps: int) -> LRScheduler:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.1)


SCHEDULES: dict[str, Callable[[Optimizer, int], LRScheduler]] = {
    "warmup": warmup,
    "piecewise": piecewise,
    "multi-step": multi_step,
    "step": step,
    "exponential": exponential,
    "polynomial": polynomial,
    "cosine": cosine,
    "inverse-sqrt": inverse_sqrt,
    "warmup-inverse-sqrt": warmup_inverse_sqrt,
    "alpha-beta": alpha_beta,
    "warmup-cosine": warmup_cosine,
    "plateau": plateau,
}


@torch.no_grad()
def averaged_loss(model: nn.Module) -> float:
    """Return the mean loss of 256 training digits, the same number on all ranks; each evaluates a part of them."""
    rank, world_size = rank_and_size()
    inputs, targets = (tensor[:256][rank::world_size] for tensor in TASK.train)
    total = torch.tensor([loss(model(inputs), targets, reduction="sum"), len(targets)], dtype=torch.float64)
    comm.all_reduce(total)
    return (total[0] / total[1]).item()


class Run:
    """A model that is trained with a schedule, and what a checkpoint has to contain for the same bits."""

    def __init__(self, schedule: str, steps: int) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(TASK.model())
        self.optimizer = optim.AdamW(self.model.parameters(), lr=TASK.lr)
        self.scaler = amp.LossScaler("cpu", init_scale=2.0**10, growth_interval=10)
        self.hook = ddp.register(self.model, codec="int8", scaler=self.scaler)
        self.scheduler = SCHEDULES[schedule](self.optimizer, steps)
        self.rates: list[float] = []

    def train(self, first: int, last: int) -> None:
        for number, (inputs, targets) in enumerate(islice(batches(last), first, None), first + 1):
            self.rates.append(self.optimizer.param_groups[0]["lr"])
            self.optimizer.zero_grad()
            self.scaler.scale(loss(self.model(inputs), targets)).backward()
            skipped = self.scaler.skipped_steps
            self.scaler.step(self.optimizer, grad_stats=self.hook.grad_stats)
            self.scaler.update()
            if self.scaler.skipped_steps != skipped:  # the same on all ranks; the schedule counts the steps taken
                continue
            if not isinstance(self.scheduler, ReduceLROnPlateau):
                self.scheduler.step()
            elif number % EVERY == 0:
                self.scheduler.step(averaged_loss(self.model.module))

    def save(self, file: Path) -> None:
        parts = (self.model.module, self.optimizer, self.scheduler, self.scaler, self.hook)
        torch.save([part.state_dict() for part in parts], file)

    def load(self, file: Path) -> None:
        """Load what was saved. The scheduler has been made before, because making it writes the optimizer's rate."""
        parts = (self.model.module, self.optimizer, self.scheduler, self.scaler, self.hook)
        for part, state in zip(parts, torch.load(file), strict=True):
            part.load_state_dict(state)


def on_all_ranks(value: bool) -> bool:
    """Return whether the value is True on every rank."""
    count = torch.tensor(int(value))
    comm.all_reduce(count)
    return count.item() == rank_and_size()[1]


def compare(schedule: str, steps: int) -> list[str]:
    """Return a row of the table: the run goes on after saving, and another run resumes from the file."""
    middle = steps // 2
    whole, resumed = Run(schedule, steps), Run(schedule, steps)
    with tempfile.TemporaryDirectory() as folder:  # one for each rank: the hook's state differs between ranks
        file = Path(folder, "checkpoint.pt")
        whole.train(0, middle)
        whole.save(file)
        resumed.load(file)
    whole.train(middle, steps)
    resumed.train(middle, steps)
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    same = [whole.rates[middle:] == resumed.rates, all(torch.equal(a, b) for a, b in pairs)]
    rates = [f"{whole.rates[number]:.1e}" for number in (0, middle, steps - 1)]
    score = f"{accuracy(resumed.model.module):.1%}"
    for run in (whole, resumed):
        run.hook.communicator.close()
    return [schedule, *rates, score, *("yes" if on_all_ranks(each) else "NO" for each in same)]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=[*SCHEDULES])
    args = options.parse_args()
    if args.steps < 2:
        options.error(f"--steps {args.steps}: expected 2 or more, since a run is saved in the middle")
    start()
    table = Table(title=f"{args.steps} steps, world size {rank_and_size()[1]}")
    table.add_column("schedule", no_wrap=True)
    for column in ("first\nrate", "\nmiddle", "\nlast", "test\naccuracy", "same\nrates", "same\nbits"):
        table.add_column(column, justify="right")
    for name in args.schedules:
        table.add_row(*compare(name, args.steps))
    if rank_and_size()[0] == 0:
        Console().print(table)
    finish("same: as the run that went on, for the run that was resumed in the middle")


if __name__ == "__main__":
    main()
