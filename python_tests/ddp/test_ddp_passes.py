"""The start and the end of a backward pass: DDP that skips buckets, and DDP whose process group is replaced."""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from contributions import same_everywhere
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import ddp, optim
from dltrain_ext.amp import LossScaler

BRANCHES = 4


class Branches(nn.Module):
    """Branches that are each a bucket."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(BRANCHES))

    def forward(self, x, used):
        return sum(self.branches[i](x).tanh() for i in used)


def make(skips=True):
    torch.manual_seed(0)
    return DistributedDataParallel(
        Branches(),
        bucket_cap_mb=0.01,
        find_unused_parameters=True,
        skip_all_reduce_unused_params=skips,
    )


def batch(rank, number):
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * number + rank))


def used_alone(skips, rank, world_size, passes, bad=()):
    """Return weights and residuals after a training in which pass i uses the branches passes[i]. `skips`: DDP skips the
    buckets of the other branches.
    """
    model, scaler = make(skips), LossScaler("cpu", init_scale=16.0)
    state = ddp.register(model, codec="int8", scaler=scaler, warmup_steps=1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for number, used in enumerate(passes):
        optimizer.zero_grad()
        loss = model(batch(rank, number), used).square().sum()
        scaler.scale(loss * (math.inf if number in bad else 1)).backward()
        unscaled = [p.grad / scaler.get_scale() for p in model.parameters() if p.grad is not None]
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in unscaled))
        scaler.step(optimizer, max_norm=1.0, grad_stats=state.grad_stats)
        scaler.update()
        assert state.steps == number + 1
        if number not in bad:
            assert scaler.total_norm.item() == pytest.approx(norm, rel=1e-6)
    assert scaler.skipped_steps == len(bad)
    assert all(same_everywhere(p.detach()) for p in model.parameters())
    (residuals,) = state.state_dict()["feedback"].values()
    return [p.detach() for p in model.parameters()], [*residuals.values()]


PASSES = {
    "the first and the last ones never": [(1, 2)] * 6,
    "the first one later": [(1, 2, 3), (1, 2, 3), (1, 2), (1, 2), (0, 1), (1, 2, 3)],
    "one after the other": [(3,), (2,), (1,), (0,), (3,), (2,)],
    "one before the other": [(0,), (1,), (2,), (3,), (0,), (1,)],
}


def check_skipped_buckets(rank, world_size, passes):
    for bad in ((), (2, 3)):
        runs = [used_alone(skips, rank, world_size, passes, bad) for skips in (True, False)]
        for found, expected in zip(*(weights for weights, _ in runs), strict=True):
            assert torch.equal(found, expected)
        for found, expected in zip(*(lost for _, lost in runs), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("passes", PASSES.values(), ids=PASSES)
def test_skipped_buckets_give_the_results_of_zero_gradients(passes):
    run_ranks(2, check_skipped_buckets, passes)


def check_gradients_from_before(rank, world_size):
    model = make()
    state = ddp.register(model, codec="raw", scaler=LossScaler(enabled=False))
    for number, used in enumerate([(0, 1), (1, 2)]):  # the gradients are accumulated
        model(batch(rank, number), used).square().sum().backward()
    exact = math.fsum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
    assert state.grad_stats.sum_squares.item() == pytest.approx(exact, rel=1e-6)


def test_earlier_gradients_count_in_skipped_buckets():
    run_ranks(2, check_gradients_from_before)


def check_exchanged_group(rank, world_size):
    pair, single = dist.new_group([0, 1]), dist.new_group([2])
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 64))
    state = ddp.register(model, codec="raw")
    group, ranks = (pair, [0, 1]) if rank < 2 else (single, [2])
    for members in ([0, 1, 2], ranks, ranks):
        if members == ranks:
            model._update_process_group(group)
        if model.process_group is not state._group:
            late = dist.DistBackendError("a rank is late")
            with mock.patch.object(state, "_communicator_of", side_effect=late), pytest.raises(type(late)):
                state._follow()
        model.zero_grad()
        model(torch.full((1, 64), float(rank + 1))).sum().backward()
        mean = sum(r + 1 for r in members) / len(members)
        torch.testing.assert_close(model.module.weight.grad, torch.full((64, 64), mean))
        assert state.state_dict()["world_size"] == len(members)
    assert state.communicator.stats()["calls"] == 2


def test_the_hook_uses_the_current_group_of_the_model():
    run_ranks(3, check_exchanged_group)


class SeveralDtypes(nn.Module):
    """Parameters of three dtypes, each a bucket."""

    def __init__(self):
        super().__init__()
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False, dtype=dtype) for dtype in dtypes)

    def forward(self, x):
        return sum(layer(x.to(layer.weight.dtype)).float() for layer in self.layers)


def count_static(rank, world_size):
    """In the first pass of a static graph DDP gives all buckets the index 0."""
    torch.manual_seed(0)
    model = DistributedDataParallel(SeveralDtypes(), static_graph=True)
    state = ddp.register(model, scaler=LossScaler("cpu", enabled=False))
    for number in range(3):
        model.zero_grad()
        model(batch(rank, number)[:, :32]).square().sum().backward()
        exact = sum(float(p.grad.double().square().sum()) for p in model.parameters())
        assert float(state.grad_stats.sum_squares) == pytest.approx(exact, rel=0.02), number
        assert state.steps == number + 1 and len(state.stats()["per_bucket"]) == 3


def test_the_first_pass_of_a_static_graph_is_one():
    run_ranks(2, count_static)
