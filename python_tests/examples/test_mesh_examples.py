"""The examples on a mesh of ranks: with a lossless codec they train the same model as one process does."""

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import ranks
import torch
from ranks import ROOT, run_example
from torch import nn
from torch.distributed.tensor import DTensor

from dltrain_ext import amp, optim

pytestmark = pytest.mark.needs("sklearn")

# torch caches meshes of equal shape, whose groups then have other names.
run_ranks = partial(ranks.run_ranks, fresh=True)

STEPS = 6
LAYERS = (0, 2, 6, 8)  # those that have parameters


class Recording(amp.LossScaler):
    """Keeps the norm of the gradients at each step, as AdamW would hide a factor that all steps have in common."""

    norms: list[float] = []

    def step(self, optimizer, max_norm=None, grad_stats=None):
        super().step(optimizer, max_norm and 0.4, grad_stats)  # so that some of the few steps clip
        self.norms.append(self.total_norm.item())


def imported(name: str):
    folder = str(ROOT / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def new_model() -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return imported("shared").TASK.model()


def train_alone() -> nn.Module:
    """Do in one process what the examples do."""
    shared, model, scaler = imported("shared"), new_model(), amp.LossScaler("cpu", enabled=False)
    optimizer = optim.AdamW(model.parameters(), lr=shared.TASK.lr)
    for inputs, targets in shared.batches(STEPS, replica=(0, 1)):
        optimizer.zero_grad()
        imported("tasks").loss(model(inputs), targets).backward()
        scaler.step(optimizer, max_norm=1.0)
    return model


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    """Return whole parameters. After DDP's forward pass the divided ones are DTensors, and not in parameters()."""
    model = getattr(model, "module", model)
    found = [getattr(model[i], name) for i in LAYERS for name in ("weight", "bias")]
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in found]


def recorded(train: Callable[[], nn.Module]) -> tuple[list[torch.Tensor], list[float]]:
    """Return the parameters of the trained model, and the norms of the gradients."""
    Recording.norms = []
    return parameters_of(train()), Recording.norms


def check(rank: int, world_size: int, name: str, *arguments: object) -> None:
    amp.LossScaler = Recording
    expected, norms = recorded(train_alone)
    assert min(norms) < 0.4 < max(norms)
    torch.manual_seed(0)
    found, its_norms = recorded(lambda: imported(name).train(STEPS, *arguments, "raw")[0])
    torch.testing.assert_close(its_norms, norms, rtol=1e-3, atol=0)
    for mine, its, first in zip(found, expected, new_model().parameters(), strict=True):
        assert (mine - its).norm() < 2e-3 * (its - first.detach()).norm(), "close, compared with what has been learned"


@pytest.mark.parametrize("is_sharded", [False, True], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_tensor_parallelism_trains_the_same_model(tensor: int, is_sharded: bool) -> None:
    run_ranks(4, check, "tensor_parallel", tensor, is_sharded)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_pipeline_trains_the_same_model(ranks: int) -> None:
    run_ranks(ranks, check, "pipeline")


@pytest.mark.parametrize(
    ("arguments", "ranks", "percent"),
    [
        ("tensor_parallel.py --tensor 1", 2, 25.6),
        ("tensor_parallel.py", 2, None),
        ("tensor_parallel.py", 4, 26.4),
        ("tensor_parallel.py --sharded", 4, 26.4),
        ("pipeline.py", 2, None),
        ("pipeline.py", 4, 26.9),
    ],
)
def test_the_examples_learn_in_int8(arguments: str, ranks: int, percent: float | None, tmp_path: Path) -> None:
    name, *options = arguments.split()
    said = run_example(name, tmp_path, "--steps", 25, *options, ranks=ranks, fresh=True)
    accuracy, *calls, sent = said.splitlines()
    assert accuracy.startswith("test accuracy: ") and float(accuracy[15:-1]) > 70
    assert calls == (["the hook was called in 25 of 100 backward passes"] if name == "pipeline.py" else [])
    share = f"{percent}% of fp32's" if percent else "none, as there is one replica"
    assert sent == f"bytes sent for gradients: {share}"
