"""The models and data of the tests of fully_shard."""

import math

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SIZES = (50, 71, 64, 3)  # odd numbers, so shards have different lengths; the last layer is small


def make(mesh=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(*SIZES[i : i + 2]), nn.Tanh()) for i in range(3)))
    for part in (*model, model):
        fully_shard(part, mesh=mesh, **options)
    return model


def meshes(rank, world_size):
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    return mesh["replicate"], mesh["shard"], mesh


def train(model, optimizer, scaler, rank, steps, first=0, max_norm=None, spoilt=None):
    """Train, and return the losses of this rank."""
    losses = []
    for step in range(first, first + steps):
        x = torch.randn(8, SIZES[0], generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        loss = (model(x) - x[:, : SIZES[-1]]).square().mean()
        scaler.scale(loss * (math.inf if (step, rank) == spoilt else 1)).backward()
        scaler.step(optimizer, **({} if max_norm is None else {"max_norm": max_norm}))
        scaler.update()
        losses.append(loss.item())
    return losses


def bits(model):
    return [p.to_local().clone() for p in model.parameters()]


def same(ours, theirs, **tolerance):
    return all(torch.allclose(a, b, **tolerance) for a, b in zip(ours, theirs, strict=True))
