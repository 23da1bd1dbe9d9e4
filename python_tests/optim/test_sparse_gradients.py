"""Sparse gradients: SGD and Adagrad do torch's steps, and the other optimizers name the parameter that has one."""

import copy
import math

import pytest
import torch
from optimizers import KINDS, assert_same, taken_by
from torch import nn

from dltrain_ext import optim
from dltrain_ext.amp import LossScaler

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own Adagrad causes it

WITH_SPARSE = [
    (optim.SGD, {}),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.1, "maximize": True}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (optim.Adagrad, {}),
    (optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1, "maximize": True}),
]
sparse_optimizers = pytest.mark.parametrize(("kind", "options"), WITH_SPARSE)


def torchs(kind):
    return getattr(torch.optim, kind.__name__)


def model_of(device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 3), nn.Embedding(6, 3, sparse=True))
    return model.to(device, dtype)


def backward(model, seed, scale=1.0, words=None):
    """Do a backward pass; some words occur more than once."""
    device, generator = next(model.parameters()).device, torch.Generator().manual_seed(seed)
    words = torch.randint(10, (8,), generator=generator).to(device) if words is None else words
    (model[1](model[0](words)) * model[2](words % 6)).square().mean().mul(scale).backward()


def train(model, optimizer, seeds):
    for seed in seeds:
        optimizer.zero_grad()
        backward(model, seed)
        optimizer.step()


def assert_same_state(ours, theirs):
    for index, entry in theirs["state"].items():
        its = ours["state"][index]
        assert its.keys() == entry.keys()
        for name, value in entry.items():
            assert its[name].layout == value.layout
            assert_same([its[name].to_dense()], [value.to_dense()])


@sparse_optimizers
def test_ten_steps_equal_torchs(kind, options, device):
    """Sparse and dense gradients in one group. Each of the two can load the other's state, and go on with it."""
    models = [model_of(device) for _ in range(2)]
    optimizers = [
        each(model.parameters(), lr=0.03, **options) for each, model in zip((kind, torchs(kind)), models, strict=True)
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        assert len(optimizer.param_groups) == 1
        train(model, optimizer, range(10))
        assert model[0].weight.grad.is_sparse and not model[1].weight.grad.is_sparse
    assert_same(*(model.parameters() for model in models))
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    assert_same_state(*saved)
    for optimizer, state in zip(optimizers, reversed(saved), strict=True):
        optimizer.load_state_dict(state)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(10, 13))
    assert_same(*(model.parameters() for model in models))


@sparse_optimizers
@pytest.mark.parametrize("scaler_of", [LossScaler, torch.amp.GradScaler])
def test_scaled_steps(kind, options, scaler_of, device):
    """The gradients are unscaled, and a step that overflows is skipped, as by torch."""
    results = []
    for each in (kind, torchs(kind)):
        model = model_of(device)
        optimizer, scaler = each(model.parameters(), lr=0.1, **options), scaler_of(device, init_scale=8.0)
        for seed in range(6):
            optimizer.zero_grad()
            backward(model, seed, scaler.scale(torch.ones((), device=device)))
            if seed in (0, 3):
                model[2].weight.grad._values()[1, 2] = math.inf
            before = model[0].weight.detach().clone()
            scaler.step(optimizer)
            assert torch.equal(model[0].weight, before) == (seed in (0, 3))
            scaler.update()
        assert scaler.get_scale() == 2
        results.append([*model.parameters()])
    assert_same(*results)


@sparse_optimizers
def test_clipped_steps(kind, options):
    """The norm is that of all gradients, with the parts of an element added up."""
    results, norms = [], []
    for dense in (False, True):
        model = model_of()
        optimizer, scaler = kind(model.parameters(), lr=0.1, **options), LossScaler("cpu", init_scale=8.0)
        for seed in range(4):
            words = torch.tensor(
                [1, 1, 2]
            )  # with momentum a row without gradient also changes, but here none has had one
            optimizer.zero_grad()
            backward(model, seed, scaler.scale(torch.ones(())), words)
            for p in model.parameters() if dense else ():
                p.grad = p.grad.to_dense()
            scaler.step(optimizer, max_norm=0.01)
            scaler.update()
        results.append([*model.parameters()])
        norms.append(scaler.total_norm)
    assert_same(*results)
    assert_same(*([norm] for norm in norms))
    assert norms[0] > 0.01


def test_a_gradient_may_be_sparse_in_some_steps():
    """A momentum buffer that a dense gradient has made is used for a sparse one, as by torch."""
    results = []
    for each in (optim.SGD, torch.optim.SGD):
        model = model_of()
        optimizer = each(model.parameters(), lr=0.1, momentum=0.9)
        for seed in range(5):
            optimizer.zero_grad()
            backward(model, seed)
            if seed < 2:
                model[0].weight.grad = model[0].weight.grad.to_dense()
            optimizer.step()
        results.append([*model.parameters()])
    assert_same(*results)


def test_parameters_that_are_added_later():
    model, more = model_of(), nn.Parameter(torch.ones(4, 2))
    optimizer = optim.Adagrad(model.parameters(), lr=0.1)
    optimizer.add_param_group({"params": [more]})
    more.grad = torch.sparse_coo_tensor([[1, 1]], [[1.0, 2.0], [3.0, 0.0]], (4, 2), check_invariants=True)
    optimizer.step()
    torch.testing.assert_close(more.detach()[1], torch.tensor([0.9, 0.9]))
    assert optimizer.state[more]["step"] == 1 and torch.equal(
        optimizer.state[more]["sum"][1], torch.tensor([16.0, 4.0])
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (optim.SGD, optim.Adagrad)])
def test_other_optimizers_name_the_parameter(kind):
    model = model_of()
    optimizer = kind(model.parameters(), **taken_by(kind, lr=0.1))
    before = [p.detach().clone() for p in model.parameters()]
    backward(model, 0)
    model[0].weight.grad = model[0].weight.grad.to_dense()
    expected = (
        rf"grads\[3\]: expected a plain dense tensor for {kind.__name__}, got a sparse one; only Adagrad and SGD take"
    )
    with pytest.raises(TypeError, match=expected):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert not any("step" in entry and entry["step"] for entry in optimizer.state.values())


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adagrad])
def test_what_sparse_gradients_exclude(kind):
    """Weight decay, and half-precision parameters; nothing has changed after the error."""
    for options, dtype, error, expected in (
        (
            {"weight_decay": 0.1},
            torch.float32,
            ValueError,
            r"weight_decay: expected 0 in the group of params\[0\].*got 0.1",
        ),
        ({}, torch.bfloat16, TypeError, r"params\[0\]: expected float32 with a sparse gradient, got torch.bfloat16"),
    ):
        model = model_of(dtype=dtype)
        optimizer = kind(model.parameters(), lr=0.1, **options)
        backward(model, 0)
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(error, match=expected):
            optimizer.step()
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
