"""Does compressing gradients change what a network learns? Compares the DDP hook's codecs, plain DDP and PowerSGD.

All use the same seeds, batches, optimizer and hyper-parameters; only the format of the sent gradients differs.

torchrun --standalone --nproc-per-node 4 examples/convergence.py --json convergence.json
torchrun --standalone --nproc-per-node 4 examples/convergence.py --codecs gather-int8 --seeds 10
torchrun --standalone --nproc-per-node 4 examples/convergence.py --codecs diloco-raw diloco-int4 --every 10 50
python examples/convergence.py --from convergence.json
"""

import argparse
import hashlib
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

try:
    import torch
    import torch.distributed as dist
    from convergence_report import Run, by_contestant, line, markdown, picture, summary, table
    from recipes import RECIPES, Recipe
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from tasks import TASKS, Task
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim.lr_scheduler import LRScheduler
    from train import SMOOTH, evaluate

    from dltrain_ext import comm, ddp, fsdp, info, local_sgd
except ModuleNotFoundError as missing:
    sys.exit(f"This example needs {missing.name}. In the repository's root: pip install '.[examples]'")

CODECS = {  # contestant -> codec, error_feedback
    "fp16": ("fp16", False),
    "bf16": ("bf16", False),
    "fp8": ("fp8", False),
    "int8": ("int8", False),
    "int8+feedback": ("int8", True),
    "int4": ("int4", False),
    "int4+feedback": ("int4", True),
    "sign": ("sign", False),
    "sign+feedback": ("sign", True),
}
CONTESTANTS = ("plain", *CODECS, "powersgd")
SHARDED = {"gather-bf16": "bf16", "gather-int8": "int8", "gather-int4": "int4"}  # FSDP2: the codec of parameters
LOCAL = {  # sites of one rank: how they average, and the codec
    "diloco-raw": (local_sgd.DiLoCo, "raw"),
    "diloco-int4": (local_sgd.DiLoCo, "int4"),
    "local-sgd-raw": (local_sgd.LocalSGD, "raw"),
    "local-sgd-int4": (local_sgd.LocalSGD, "int4"),
}
POWERSGD = {"matrix_approximation_rank": 4, "start_powerSGD_iter": 2}  # the smallest value it accepts

Sent = Callable[[], float]
Optimize = Callable[[nn.Module], tuple[torch.optim.Optimizer, LRScheduler]]
Training = tuple[nn.Module, torch.optim.Optimizer, LRScheduler, Sent]


@contextmanager
def averaging(contestant: str, module: nn.Module, optimize: Optimize) -> Iterator[Training]:
    """Yield the module, whose parameters are averaged from time to time, and what trains it."""
    name, _, every = contestant.partition("@")
    optimizer, lrs = optimize(module)
    kind, codec = LOCAL[name]
    outer = kind(module, optimizer, sync_every=int(every), codec=codec)
    yield module, optimizer, lrs, lambda: outer.metrics()["outer/wire_bytes"]
    outer.close()


@contextmanager
def training(contestant: str, module: nn.Module, steps: int, optimize: Optimize) -> Iterator[Training]:
    """Yield the model, its optimizer and schedule, and a function that returns the bytes that this rank has sent."""
    if "@" in contestant:
        with averaging(contestant, module, optimize) as found:
            yield found
        return
    with communicating(contestant, module, steps) as (model, sent):
        yield model, *optimize(model), sent


