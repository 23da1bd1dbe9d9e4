"""A small model and its training at one site, for the tests of outer optimizers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dltrain_ext import local_sgd

SIZES = ((64, 96), (96, 64), (64, 10))


def network(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(*size) for size in SIZES)).to(dtype)


def loss_of(model: nn.Module, site: int, step: int) -> Tensor:
    data = torch.Generator().manual_seed(1000 * step + site)
    inputs = torch.randn(16, 64, generator=data)
    targets = torch.randint(10, (16,), generator=data)
    return nn.functional.cross_entropy(model(inputs.to(next(model.parameters()).dtype)).float(), targets)


def train(
    model: nn.Module,
    inner: torch.optim.Optimizer,
    site: int,
    steps: range,
    after: Callable[[int], Any] = lambda step: None,
) -> None:
    """Take these steps, whose data depend on the site and on the number of the step."""
    for step in steps:
        inner.zero_grad()
        loss_of(model, site, step).backward()
        inner.step()
        after(step)


def give_grads(model: nn.Module, site: int, step: int) -> None:
    """Set gradients that do not depend on the parameters."""
    data = torch.Generator().manual_seed(1000 * step + site)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=data).to(parameter.dtype)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])


def backups(outer: local_sgd.DiLoCo) -> dict[str, Tensor]:
    """Return what all sites had after the last outer steps, by parameter."""
    return outer.state_dict()["backup"]


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
