"""LossScaler: scales, skipped steps, clipping and statistics, compared with torch's GradScaler and clip_grad_norm_."""

import copy
import math
import pickle

import pytest
import torch
from optimizers import (
    IDS,
    KINDS,
    PAIRS,
    assert_same,
    assert_untouched,
    by_hand,
    everything,
    give_scaled,
    iterate,
    skip_unless_torch_unscales,
    taken_by,
    telling,
    two_groups,
)

from dltrain_ext import _ops, optim
from dltrain_ext.amp import GradStats, LossScaler

GradScaler = torch.amp.GradScaler
INF, NAN = float("inf"), float("nan")
TORCHS = [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {}), (torch.optim.AdamW, {"fused": True})]
CLIPS = [None, 0.5, 1e9, 0, INF]


@pytest.mark.parametrize("kind", [*KINDS, torch.optim.SGD])
def test_scales(kind, device):
    def run(text, **options):
        scaler = LossScaler(device, **options)
        scales = iterate(scaler, *two_groups(kind, device), text)
        assert scaler.skipped_steps == text.count("x")
        return scales

    assert run("......", init_scale=8.0, growth_interval=2) == [8, 16, 16, 32, 32, 64]
    assert run("xxx", init_scale=8.0) == [4, 2, 1]
    assert run(".x.x..", init_scale=8.0, growth_interval=2) == [8, 4, 4, 2, 2, 4]
    assert run("..xx..", init_scale=8.0, growth_interval=1, growth_factor=3.0) == [24, 72, 36, 18, 54, 162]
    assert run("xxxx", init_scale=8.0, min_scale=3.0) == [4, 3, 3, 3]
    assert run("....x", init_scale=8.0, growth_interval=1, max_scale=20.0) == [16, 20, 20, 20, 10]
    assert run("xxx", init_scale=2.0, min_scale=0.25) == [1, 0.5, 0.25]


@pytest.mark.parametrize("kind", [optim.SGD, torch.optim.SGD])
@pytest.mark.parametrize(
    ("hysteresis", "wanted"),
    [
        (1, [32, 16, 8, 8, 16, 8, 4, 4, 8, 4]),
        (2, [64, 32, 16, 16, 32, 32, 16, 16, 32, 32]),
        (3, [64, 64, 32, 32, 64, 64, 64, 64, 128, 128]),
    ],
)
def test_hysteresis(kind, hysteresis, wanted, device):
    scaler = LossScaler(device, init_scale=64.0, growth_interval=2, hysteresis=hysteresis)
    assert iterate(scaler, *two_groups(kind, device), "xxx..xx..x") == wanted


def test_200_overflows_in_a_row(device):
    scaler = LossScaler(device, growth_interval=1)
    scales = iterate(scaler, *two_groups(optim.AdamW, device), "x" * 200 + "..")
    assert min(scales) == 1.0
    assert scales[-3:] == [1.0, 2.0, 4.0]


def test_a_scale_set_by_the_user(device):
    scaler = LossScaler(device, init_scale=8.0, max_scale=16.0)
    scaler.scale(torch.ones((), device=device))
    scaler.update(0.125)
    assert scaler.get_scale() == 0.125
    scaler.update(torch.full((), 64.0, device=device))
    assert scaler.get_scale() == 64.0
    params, optimizer = two_groups(optim.SGD, device)
    give_scaled(params, 0, scaler)
    scaler.step(optimizer, max_norm=1e9)
    assert_same([scaler.total_norm], [torch.cat([p.grad.flatten() for p in params]).norm() / 64])


