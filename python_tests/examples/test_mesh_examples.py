"""The examples on a mesh of ranks: with a lossless codec they train the same model as one process with whole batches."""

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
    """Keeps the norm of the gradients at each step: AdamW alone would hide a factor that is the same in all steps."""

    norms: list[float] = []

    def step(self, *args, **kwargs):
        super().step(*args, **kwargs)
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
    assert max(norms) > 1, "some steps clip"
    new_model()  # for the seed
    found, its_norms = recorded(lambda: imported(name).train(STEPS, *arguments, "raw")[0])
    torch.testing.assert_close(its_norms, norms, rtol=1e-3, atol=0)
    for mine, its, first in zip(found, expected, new_model().parameters(), strict=True):
        assert not torch.allclose(its, first, rtol=1e-2, atol=1e-3), "it has learned"
        torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("is_sharded", [False, True], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_tensor_parallelism_trains_the_same_model(tensor: int, is_sharded: bool) -> None:
    run_ranks(4, check, "tensor_parallel", tensor, is_sharded)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_pipeline_trains_the_same_model(ranks: int) -> None:
    run_ranks(ranks, check, "pipeline")
