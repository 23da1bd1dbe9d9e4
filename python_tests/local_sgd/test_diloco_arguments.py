"""Invalid arguments, which are named with what was expected and what came, and how a model is divided."""

import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from local_training import network, train
from properties import property_test, st
from ranks import run_ranks
from torch import nn

from dltrain_ext import local_sgd
from dltrain_ext.local_sgd.fragments import divide


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(0, 3))


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3).to_sparse())


class Apart(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 8)[:, ::2])


class Expanded(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 8).expand(4, 8))


INVALID = [
    (dict(sync_every=0), ValueError, "sync_every: expected .*, got 0"),
    (dict(sync_every=-4), ValueError, "sync_every: expected 0 to .*, got -4"),
    (dict(sync_every=4.0), TypeError, "sync_every: expected an int, got 4.0"),
    (dict(sync_every=10, fragments=3), ValueError, "sync_every: expected a multiple of fragments, 3, got 10"),
    (dict(fragments=0), ValueError, "fragments: expected .*1.*, got 0"),
    (dict(fragments=10), ValueError, "fragments: expected .*6.*, got 10"),
    (dict(fragments="2"), TypeError, "fragments: expected an int, got '2'"),
    (dict(delay=100), ValueError, "delay: expected less than .*100.*, got 100"),
    (dict(delay=50, fragments=2), ValueError, "delay: expected less than .*50.*, got 50"),
    (dict(delay=-1), ValueError, "delay: expected 0 to .*, got -1"),
    (dict(lr=0), ValueError, "lr: expected more than 0.*, got 0"),
    (dict(lr=-1.0), ValueError, "lr: expected more than 0.*, got -1"),
    (dict(lr=float("nan")), ValueError, "lr: expected more than 0.*, got nan"),
    (dict(lr=float("inf")), ValueError, "lr: expected .*, got inf"),
    (dict(lr=1e39), ValueError, r"lr: expected .*, got 1e\+39"),
    (dict(lr="0.7"), TypeError, "lr: expected a number, got '0.7'"),
    (dict(momentum=1.0), ValueError, "momentum: expected 0 or more, less than 1, got 1.0"),
    (dict(momentum=-0.1), ValueError, "momentum: expected 0 or more, less than 1, got -0.1"),
    (dict(momentum=None), TypeError, "momentum: expected a number, got None"),
    (dict(momentum=0.0), ValueError, "nesterov: expected False without momentum, got True"),
    (dict(nesterov=1), TypeError, "nesterov: expected a bool, got 1"),
    (dict(mix=1.0), ValueError, "mix: expected 0 or more, less than 1, got 1.0"),
    (dict(mix=-0.5), ValueError, "mix: expected 0 or more, less than 1, got -0.5"),
    (dict(codec="zip"), ValueError, "codec: expected one of raw, .*, got 'zip'"),
    (dict(codec=None), TypeError, "codec: expected a str, got None"),
    (dict(error_feedback=1), TypeError, "error_feedback: expected a bool, got 1"),
    (dict(allow_public="yes"), TypeError, "allow_public: expected a bool, got 'yes'"),
    (dict(min_compress_numel=-1), ValueError, "min_compress_numel: expected 0 to .*, got -1"),
    (dict(min_compress_numel=1.5), TypeError, "min_compress_numel: expected an int, got 1.5"),
    (dict(timeout=30), ValueError, "timeout: expected a datetime.timedelta .*, got 30"),
    (dict(timeout=timedelta()), ValueError, r"timeout: expected a datetime.timedelta .*, got .*\(0\)"),
    (dict(group="sites"), TypeError, "group: expected a torch.distributed.ProcessGroup.*, got 'sites'"),
]
MODELS = [
    (lambda: torch.zeros(3), TypeError, "model: expected a torch.nn.Module, got Tensor"),
    (nn.ReLU, ValueError, "model: expected parameters that require gradients, got none"),
    (lambda: network().requires_grad_(False), ValueError, "model: expected parameters that require gradients"),
    (Empty, ValueError, "model: expected parameters .*, got none"),
    (lambda: network(torch.float64), TypeError, "model: expected parameters of float32.* got torch.float64.*0.weight"),
    (lambda: nn.Linear(3, 3, dtype=torch.complex64), TypeError, "model: expected .*, got torch.complex64.*weight"),
    (lambda: nn.Linear(3, 3, device="meta"), TypeError, "model: expected .*, got torch.float32 on meta for weight"),
    (Sparse, TypeError, "model: expected .*dense, got .*for weight"),
    (Apart, ValueError, r"model: expected parameters without gaps .*, got strides \(8, 2\) for weight"),
    (Expanded, ValueError, r"model: expected parameters without gaps .*, got strides \(0, 1\) for weight"),
]


def refuse(rank, world_size):
    for options, error, match in INVALID:
        model = network()
        with pytest.raises(error, match=match):
            local_sgd.DiLoCo(model, sgd(model), **options)
    for make, error, match in MODELS:
        with pytest.raises(error, match=match):
            local_sgd.DiLoCo(make(), sgd(network()))
    with pytest.raises(TypeError, match="inner: expected a torch.optim.Optimizer, got Sequential"):
        local_sgd.DiLoCo(network(), network())
    for name, value in (("lr", 0.5), ("momentum", 0.5), ("nesterov", False)):
        with pytest.raises(TypeError, match=f"{name}: expected none, since LocalSGD averages"):
            local_sgd.LocalSGD(network(), sgd(network()), **{name: value})
    with pytest.raises(TypeError, match="unexpected keyword argument 'every'"):
        local_sgd.LocalSGD(network(), sgd(network()), every=3)
    model = network()
    inner = sgd(model)
    local_sgd.DiLoCo(model, inner, sync_every=1)
    train(model, inner, rank, range(1, 3))


def test_invalid_arguments_are_named():
    run_ranks(1, refuse)


def test_a_group_is_needed():
    assert not dist.is_initialized()
    model = network()
    with pytest.raises(ValueError, match="group: expected an initialized default group"):
        local_sgd.DiLoCo(model, sgd(model))


def changed_model(rank, world_size):
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    inner = sgd(model)
    local_sgd.DiLoCo(model, inner, sync_every=1)
    model.to(memory_format=torch.channels_last)
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    with pytest.raises(RuntimeError, match=r"0.weight: expected the shape and strides .*got .*\(27, 1, 9, 3\)"):
        inner.step()


def test_a_parameter_that_changes_its_strides_is_named():
    run_ranks(1, changed_model)


def best_of(sizes, parts):
    """Return the size of the largest part of the best division, by trying all."""
    return min(
        max(sum(sizes[a:b]) for a, b in itertools.pairwise((0, *cuts, len(sizes))))
        for cuts in itertools.combinations(range(1, len(sizes)), parts - 1)
    )


@property_test(
    max_examples=200,
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any),
    wanted=st.integers(1, 8),
)
def test_parts_are_as_equal_as_they_can_be(sizes, wanted):
    parts = min(wanted, len(sizes))
    found = divide(sizes, parts)
    assert len(found) == parts and all(len(part) for part in found)
    assert [index for part in found for index in part] == list(range(len(sizes)))
    assert max(sum(sizes[i] for i in part) for part in found) == best_of(sizes, parts)