@pytest.mark.parametrize(("kind", "torchs"), PAIRS, ids=IDS)
@pytest.mark.parametrize("max_norm", CLIPS)
@pytest.mark.parametrize("unscale_first", [False, True])
def test_the_results_equal_those_of_torchs_calls(kind, torchs, max_norm, unscale_first, device):
    options = telling(kind, **taken_by(kind, eps=1e-2))
    (params, optimizer), (twins, twin) = two_groups(kind, device, **options), two_groups(torchs, device, **options)
    scaler, other = (one(device, init_scale=64.0, growth_interval=3) for one in (LossScaler, GradScaler))
    assert scaler.total_norm.isnan()
    for seed in range(20):
        bad = NAN if seed % 7 == 0 else None
        give_scaled(params, seed, scaler, bad)
        give_scaled(twins, seed, other, bad)
        if unscale_first:
            scaler.unscale_(optimizer)
        before = [p.grad.clone() for p in params]
        scaler.step(optimizer, max_norm=max_norm)
        assert_untouched([p.grad for p in params], before)
        norm = by_hand(twins, twin, other, max_norm)
        if norm is not None:
            torch.testing.assert_close(scaler.total_norm, norm, rtol=1e-5, atol=0, equal_nan=True)
        scaler.update()
        other.update()
        assert scaler.get_scale() == other.get_scale()
        assert scaler.state_dict()["_growth_tracker"] == other.state_dict()["_growth_tracker"]
    assert scaler.skipped_steps == 3
    assert_same(params, twins)
    for p, q in zip(params, twins, strict=True):
        assert_same(optimizer.state[p].values(), [twin.state[q][key] for key in optimizer.state[p]])