@contextmanager
def communicating(contestant: str, module: nn.Module, steps: int) -> Iterator[tuple[nn.Module, Sent]]:
    """Yield the module in DDP or FSDP2, and a function that returns the bytes that this rank has sent in all steps."""
    if contestant in SHARDED:
        fully_shard(module)
        sharded = fsdp.register(module, "int8", gather=SHARDED[contestant])
        yield module, lambda: sharded.stats()["wire_bytes"] + sharded.stats()["gather_bytes"]
        return
    if contestant in CODECS:
        codec, error_feedback = CODECS[contestant]
        model = DistributedDataParallel(module)
        hook = ddp.register(model, codec=codec, error_feedback=error_feedback)
        yield model, lambda: hook.stats()["wire_bytes"]
        hook.communicator.close()
        return
    # Gloo does not count its bytes, so they are computed: its ring sends 2 (p - 1) messages of n / p bytes.
    numel, p = sum(parameter.numel() for parameter in module.parameters()), dist.get_world_size()
    bytes_per_element = 4 * 2 * (p - 1) / p
    if contestant == "plain":
        yield DistributedDataParallel(module), lambda: steps * numel * bytes_per_element
        return
    # With several buckets, the ranks could start the later all-reduces of PowerSGD in different orders.
    model = DistributedDataParallel(module, bucket_cap_mb=1 << 20)
    state = PowerSGDState(None, **POWERSGD)
    model.register_comm_hook(state, powerSGD_hook)

    def sent() -> float:
        _, before, after = state.compression_stats()  # elements, in the steps that are compressed
        return (steps * numel - before + after) * bytes_per_element

    yield model, sent


def train(name: str, recipe: Recipe, task: Task, contestant: str, seed: int) -> Run:
    """Train a model; all ranks must call this, and return the same figures."""
    start = time.perf_counter()
    torch.manual_seed(seed)
    module = task.model()
    try:
        losses, sent = descend(recipe, task, contestant, seed, module)
    except RuntimeError as error:
        if contestant != "powersgd":
            raise
        return Run(name, contestant, seed, error=str(error).strip().splitlines()[0])
    check_same(module, f"{name}, {contestant}, seed {seed}")
    score = evaluate(module, task)
    figures = torch.tensor([statistics.fmean(losses[-SMOOTH:]), sent / recipe.steps], dtype=torch.float64)
    comm.all_reduce(figures, "avg")
    loss, wire_bytes = figures.tolist()
    finite = (figure if math.isfinite(figure) else None for figure in (score, loss))
    return Run(name, contestant, seed, *finite, wire_bytes, time.perf_counter() - start)


def descend(recipe: Recipe, task: Task, contestant: str, seed: int, module: nn.Module) -> tuple[list[float], float]:
    """Run the training loop; return the losses of this rank, and the bytes that it has sent."""
    losses = []

    def optimize(model: nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler]:
        return recipe.build(model.parameters(), recipe)

    with training(contestant, module, recipe.steps, optimize) as (model, optimizer, lrs, sent):
        for batch in recipe.batches(len(task.train[0]), seed):
            inputs, targets = (tensor[batch[dist.get_rank() :: dist.get_world_size()]] for tensor in task.train)
            optimizer.zero_grad()
            loss = task.criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
            lrs.step()
            losses.append(loss.item())
        dist.barrier()  # no rank may close its connections while another still receives
        return losses, sent()


def check_same(module: nn.Module, what: str) -> None:
    """Raise on all ranks unless all have the same parameters, bit by bit."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        digest.update(whole.detach().contiguous().view(torch.uint8).numpy())
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    if len(set(digests)) > 1:
        raise AssertionError(f"{what}: expected the same parameters on all ranks, got {digests}")


def train_all(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    facts = {name: fact for name, fact in info.collect().items() if name != "package"}  # it is a local path
    results: dict[str, Any] = {
        "machine": facts,
        "world_size": dist.get_world_size(),
        "powersgd": POWERSGD,
        "recipes": {},
        "runs": [],
    }
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("runs"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=console.quiet or not console.is_interactive) as progress:
        bar = progress.add_task("", total=len(args.recipes) * len(args.codecs) * args.seeds)
        for name in args.recipes:
            recipe = RECIPES[name] if args.steps is None else replace(RECIPES[name], steps=args.steps)
            task = TASKS[recipe.data]()
            about = results["recipes"][name] = recipe.about(task)
            for contestant in args.codecs:
                progress.update(bar, description=f"{recipe.title}: {contestant}")
                runs = []
                for seed in range(args.seeds):
                    runs.append(train(name, recipe, task, contestant, seed))
                    progress.advance(bar)
                results["runs"] += [asdict(run) for run in runs]
                if dist.get_rank() == 0 and args.json:
                    save(results, args.json)
                if not console.is_interactive:
                    console.print(line(runs, about), highlight=False, soft_wrap=True)
    return results


def save(results: dict[str, Any], file: Path) -> None:
    """Write the file atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(results, indent=1, allow_nan=False))
    part.replace(file)


