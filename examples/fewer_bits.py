"""Does keeping moments and parameters in fewer bits change what a network learns? One process, the same seeds for all.

Where parameters are bfloat16, the network computes with them in float32, so that only what is kept differs.

python examples/fewer_bits.py --seeds 10 --json fewer_bits.json
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

try:
    import torch
    import torch.distributed as dist
    from convergence_report import bound
    from recipes import RECIPES, Recipe
    from rich.console import Console
    from rich.table import Table
    from tasks import TASKS, Task
    from torch import nn
    from train import evaluate

    from dltrain_ext import info
except ModuleNotFoundError as missing:
    sys.exit(f"This example needs {missing.name}. In the repository's root: pip install '.[examples]'")

STOCHASTIC = {"master_weights": False, "rounding": "stochastic"}
FORMS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {  # the parameters' type, and options of the optimizer
    "float32": (torch.float32, {}),
    "float32, int8 moments": (torch.float32, {"state_codec": "int8"}),
    "bfloat16, masters": (torch.bfloat16, {}),
    "bfloat16, 8 more bits": (torch.bfloat16, {"master_weights": "8bit"}),
    "bfloat16, stochastic": (torch.bfloat16, STOCHASTIC),
    "bfloat16, to nearest": (torch.bfloat16, {"master_weights": False}),
    "bfloat16, 8 more bits, int8 moments": (torch.bfloat16, {"master_weights": "8bit", "state_codec": "int8"}),
    "bfloat16, stochastic, int8 moments": (torch.bfloat16, {**STOCHASTIC, "state_codec": "int8"}),
}
PLAIN = "float32"


def kept(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> list[nn.Parameter]:
    """Return the parameters that the optimizer updates: those of the network, or copies in fewer bits."""
    if dtype == torch.float32:
        return list(parameters)
    return [nn.Parameter(p.detach().to(dtype)) for p in parameters]


def train(recipe: Recipe, task: Task, form: str, seed: int) -> float:
    """Return the score of the trained model."""
    dtype, options = FORMS[form]
    torch.manual_seed(seed)
    model = task.model()
    used, updated = list(model.parameters()), kept(model.parameters(), dtype)
    optimizer, lrs = recipe.build(updated, recipe)
    for group in optimizer.param_groups:
        group.update(options, **({"seed": seed} if "rounding" in options else {}))
    for batch in recipe.batches(len(task.train[0]), seed):
        inputs, targets = (tensor[batch] for tensor in task.train)
        with torch.no_grad():
            for p, value in zip(used, updated, strict=True):
                p.copy_(value)
        model.zero_grad()
        task.criterion(model(inputs), targets).backward()
        for p, value in zip(used, updated, strict=True):
            value.grad = p.grad if p.grad is None else p.grad.to(dtype)
        optimizer.step()
        lrs.step()
    with torch.no_grad():
        for p, value in zip(used, updated, strict=True):
            p.copy_(value)
        return evaluate(model, task)


def report(scores: dict[str, list[float]], about: dict[str, Any]) -> Table:
    """Compare each form with float32, seed by seed: the mean, and how much worse it is at most, with 95 %."""
    table = Table(title=f"{about['title']}: {about['metric']}")
    for heading in ("kept", "mean ± deviation", "worse by", "at most (95 %)"):
        table.add_column(heading)
    sign, style = (1 if about["higher_is_better"] else -1), about["style"]
    for form, found in scores.items():
        differences = tuple(score - plain for score, plain in zip(found, scores[PLAIN], strict=True))
        worse = -sign * statistics.fmean(differences)
        most = "" if form == PLAIN else style.format(bound(differences, about["higher_is_better"]))
        mean, deviation = style.format(statistics.fmean(found)), style.format(statistics.stdev(found))
        table.add_row(form, f"{mean} ± {deviation}", "" if form == PLAIN else style.format(worse), most)
    return table


def parse_args() -> argparse.Namespace:
    names = [name for name, recipe in RECIPES.items() if recipe.optimizer == "AdamW"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=names, default=names)
    parser.add_argument("--seeds", type=int, choices=range(2, 101), metavar="2-100", default=5, help="0, 1, ...")
    parser.add_argument("--steps", type=int, choices=range(2, 10**6), metavar="N", help="(default: the recipes')")
    parser.add_argument("--json", type=Path, help="write all scores to this file")
    return parser.parse_args()


def main() -> None:
    args, console, start = parse_args(), Console(), time.perf_counter()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    facts = {name: fact for name, fact in info.collect().items() if name != "package"}  # it is a local path
    results: dict[str, Any] = {"machine": facts, "recipes": {}, "scores": {}}
    for name in args.recipes:
        recipe = RECIPES[name] if args.steps is None else replace(RECIPES[name], steps=args.steps)
        task = TASKS[recipe.data]()
        results["recipes"][name] = recipe.about(task)
        scores = results["scores"][name] = {}
        for form in FORMS:
            scores[form] = [train(recipe, task, form, seed) for seed in range(args.seeds)]
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))
        console.print(report(scores, results["recipes"][name]))
    console.print(f"{time.perf_counter() - start:.0f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