@pytest.mark.parametrize(("kind", "options"), TORCHS)
@pytest.mark.parametrize("max_norm", CLIPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_torchs_optimizers(kind, options, max_norm, dtype, device):
    """The bits are equal, because the operations are the same."""
    skip_unless_torch_unscales(dtype, device)
    results = []
    for scaler in (LossScaler(device, init_scale=64.0), GradScaler(device, init_scale=64.0)):
        params, optimizer = two_groups(kind, device, dtype, **options)
        for seed in range(8):
            give_scaled(params, seed, scaler, INF if seed in (0, 5) else None)
            if isinstance(scaler, LossScaler):
                scaler.step(optimizer, max_norm)
                assert scaler.total_norm.isnan() == (max_norm is None), seed
                assert scaler.skipped_steps == (seed >= 0) + (seed >= 5)
            else:
                by_hand(params, optimizer, scaler, max_norm)
            scaler.update()
        results.append([*everything(params, optimizer), torch.tensor(scaler.get_scale())])
    assert_untouched(*results)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_several_optimizers_in_one_iteration(kind, max_norm, device):
    """Each has its own norm and is skipped by itself; the scale falls if the gradients of one overflow."""
    pairs = [two_groups(kind, device), two_groups(torch.optim.SGD, device), two_groups(kind, device)]
    alone = [two_groups(one, device) for one in (kind, torch.optim.SGD, kind)]
    scaler, others = LossScaler(device, init_scale=8.0), [GradScaler(device, init_scale=8.0) for _ in alone]
    for seed in range(4):
        for index, (params, optimizer) in enumerate(pairs):
            bad = INF if index == seed == 2 else None
            give_scaled(params, seed, scaler, bad)
            scaler.step(optimizer, max_norm)
            give_scaled(alone[index][0], seed, others[index], bad)
            by_hand(*alone[index], others[index], max_norm)
        scaler.update()
        assert scaler.get_scale() == (8.0 if seed < 2 else 4.0)
        for other in others:
            other.update(scaler.get_scale())
    assert scaler.skipped_steps == 1
    for (params, _), (twins, _) in zip(pairs, alone, strict=True):
        assert_same(params, twins)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_norm", CLIPS)
@pytest.mark.parametrize("bad", [None, INF, NAN])
def test_disabled_is_clip_and_step(kind, max_norm, bad, device):
    options = taken_by(kind, max_grad_norm=None)  # which would clip twice, and what is infinite becomes NaN then
    (params, optimizer), (twins, twin) = two_groups(kind, device, **options), two_groups(kind, device, **options)
    scaler = LossScaler(device, enabled=False)
    for seed in range(4):
        give_scaled(params, seed, scaler, bad if seed == 3 else None)
        give_scaled(twins, seed, scaler, bad if seed == 3 else None)
        before = [p.grad.clone() for p in params]
        scaler.step(optimizer, max_norm)
        scaler.update()
        assert_untouched([p.grad for p in params], before)
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(twins, max_norm)
            torch.testing.assert_close(scaler.total_norm, norm, rtol=1e-5, atol=0, equal_nan=True)
        twin.step()
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert scaler.state_dict() == {}
    assert scaler.skipped_steps == 0


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_disabled_with_torchs_optimizer(max_norm, device):
    (params, optimizer), (twins, twin) = two_groups(torch.optim.SGD, device), two_groups(torch.optim.SGD, device)
    scaler = LossScaler(device, enabled=False)
    give_scaled(params, 0, scaler)
    give_scaled(twins, 0, scaler)
    if max_norm is None:
        assert scaler.step(optimizer, closure=lambda: 3.0) == 3.0
    else:
        with pytest.raises(RuntimeError, match="max_norm: expected None with a closure"):
            scaler.step(optimizer, max_norm, closure=lambda: 3.0)
        scaler.step(optimizer, max_norm)
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(twins, max_norm)
    twin.step()
    assert_untouched(params, twins)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("with_flag", [True, False])
def test_given_statistics_are_not_computed_again(kind, max_norm, enabled, with_flag, device, monkeypatch):
    (params, optimizer), (twins, twin) = two_groups(kind, device), two_groups(kind, device)
    scaler, other = (LossScaler(device, init_scale=8.0, growth_interval=2, enabled=enabled) for _ in range(2))
    for seed in range(6):
        bad = NAN if enabled and seed in (0, 4) else None
        give_scaled(twins, seed, other, bad)
        other.step(twin, max_norm)
        other.update()
        give_scaled(params, seed, scaler, bad)
        total = sum(p.grad.double().square().sum() for p in params)
        flag = torch.full((1,), 2.0 if bad else 0.0, device=device) if with_flag else None
        with monkeypatch.context() as patch:
            patch.setattr(_ops, "sum_squares_of", lambda groups: pytest.fail("a pass over the gradients"))
            patch.setattr(scaler, "_unscale_grads_", lambda *_: pytest.fail("a pass over the gradients"))
            scaler.step(optimizer, max_norm, GradStats(total.reshape(1), flag))
        scaler.update()
        assert_same([scaler.total_norm.nan_to_num(-1)], [other.total_norm.nan_to_num(-1)])
    assert_same(params, twins)
    assert scaler.state_dict() == other.state_dict()


def test_a_given_flag_skips_the_step_although_the_sum_is_finite(device):
    params, optimizer = two_groups(optim.AdamW, device)
    scaler = LossScaler(device)
    give_scaled(params, 0, scaler)
    before = everything(params, optimizer)
    one = torch.ones((), device=device)
    scaler.step(optimizer, 1.0, GradStats(one.double(), 2 * one))
    assert_untouched(everything(params, optimizer), before)
    assert scaler.skipped_steps == 1


@pytest.mark.parametrize("kinds", [(LossScaler, GradScaler), (GradScaler, LossScaler), (LossScaler, LossScaler)])
@pytest.mark.parametrize("started", [True, False])
def test_states_can_be_exchanged_with_torchs(kinds, started, device):
    scaler, other = (kind(device, init_scale=8.0, growth_interval=3) for kind in kinds)
    held, others = two_groups(torch.optim.SGD, device), two_groups(torch.optim.SGD, device)

    iterate(scaler, *held, ".x..")
    if started:
        iterate(other, *others, "xx.")
    saved = scaler.state_dict()
    assert {type(value) for value in saved.values()} <= {int, float}
    other.load_state_dict(pickle.loads(pickle.dumps(saved)))
    shared = GradScaler(device).state_dict().keys()
    assert all(other.state_dict()[key] == saved[key] for key in shared)
    iterate(scaler, *held, ".xx.")
    iterate(other, *others, ".xx.")
    assert all(other.state_dict()[key] == scaler.state_dict()[key] for key in shared)
    assert scaler.get_scale() == 8 / 2 * 2 / 4


def test_values_that_torchs_state_lacks_do_not_change(device):
    scaler = LossScaler(device, init_scale=8.0, min_scale=2.0, hysteresis=3)
    iterate(scaler, *two_groups(optim.SGD, device), "xx")
    before = scaler.state_dict()
    scaler.load_state_dict(GradScaler(device, init_scale=32.0).state_dict())
    assert scaler.state_dict() == {**before, "scale": 32.0}
    assert scaler.skipped_steps == 2


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 3.402823466385289e38])
def test_a_scale_that_no_step_can_make_is_refused(scale, device):
    scaler = LossScaler(device, init_scale=8.0)
    before = scaler.state_dict()
    for state in ({**before, "scale": scale}, {**before, "growth_factor": 0.5}, {**before, "backoff_factor": 1.0}):
        with pytest.raises(ValueError, match="state_dict: expected 0 < scale|1 < growth_factor|0 < backoff_factor < 1"):
            scaler.load_state_dict(state)
        assert scaler.state_dict() == before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s)), "state_dict"])