def report(results: dict[str, Any], out: Path, console: Console) -> None:
    recipes, runs = results["recipes"], [Run(**run) for run in results["runs"]]
    for name, about in recipes.items():
        console.print(table(by_contestant(runs, name), about, results["world_size"]))
    for sentence in summary(runs, recipes):
        console.print(sentence, highlight=False, soft_wrap=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    picture(runs, recipes).savefig(out, dpi=100)
    console.print(f"every seed: {out}", soft_wrap=True)


def parse_args() -> argparse.Namespace:
    def at_least(least: int) -> Callable[[str], int]:
        def number(text: str) -> int:
            if int(text) < least:
                raise argparse.ArgumentTypeError(f"{text} is below {least}")
            return int(text)

        return number

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=[*RECIPES])
    parser.add_argument(
        "--codecs",
        nargs="+",
        choices=(*CONTESTANTS, *SHARDED, *LOCAL),
        default=CONTESTANTS,
        help="runs in addition to plain (default: all but those of FSDP2, gather-..., and of sites, diloco-...)",
    )
    parser.add_argument(
        "--every", nargs="+", type=at_least(1), default=[10], help="steps between averages of sites, for diloco-..."
    )
    parser.add_argument("--seeds", type=at_least(2), default=5, help="number of seeds: 0, 1, ...")
    parser.add_argument("--steps", type=at_least(2), help="steps of each run (default: those of the recipe)")
    parser.add_argument("--out", type=Path, default=Path("convergence.png"), help="file for the picture of all runs")
    parser.add_argument("--json", type=Path, help="write all runs to this file, after each contestant")
    parser.add_argument("--markdown", action="store_true", help="with --from: print one table, for a README")
    parser.add_argument("--from", type=Path, dest="saved", help="train nothing, and report the runs that --json wrote")
    args = parser.parse_args()
    if args.saved and not args.saved.is_file():
        parser.error(f"--from {args.saved}: there is no such file")
    if not args.saved and int(os.environ.get("WORLD_SIZE", 1)) < 2:
        parser.error("one rank sends no gradients. Four: torchrun --standalone --nproc-per-node 4 " + sys.argv[0])
    args.recipes = list(dict.fromkeys(args.recipes))
    named = ([f"{name}@{every}" for every in args.every] if name in LOCAL else [name] for name in args.codecs)
    args.codecs = list(dict.fromkeys(["plain", *itertools.chain.from_iterable(named)]))
    lengths = {args.steps or RECIPES[name].steps for name in args.recipes}
    if any("@" in name for name in args.codecs) and any(steps % every for steps in lengths for every in args.every):
        parser.error(f"--every {args.every}: expected divisors of the numbers of steps, {sorted(lengths)}")
    return args


@record  # so that torchrun's final report contains the error message of the rank that failed
def main() -> None:
    args = parse_args()
    if args.saved:
        results = json.loads(args.saved.read_text())
        if args.markdown:
            print(markdown([Run(**run) for run in results["runs"]], results["recipes"]))
        else:
            report(results, args.out, Console())
        return
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    console = Console(quiet=dist.get_rank() != 0)
    results = train_all(args, console)
    if dist.get_rank() == 0:
        report(results, args.out, console)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
