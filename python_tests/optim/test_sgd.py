"""optim.SGD: its arithmetic compared with fp64, and its options with torch.optim.SGD."""

import copy

import pytest
import torch
from optimizers import assert_same, give_grads
from torch import library

from dltrain_ext import optim, reference

SHAPES = [(3, 5), (7,), (), (0, 4), (64, 33)]
OPTIONS = [
    {},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"lr": 0.1, "weight_decay": 0.2, "maximize": True},
    {"lr": torch.tensor(0.01), "momentum": 0.5},
    {"lr": 0.1, "momentum": 0.9, "foreach": True},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "fused": True},
]


def make_params(device, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_like_torch(options, device):
    results = []
    for kind in (optim.SGD, torch.optim.SGD):
        params = make_params(device)
        optimizer = kind(params, **options)
        for seed in range(10):
            give_grads(params, seed)
            optimizer.step()
        results.append((params, optimizer.state_dict()))
    assert_same(results[0][0], results[1][0])
    ours, theirs = (state for _, state in results)
    assert ours["param_groups"] == theirs["param_groups"]
    for key, values in ours["state"].items():
        assert_same(values.values(), theirs["state"][key].values())


def test_state_dicts_can_be_exchanged_with_torchs(device):
    pair = []
    for kind in (optim.SGD, torch.optim.SGD):
        params = make_params(device)
        pair.append((params, kind(params, lr=0.1, momentum=0.9, dampening=0.5)))
        give_grads(params, 0)
        pair[-1][1].step()
    states = [copy.deepcopy(optimizer.state_dict()) for _, optimizer in pair]
    for (params, optimizer), state in zip(pair, reversed(states), strict=True):
        optimizer.load_state_dict(state)
        give_grads(params, 1)
        optimizer.step()
    assert_same(pair[0][0], pair[1][0])


def test_parameters_that_start_later(device):
    """A parameter's first step has no dampening, whenever it takes place."""
    results = []
    for kind in (optim.SGD, torch.optim.SGD):
        params = make_params(device, [(3,), (4,)])
        optimizer = kind(params, lr=0.1, momentum=0.9, dampening=0.5)
        for seed in range(4):
            give_grads(params[: 1 if seed < 2 else 2], seed)
            optimizer.step()
        results.append(params)
    assert_same(*results)


def test_a_skipped_first_step_leaves_no_trace(device):
    results = []
    for kind in (optim.SGD, torch.optim.SGD):
        params = make_params(device, [(3,)])
        optimizer = kind(params, lr=0.1, momentum=0.9, dampening=0.5)
        scaler = torch.amp.GradScaler(device, init_scale=4.0)
        for factor in (float("inf"), 1.0, 2.0):
            optimizer.zero_grad()
            scaler.scale((params[0] ** 2 * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(params)
    assert_same(*results)


def test_against_double(device):
    """The op in fp32 is compared with a computation in fp64, for the first step and later ones."""
    hyper = {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.2, "maximize": True}
    params = [p.detach() for p in make_params(device)]
    buffers = [torch.full_like(p, 7.0) for p in params]
    exact, exact_buffers = [p.double() for p in params], [b.double() for b in buffers]
    scale = torch.tensor(8.0, device=device)
    for step in range(5):
        grads = [torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(device) for p in params]
        torch.ops.dltrain_ext.sgd_(params, grads, buffers, [], first=step == 0, grad_scale=scale, **hyper)
        doubles = [g.double() for g in grads]
        reference.sgd_(exact, doubles, exact_buffers, [], first=step == 0, grad_scale=scale, **hyper)
    for ours, want in zip(params + buffers, exact + exact_buffers, strict=True):
        torch.testing.assert_close(ours.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_opcheck(momentum, device):
    params, grads = make_params(device), make_params(device)
    lists = [[t.detach() for t in tensors] for tensors in (params, grads)]
    buffers = [torch.zeros_like(p) for p in params] if momentum else []
    library.opcheck(torch.ops.dltrain_ext.sgd_, (*lists, buffers, []), {"lr": 0.1, "momentum": momentum})


def test_errors_name_the_wrong_argument(device):
    params = make_params(device, [(3,), (4,)])
    optimizer = optim.SGD(params, lr=0.1, momentum=0.9)
    give_grads(params, 0)
    optimizer.state[params[1]]["momentum_buffer"] = torch.zeros(5, device=device)
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=r"momentum_buffers\[1\]: expected shape \[4\].*, got \[5\]"):
        optimizer.step()
    assert_same(params, before)
    with pytest.raises(ValueError, match="differentiable: expected False, got True"):
        optim.SGD(params, differentiable=True)
    with pytest.raises(ValueError, match="momentum_buffers: expected 2 tensors, one for each of params, got 0"):
        torch.ops.dltrain_ext.sgd_(before, before, [], [], lr=0.1, momentum=0.9)
