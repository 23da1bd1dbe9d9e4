"""The optimizers that torch does not have: against the packages that have them, and against their formulas."""

import pytest
import torch
from optimizers import assert_same, everything, give_grads, make_params, two_groups

from dltrain_ext import optim, reference
from dltrain_ext.amp import LossScaler

SHAPES = [(3, 5), (7,), (1, 1, 2), (64, 33)]
STEPS = 20


def after_steps(make, seeds=range(STEPS), shapes=SHAPES):
    params = [torch.nn.Parameter(0.1 * p.detach()) for p in make_params(shapes)]
    optimizer = make(params)
    for seed in seeds:
        give_grads(params, seed)
        optimizer.step()
    return params


def test_lion_is_that_of_lion_pytorch():
    package = pytest.importorskip("lion_pytorch")
    options = {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1}
    ours, theirs = (
        after_steps(lambda params, kind=kind: kind(params, **options)) for kind in (optim.Lion, package.Lion)
    )
    assert_same(ours, theirs)


def test_ftrl_is_that_of_pytorch_optimizer():
    package = pytest.importorskip("pytorch_optimizer")
    options = {"lr": 0.05, "beta": 1.0, "lambda_1": 1.0, "lambda_2": 0.1}
    ours, theirs = (
        after_steps(lambda params, kind=kind: kind(params, **options)) for kind in (optim.FTRL, package.FTRL)
    )
    assert_same(ours, theirs)
    assert 0.05 < sum(int((p == 0).sum()) for p in ours) / sum(p.numel() for p in ours) < 0.95


def test_lamb_without_decay_is_that_of_pytorch_optimizer():
    """That one has no bias correction of the moments, which the trust ratio cancels if there is no weight decay."""
    package = pytest.importorskip("pytorch_optimizer")
    ours = after_steps(lambda params: optim.LAMB(params, lr=0.01, eps=1e-12, weight_decay=0, preset="paper"))
    theirs = after_steps(lambda params: package.Lamb(params, lr=0.01, eps=1e-12, adam_debias=True))
    assert_same(ours, theirs)


@pytest.mark.parametrize("preset", ["paper", "apex", "nvlamb"])
@pytest.mark.parametrize("adapt", ["auto", True, False])
def test_presets_of_lamb(preset, adapt, device):
    """Two groups, of which one has no weight decay; gradients whose norm is far above 1."""
    params = make_params(SHAPES, device)
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}]
    optimizer = optim.LAMB(groups, lr=0.05, weight_decay=0.1, preset=preset, adapt=adapt)
    exact = [p.detach().double() for p in params]
    states = [[torch.zeros_like(p) for p in exact] for _ in range(2)]
    steps = [torch.zeros((), dtype=torch.float64) for _ in exact]
    for seed in range(5):
        give_grads(params, seed)
        grads = [p.grad.double() for p in params]
        if preset != "paper":
            norm = torch.cat([g.flatten() for g in grads]).norm()
            assert norm > 10
            grads = [g / (norm + 1e-6) for g in grads]
        optimizer.step()
        for part, decay in ((slice(0, 2), 0.1), (slice(2, None), 0.0)):
            adapts = (preset != "apex" or decay > 0) if adapt == "auto" else adapt
            lists = [exact[part], grads[part], *(state[part] for state in states), steps[part], []]
            reference.lamb_(*lists, lr=0.05, weight_decay=decay, adapt=adapts)
    assert_same(params, [p.float() for p in exact])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.01])
def test_lamb_clips_to_the_smaller_of_its_own_norm_and_the_scalers(max_norm, scaled, device):
    """The scale and the skipped step of a LossScaler change nothing else."""
    results = []
    for own, given, scaling in ((1.0, max_norm, scaled), (max_norm or 1.0, 5.0, False)):
        params, optimizer = two_groups(optim.LAMB, device, max_grad_norm=own)
        scaler = LossScaler(device, init_scale=64.0, enabled=scaling)
        for seed in range(4):
            give_grads(params, seed)
            scale = scaler.scale(torch.ones((), device=device))
            for p in params:
                p.grad *= scale * (float("inf") if scaling and seed == 2 else 1.0)
            if seed != 2 or scaling:
                scaler.step(optimizer, given)
                scaler.update()
        results.append(everything(params, optimizer))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_lamb_wants_one_norm_for_all_groups():
    params = make_params(SHAPES)
    optimizer = optim.LAMB([{"params": params[:1]}, {"params": params[1:], "max_grad_norm": None}])
    give_grads(params, 0)
    before = everything(params, optimizer)
    with pytest.raises(ValueError, match=r"max_grad_norm: expected the same for all groups, got \[1.0, None\]"):
        optimizer.step()
    assert_same(everything(params, optimizer), before)


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (optim.Lion, {"betas": (0.9, 1.0)}, "betas: expected two numbers >= 0 and < 1"),
        (optim.Lion, {"weight_decay": -1.0}, "weight_decay: expected a number >= 0, got -1.0"),
        (optim.LAMB, {"preset": "bert"}, "preset: expected one of paper, apex, nvlamb, got 'bert'"),
        (optim.LAMB, {"adapt": 2}, "adapt: expected 'auto', True or False, got 2"),
        (optim.LAMB, {"max_grad_norm": 0.0}, "max_grad_norm: expected 'auto', None or a number > 0, got 0.0"),
        (optim.FTRL, {"lambda_1": float("nan")}, "lambda_1: expected a number, got nan"),
        (optim.FTRL, {"lr": 0.0}, "lr: expected a number > 0, since FTRL divides by it, got 0.0"),
        (optim.FTRL, {"lr": torch.ones(2)}, r"lr: expected a tensor of one number, got shape \[2\]"),
    ],
)
def test_wrong_options_are_named(kind, options, text):
    with pytest.raises(ValueError, match=text):
        kind(make_params(SHAPES), **options)


@pytest.mark.parametrize("kind", [optim.Lion, optim.LAMB, optim.FTRL, optim.RMSprop, optim.Adamax])
def test_a_nan_stays(kind, device):
    """Of a gradient that no scaler looks at, as torch keeps it."""
    params, optimizer = two_groups(kind, device)
    for seed in range(3):
        give_grads(params, seed)
        params[0].grad[0, 0] = torch.nan if seed == 0 else 1.0
        optimizer.step()
    assert params[0][0, 0].isnan()
