"""Hogwild: processes that train one model in shared memory, without locks (Recht et al. 2011, arXiv:1106.5730).

Every process reads the weights while the others update them, and adds its own update. ``--task catch`` is an
asynchronous actor-critic in a small game. It differs from A3C (Mnih et al. 2016, arXiv:1602.01783): its processes have
no copies of the weights, and use plain SGD instead of RMSprop with shared statistics. Run: python examples/hogwild.py
"""

from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing.synchronize import Barrier

import torch
import torch.multiprocessing as mp
from shared import TASK, accuracy, batches, parser
from tasks import loss
from torch import Tensor, nn

from dltrain_ext import optim

ROWS, COLUMNS = 6, 5  # of the game: the player has a move for each row


def digits(model: nn.Module, process: int, processes: int, steps: int) -> Iterator[Tensor]:
    """Yield the losses of this process's share of the batches."""
    for inputs, targets in islice(batches(steps), process, None, processes):
        yield loss(model(inputs), targets)


def play(model: nn.Module, games: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Play catch: a ball falls down a column, and the player moves left, not, or right to be below it at the end.

    Return the log-probabilities of all moves (ROWS, games, 3), those of the moves that were made and the values of the
    positions (ROWS, games), and which games were won (games).
    """
    ball, player = (torch.randint(COLUMNS, (games,), generator=generator) for _ in range(2))
    policies, made, values = [], [], []
    for row in range(ROWS):
        seen = [nn.functional.one_hot(each, COLUMNS) for each in (ball, player)]
        heights = nn.functional.one_hot(torch.full((games,), row), ROWS)
        out = model(torch.cat([*seen, heights], 1).float())
        policies.append(out[:, :3].log_softmax(1))
        moves = torch.multinomial(policies[-1].detach().exp(), 1, generator=generator)
        made.append(policies[-1].gather(1, moves)[:, 0])
        values.append(out[:, 3])
        player = (player + moves[:, 0] - 1).clamp(0, COLUMNS - 1)
    return torch.stack(policies), torch.stack(made), torch.stack(values), player == ball


def catch(model: nn.Module, process: int, processes: int, steps: int) -> Iterator[Tensor]:
    """Yield the losses of actor and critic, with a bonus for entropy, each for 16 games."""
    generator = torch.Generator().manual_seed(process)
    for _ in range(process, steps, processes):
        policies, made, values, won = play(model, 16, generator)
        advantage = won.float() - values  # the only reward comes at the end, and is not discounted
        entropy = -(policies.exp() * policies).sum(-1)
        yield (-advantage.detach() * made + 0.5 * advantage.square() - 0.01 * entropy).mean()


def player() -> nn.Module:
    return nn.Sequential(nn.Linear(2 * COLUMNS + ROWS, 64), nn.ReLU(), nn.Linear(64, 4))


@torch.no_grad()
def won(model: nn.Module) -> float:
    return play(model, 1000, torch.Generator().manual_seed(0))[3].float().mean().item()


Losses = Callable[[nn.Module, int, int, int], Iterator[Tensor]]
Task = tuple[Callable[[], nn.Module], Losses, Callable[[nn.Module], float], str, float]
TASKS: dict[str, Task] = {
    "digits": (TASK.model, digits, accuracy, "test accuracy", 0.1),
    "catch": (player, catch, won, "games won", 0.5),
}


def train(process: int, model: nn.Module, task: str, steps: int, counts: Tensor, ready: Barrier) -> None:
    """Make this process's share of the steps. Count its updates, and those of others between two of its own."""
    torch.set_num_threads(1)
    made, others = counts
    _, losses, *_, lr = TASKS[task]
    optimizer = optim.SGD(model.parameters(), lr)
    ready.wait()
    seen = made.sum()
    for each in losses(model, process, len(made), steps):
        optimizer.zero_grad()
        each.backward()
        optimizer.step()
        made[process] += 1
        now = made.sum()
        others[process] += now - seen - 1
        seen = now


def main() -> None:
    options = parser(__doc__, steps=1000)
    options.add_argument("--processes", type=int, default=4, help="processes that share the model (%(default)s)")
    options.add_argument("--task", choices=TASKS, default="digits", help="what is learned (%(default)s)")
    args = options.parse_args()
    make, _, score, metric, _ = TASKS[args.task]
    for processes in (1, args.processes):
        torch.manual_seed(0)
        model = make().share_memory()
        counts = torch.zeros(2, processes, dtype=torch.int64).share_memory_()
        ready = mp.get_context("spawn").Barrier(processes)
        mp.spawn(train, (model, args.task, args.steps, counts, ready), nprocs=processes)
        made, others = counts.sum(1).tolist()
        between = f"{others / max(made, 1):.1f} by others between two of a process"
        print(f"{metric} {score(model):.1%}: processes {processes}, updates {made}, {between}")


if __name__ == "__main__":
    main()
