"""Population based training on the digits, against random search with as many steps (Jaderberg et al. 2017, arXiv
1711.09846).

Each process trains a member. Rate, weight decay, and how far images are shifted begin at random. After some steps the
worst member becomes a copy of the best one, without a file, and draws or changes its settings; with --optuna there is
also a method in which Optuna chooses them, by what all settings have brought so far. Random search has no copies. The
member that is the best on a part of the training images is tested on the held-out ones.

torchrun --nproc-per-node 4 examples/population.py
torchrun --nproc-per-node 4 examples/population.py --seeds 1 --plot lineages.png
torchrun --nproc-per-node 4 examples/population.py --optuna  # pip install optuna
"""

import json
import math
import random
from itertools import pairwise
from operator import eq, lt
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from shared import TASK, finish, parser, rank_and_size, start
from torch import Tensor, nn

from dltrain_ext import optim, population

Settings = dict[str, float]
PBT, SEARCH, OPTUNA = "population based training", "random search", "copies, and settings by Optuna"
VALIDATED = slice(0, 300)  # of the training images
LEARNT = slice(300, None)


def priors(draw: random.Random) -> dict[str, Any]:
    return {
        "lr": lambda: 10 ** draw.uniform(-4.5, -1.5),
        "weight_decay": lambda: 10 ** draw.uniform(-4, 0),
        "shift": lambda: draw.uniform(0, 2),
    }


class Member:
    """A model, its optimizer, and its settings."""

    def __init__(self, seed: int, rank: int):
        torch.manual_seed(seed)
        self.model = TASK.model()
        self.optimizer = optim.AdamW(self.model.parameters())
        self.generator = torch.Generator().manual_seed(1000 * seed + rank)
        self.priors = priors(random.Random(1000 * seed + rank))
        self.use({name: prior() for name, prior in self.priors.items()})

    def use(self, settings: Settings) -> None:
        self.settings = settings
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = settings["lr"], settings["weight_decay"]

    def train(self, steps: int) -> None:
        inputs, targets = (part[LEARNT] for part in TASK.train)
        for _ in range(steps):
            batch = torch.randint(len(inputs), (64,), generator=self.generator)
            self.optimizer.zero_grad()
            TASK.criterion(self.model(self.shifted(inputs[batch])), targets[batch]).backward()
            self.optimizer.step()

    def shifted(self, images: Tensor) -> Tensor:
        """Shift the batch by a random whole number of pixels in each direction."""
        most = self.settings["shift"]
        down, right = ((2 * torch.rand(2, generator=self.generator) - 1) * (most + 0.5)).round().int().tolist()
        padded = nn.functional.pad(images, (3, 3, 3, 3))
        return padded[..., 3 - down : 11 - down, 3 - right : 11 - right]

    @torch.no_grad()
    def loss(self) -> float:
        inputs, targets = (part[VALIDATED] for part in TASK.train)
        return torch.nan_to_num(TASK.criterion(self.model(inputs), targets), torch.inf).item()

    @torch.no_grad()
    def errors(self) -> float:
        inputs, targets = TASK.test
        return 100 * (1 - TASK.score(self.model(inputs), targets).float().mean().item())

    def explored(self, winner: population.Winner) -> Settings:
        settings = population.resample(winner.settings, self.priors, probability=0.1, generator=self.generator)
        return population.perturb(settings, generator=self.generator)


class Adviser:
    """Optuna's study of settings, and of the factor by which a round with them has changed the loss. All ranks have the
    same."""

    def __init__(self, seed: int):
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._trial = optuna.trial.create_trial
        self._study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
        real = optuna.distributions.FloatDistribution
        self._space = {"lr": real(10**-4.5, 10**-1.5, log=True), "weight_decay": real(1e-4, 1, log=True)}
        self._space["shift"] = real(0, 2)
        self._before: list[float] = []

    def tell(self, losses: list[float], settings: list[Settings], sources: list[int]) -> None:
        losses = [min(loss, 10.0) for loss in losses]  # some are infinite
        before = self._before or [math.log(10)] * len(losses)
        for loss, first, params in zip(losses, before, settings, strict=True):
            value = math.log(loss / first)
            self._study.add_trial(self._trial(params=params, distributions=self._space, value=value))
        self._before = [losses[source] for source in sources]

    def ask(self) -> Settings:
        return dict(self._study.ask(self._space).params)