@pytest.mark.parametrize("enabled", [True, False])
def test_copies_continue_in_the_same_way(copied, enabled, device):
    """The copy is made between two of the three successive overflows after which the scale falls."""
    scaler = LossScaler(device, init_scale=8.0, min_scale=0.5, max_scale=16.0, hysteresis=3, enabled=enabled)
    held = two_groups(optim.SGD, device)
    iterate(scaler, *held, "xx")
    if copied == "state_dict":
        twin = LossScaler(device, enabled=enabled)
        twin.load_state_dict(scaler.state_dict())
    else:
        twin = copied(scaler)
    for seed in range(3):
        assert twin.state_dict() == scaler.state_dict()
        for one in (scaler, twin):
            iterate(one, *held, "x")
        assert scaler.get_scale() == (8.0 / 2 ** (seed + 1) if enabled else 1.0)
    assert isinstance(twin, GradScaler)


@pytest.mark.parametrize("kind", [*KINDS, torch.optim.SGD])
def test_only_one_step_per_iteration(kind, device):
    """A second step raises, and changes neither parameters nor gradients nor counts."""
    params, optimizer = two_groups(kind, device)
    scaler = LossScaler(device)
    give_scaled(params, 0, scaler)
    scaler.step(optimizer, 1.0)
    before = everything(params, optimizer) + [p.grad.clone() for p in params]
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer, 0.1)
    assert_untouched(everything(params, optimizer) + [p.grad for p in params], before)
    scaler.update()
    with pytest.raises(RuntimeError, match="[Cc]losure"):
        scaler.step(optimizer, closure=lambda: None)
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()


@pytest.mark.parametrize(("size", "max_norm"), [(1e-7, 1e-7), (0.0, 0.0), (1e30, 0.01), (1e36, 0.01), (1e37, 0.01)])
def test_clipping_of_tiny_and_huge_gradients(size, max_norm, device):
    """The square of a huge norm overflows fp32: torch's own clipping makes such gradients zero."""
    p = torch.nn.Parameter(torch.zeros(4, device=device))
    optimizer, scaler = optim.SGD([p], lr=1.0), LossScaler(device, init_scale=1.0)
    scaler.scale(torch.ones((), device=device))
    p.grad = torch.full_like(p, size)
    scaler.step(optimizer, max_norm)
    torch.testing.assert_close(scaler.total_norm.item(), size * 2, rtol=1e-5, atol=0)
    wanted = size * min(1.0, max_norm / (2 * size + 1e-6))
    torch.testing.assert_close(-p.detach(), torch.full_like(p, wanted), rtol=1e-5, atol=0)


