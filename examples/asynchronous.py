"""What asynchronous SGD costs, and what delay compensation regains: several methods, each in the same order of arrival.

Eight workers take steps of random lengths, some of them long, as on machines that others use, too. When each of them
pushes and pulls follows from these lengths and from the method. Such an order is written as a record, and replayed in
one process by the code of the servers: so a result depends on the method and the seed, and not on the day.

- synchronous: the mean of the gradients of all workers (all of a version)
- bounded s: stale synchronous parallel (Ho et al. 2013): no worker is more than s clocks ahead of the slowest
- asynchronous: each gradient is applied when it comes
- compensated: asynchronous with delay compensation (Zheng et al. 2017)

All methods see the same number of examples. The time is that of the model, in which a step takes 1 if it is not long.

python examples/asynchronous.py
python examples/asynchronous.py --lr 0.2 --long-share 0.3
"""

import argparse
import heapq
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

try:
    import torch
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table
    from tasks import TASKS, Task
    from torch import Tensor
    from torch.func import functional_call

    from dltrain_ext import optim, ps
except ModuleNotFoundError as missing:
    sys.exit(f"This example needs {missing.name}. In the repository's root: pip install '.[examples]'")


class Method(NamedTuple):
    name: str
    quorum: str | int
    staleness: int | None
    delay_compensation: float = 0.0


METHODS = [
    Method("synchronous", "all", 0),
    Method("bounded 4", 1, 4),
    Method("asynchronous", 1, None),
    Method("compensated", 1, None, 0.04),
    Method("compensated", 1, None, 1.0),
]


def order_of_arrival(
    method: Method, workers: int, pushes: int, seed: int, long: tuple[float, float]
) -> tuple[list[tuple[str, int]], float]:
    """Return who pushes and pulls when, and the time that it takes.

    Each step takes 1, or with a probability a multiple of it; messages take no time.
    """
    generator = torch.Generator().manual_seed(seed)
    probability, factor = long
    is_long = torch.rand(workers, pushes, generator=generator) < probability
    jitter = 1 + 0.1 * torch.rand(workers, pushes, generator=generator)
    lengths = (torch.where(is_long, factor, 1.0) * jitter).tolist()
    order = [("pull", worker) for worker in range(workers)]
    clocks = [0] * workers
    ends = [(lengths[worker][0], worker) for worker in range(workers)]
    heapq.heapify(ends)
    waiting: list[int] = []
    now = 0.0
    while ends:
        now, worker = heapq.heappop(ends)
        order.append(("push", worker))
        clocks[worker] += 1
        waiting.append(worker)
        for reader in sorted(waiting):
            behind = method.staleness
            if behind is None or min(clocks) >= clocks[reader] - behind:
                waiting.remove(reader)
                order.append(("pull", reader))
                if clocks[reader] < pushes:
                    heapq.heappush(ends, (now + lengths[reader][clocks[reader]], reader))
    return order + [("pull", reader) for reader in waiting], now


def batches(examples: int, size: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in itertools.count():
        yield from torch.randperm(examples, generator=generator).split(size)


def train(task: Task, method: Method, seed: int, args: argparse.Namespace) -> tuple[float, float]:
    """Return the score, and the time by the model."""
    torch.manual_seed(seed)
    model = task.model()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    pushes = args.steps or task.steps
    order, time = order_of_arrival(method, args.workers, pushes, seed, (args.long_share, args.long_factor))
    record = ps.Record.written(
        order,
        values,
        optim.SGD,
        quorum=method.quorum,
        staleness=method.staleness,
        delay_compensation=method.delay_compensation,
        lr=args.lr,
        momentum=args.momentum,
    )
    inputs, targets = task.train
    own = [batches(len(inputs), args.batch, seed=1000 * seed + worker) for worker in range(args.workers)]
    # A version of the synchronous method has the mean of all workers' gradients, so its rate is larger (Goyal et al.).
    scale = args.workers if method.quorum == "all" else 1

    def gradients(worker: int, clock: int, held: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = {name: value.detach().requires_grad_() for name, value in held.items()}
        batch = next(own[worker])
        loss = task.criterion(functional_call(model, leaves, (inputs[batch],)), targets[batch])
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    def rates(worker: int, clock: int) -> list[float]:
        return [args.lr * scale * min(1.0, (clock + 1) / (0.1 * pushes)) * (1 - clock / pushes)]

    final = ps.replay(record, values, gradients, rates=rates)
    with torch.no_grad():
        outputs = functional_call(model.eval(), final, (task.test[0],))
        return float(task.score(outputs, task.test[1]).float().mean()), time


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=sorted(TASKS), default="digits")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60, help="of each worker")
    parser.add_argument("--batch", type=int, default=16, help="examples of a worker's step")
    parser.add_argument("--lr", type=float, default=0.1, help="for one worker's gradient, at its peak")
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--long-share", type=float, default=0.1, help="probability that a step is long")
    parser.add_argument("--long-factor", type=float, default=5.0, help="how much longer it takes")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    task = TASKS[args.data]()
    console = Console()
    runs = list(itertools.product(METHODS, range(args.seeds)))
    results: dict[Method, list[tuple[float, float]]] = {method: [] for method in METHODS}
    for method, seed in track(runs, "Training", console=console):
        results[method].append(train(task, method, seed, args))
    table = Table(title=f"{args.data}, {args.workers} workers, {args.steps} steps of {args.batch} each")
    for column in ("method", "lambda", task.metric, "time, relative"):
        table.add_column(column)
    first = fmean(time for _, time in results[METHODS[0]])
    for method, pairs in results.items():
        scores = [score for score, _ in pairs]
        spread = f" ± {task.style.format(float(torch.tensor(scores).std()))}" if len(scores) > 1 else ""
        relative = f"{fmean(time for _, time in pairs) / first:.2f}"
        strength = f"{method.delay_compensation:g}" if method.delay_compensation else ""
        table.add_row(method.name, strength, task.style.format(fmean(scores)) + spread, relative)
    console.print(table)
    if args.json:
        rows = [{**method._asdict(), "results": pairs} for method, pairs in results.items()]
        args.json.write_text(json.dumps({"arguments": {k: str(v) for k, v in vars(args).items()}, "rows": rows}))


if __name__ == "__main__":
    main()