def run(method: str, seed: int, rounds: int, steps: int) -> tuple[float, list[list[Any]]]:
    """Return the error of the best member in per cent, and by round and rank: loss, source, and settings."""
    rank, world_size = rank_and_size()
    member, history = Member(seed, rank), []
    adviser = Adviser(seed) if method == OPTUNA else None
    for last in [False] * (rounds - 1) + [True]:
        member.train(steps)
        loss, source, settings = member.loss(), rank, member.settings
        winner = None
        if method != SEARCH and not last:
            winner = population.exploit(member.model, member.optimizer, -loss, settings=settings, seed=seed)
            source = rank if winner is None else winner.rank
        if adviser is not None:
            told: list[Any] = [None] * world_size
            dist.all_gather_object(told, (loss, settings, source))
            adviser.tell(*map(list, zip(*told, strict=True)))
        if winner is not None:
            member.use(member.explored(winner) if adviser is None else adviser.ask())
        history.append([loss, source, settings])
    every: list[Any] = [None] * world_size
    dist.all_gather_object(every, (loss, member.errors(), history))
    _, best, _ = min(every)
    return best, [list(by_rank) for by_rank in zip(*(found for _, _, found in every), strict=True)]


def plot(history: list[list[Any]], file: str) -> None:
    """Draw the loss of each member, and from which member the worst one has its weights."""
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(7, 7))
    for rank in range(len(history[0])):
        above.semilogy([by_rank[rank][0] for by_rank in history], label=f"member {rank}")
        below.semilogy([by_rank[rank][2]["lr"] for by_rank in history], marker=".")
    for at, (now, after) in enumerate(pairwise(history)):
        for rank, (_, source, _) in enumerate(now):
            if source != rank:
                ends = (at, now[source][0]), (at + 1, after[rank][0])
                above.annotate("", ends[1], ends[0], arrowprops={"arrowstyle": "->", "color": "grey"})
    above.set_ylabel("validation loss")
    below.set_ylabel("rate")
    below.set_xlabel("round")
    above.legend()
    figure.savefig(file)


def main() -> None:
    options = parser(__doc__, steps=25)
    options.add_argument("--rounds", type=int, default=12, help="rounds of that many steps (%(default)s)")
    options.add_argument("--seeds", type=int, default=10, help="runs of each method (%(default)s)")
    options.add_argument("--optuna", action="store_true", help="also let Optuna choose")
    options.add_argument("--plot", help="write a picture of the first run's lineages")
    options.add_argument("--json", help="write the errors of all runs")
    args = options.parse_args()
    start()
    found: dict[str, list[float]] = {method: [] for method in (PBT, SEARCH, OPTUNA) if args.optuna or method != OPTUNA}
    for seed in range(args.seeds):
        for method, errors in found.items():
            error, history = run(method, seed, args.rounds, args.steps)
            errors.append(error)
            if seed == 0 and args.plot and method == PBT and rank_and_size()[0] == 0:
                plot(history, args.plot)
    if args.json and rank_and_size()[0] == 0:
        Path(args.json).write_text(json.dumps(found, indent=1))
    better, equal = (sum(map(compare, found[PBT], found[SEARCH])) for compare in (lt, eq))
    finish(
        *(f"{name}: {fmean(each):.2f} % wrong, {min(each):.2f} to {max(each):.2f}" for name, each in found.items()),
        f"{PBT} is better than {SEARCH} in {better} of {args.seeds} runs, as good in {equal}",
    )


if __name__ == "__main__":
    main()