def test_an_error_leaves_no_unscaler_in_the_optimizer(device):
    params, optimizer = two_groups(optim.SGD, device, momentum=0.9)
    scaler = LossScaler(device, init_scale=4.0)
    give_scaled(params, 0, scaler)
    optimizer.state[params[0]]["momentum_buffer"] = torch.zeros(99, device=device)
    with pytest.raises(ValueError, match="momentum_buffers"):
        scaler.step(optimizer, 1.0)
    assert optimizer.unscaler is None
    assert_same(params, two_groups(optim.SGD, device)[0])


@pytest.mark.parametrize(
    ("name", "value"),
    [("init_scale", 0.5), ("init_scale", 2.0**25), ("min_scale", 0.0), ("min_scale", 2.0**25), ("max_scale", INF)]
    + [("hysteresis", value) for value in (0, 1.0, True)],
)
def test_errors_name_the_wrong_argument(name, value):
    with pytest.raises(ValueError, match=name):
        LossScaler("cpu", **{name: value})


@pytest.mark.parametrize(
    ("name", "stats"),
    [
        ("sum_squares", GradStats(torch.ones(()))),
        ("sum_squares", GradStats(torch.ones((), dtype=torch.float64, device="meta"))),
        ("sum_squares", GradStats(torch.ones(2, dtype=torch.float64))),
        ("found_inf", GradStats(torch.ones((), dtype=torch.float64), torch.ones(2))),
    ],
)
def test_wrong_grad_stats(name, stats):
    params, optimizer = two_groups(optim.SGD)
    scaler = LossScaler("cpu")
    give_scaled(params, 0, scaler)
    before = everything(params, optimizer)
    for prepare in (lambda optimizer: None, scaler.unscale_):
        prepare(optimizer)
        with pytest.raises(ValueError, match=name):
            scaler.step(optimizer, 1.0, stats)
        assert_untouched(everything(params, optimizer), before)
        assert scaler.skipped_steps == 0


@pytest.mark.parametrize("max_norm", [-1.0, NAN, "1", torch.ones(())], ids=str)
def test_a_wrong_max_norm(max_norm):
    params, optimizer = two_groups(optim.SGD)
    scaler = LossScaler("cpu")
    give_scaled(params, 0, scaler)
    with pytest.raises(ValueError, match="max_norm: expected a number >= 0 or None, got"):
        scaler.step(optimizer, max_norm)
    scaler.step(optimizer, 1.0)


def test_counts_that_were_read_do_not_change(device):
    held, scaler, seen = two_groups(optim.SGD, device), LossScaler(device), []
    for _ in range(3):
        iterate(scaler, *held, "x")
        seen.append(scaler.skipped_steps)
    assert seen == [1, 2, 3]


@pytest.mark.parametrize("number", [1, 128, 129, 4096, 20_000])
def test_the_norm_of_many_small_tensors(number, device):
    params = [torch.nn.Parameter(torch.zeros(2, device=device)) for _ in range(number)]
    scaler, optimizer = LossScaler(device, init_scale=2.0), optim.SGD(params, lr=1.0)
    scaler.scale(torch.ones((), device=device))
    for index, p in enumerate(params):
        p.grad = torch.full((2,), float(index % 7), device=device)
    scaler.step(optimizer, max_norm=1e9)
    scaler.update()
    wanted = (sum(2 * (index % 7) ** 2 for index in range(number)) ** 0.5) / 2
    torch.testing.assert_close(scaler.total_norm.item(), wanted, rtol=1e-6, atol=0)
    params[-1].grad[1] = NAN
    scaler.step(optimizer)
    assert scaler.skipped_steps == 1
