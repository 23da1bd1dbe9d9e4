"""The state of the servers as a checkpoint that other numbers of workers and servers load, and torch's form."""

import copy

import pytest
import torch
from optimizers import KINDS, SHAPES, give_grads, make_params, taken_by, telling
from ranks import FAR, run_ranks

from dltrain_ext import optim, ps

LARGE = (700, 1001)
BEFORE, AFTER = 3, 2


def named(params):
    return [(f"p{number}", p) for number, p in enumerate(params)]


def steps(params, optimizer, first, count):
    """All workers have the same gradients, so that their mean does not depend on their number."""
    for step in range(first, first + count):
        give_grads(params, step)
        optimizer.step()


def make(kind, dtype=torch.float32, fresh=0, **options):
    params = [torch.nn.Parameter((p + fresh).to(dtype)) for p in make_params([*SHAPES, LARGE])]
    given = telling(kind, lr=0.01) | taken_by(kind, max_grad_norm=None)
    return params, ps.Optimizer(named(params), kind, timeout=FAR, **given, **options)


def save(rank, world_size, kind, servers):
    params, optimizer = make(kind, servers=servers)
    steps(params, optimizer, 0, BEFORE)
    state = copy.deepcopy(optimizer.state_dict())
    assert state["ps"]["version"] == BEFORE
    steps(params, optimizer, BEFORE, AFTER)
    optimizer.close()
    return state, [p.detach() for p in params]


def resume(rank, world_size, kind, servers, state):
    if servers is not None and rank in servers and rank == world_size - 1:
        ps.serve(timeout=FAR)
        return None
    params, optimizer = make(kind, fresh=1.0, servers=servers)
    optimizer.load_state_dict(state)
    assert optimizer.version == 0 or optimizer._before == BEFORE
    for p, value in zip(params, state["ps"]["values"].values(), strict=True):
        assert torch.equal(p, value)
    steps(params, optimizer, BEFORE, AFTER)
    assert optimizer.version == BEFORE + AFTER
    optimizer.close()
    return [p.detach() for p in params]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not optim.SGLD], ids=lambda kind: kind.__name__)
def test_a_run_goes_on_with_other_workers_and_servers(kind):
    (state, expected), *_ = run_ranks(2, save, kind, None)
    first, *_ = run_ranks(3, resume, kind, [0, 2], state)
    for ours, value in zip(first, expected, strict=True):
        assert torch.equal(ours, value)

    # The optimizer that runs on the servers, in one process.
    params = [torch.nn.Parameter(value.clone()) for value in state["ps"]["values"].values()]
    local = kind(named(params), **telling(kind, lr=0.5) | taken_by(kind, max_grad_norm=None))
    local.load_state_dict(state)
    assert local.param_groups[0]["lr"] == 0.01
    steps(params, local, BEFORE, AFTER)
    for p, value in zip(params, expected, strict=True):
        assert torch.equal(p, value)


def half_and_coded(rank, world_size):
    params, optimizer = make(optim.AdamW, torch.bfloat16, codec="int8")
    for step in range(BEFORE):
        for number, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + number)).to(p.dtype)
        optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.close()
    assert state["state"][0]["master_param"].dtype == state["state"][0]["exp_avg"].dtype == torch.float32
    assert any(lost.any() for lost in state["ps"]["residuals"].values())
    params, optimizer = make(optim.AdamW, torch.bfloat16, 1.0, codec="int8")
    optimizer.load_state_dict(state)
    again = optimizer.state_dict()
    for name, value in state["ps"]["values"].items():
        assert torch.equal(again["ps"]["values"][name], value)
    for key, lost in state["ps"]["residuals"].items():
        assert torch.equal(again["ps"]["residuals"][key], lost)
    assert again["state"].keys() == state["state"].keys()
    wrong = copy.deepcopy(state)
    wrong["param_groups"][0]["weight_decay"] = 0.5
    with pytest.raises(ValueError, match="state_dict: expected weight_decay of 0.1, got 0.5"):
        optimizer.load_state_dict(wrong)
    wrong = copy.deepcopy(state)
    wrong["state"][1]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match="state_dict"):
        optimizer.load_state_dict(wrong)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(RuntimeError, match="load_state_dict: expected an optimizer that has made no step yet"):
        optimizer.load_state_dict(state)
    optimizer.close()


def test_half_parameters_and_what_encoding_has_lost():
    run_ranks(2, half_and_coded)
