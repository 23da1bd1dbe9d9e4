"""Models of every type and form, and every way of stepping the inner optimizer."""

import math

import pytest
import torch
from local_training import backups, flat, give_grads, loss_of, network, same, train
from ranks import run_ranks
from torch import nn

from dltrain_ext import amp, local_sgd, optim

HALF = [torch.bfloat16, torch.float16]
SCHEDULES = [dict(), dict(fragments=2, delay=1)]


def with_masters(rank, world_size, dtype, schedule):
    model = network(dtype)
    inner = optim.AdamW(model.parameters(), lr=1e-3)
    outer = local_sgd.DiLoCo(model, inner, sync_every=4, **schedule)
    train(model, inner, rank, range(1, 13))
    found = backups(outer)
    moved = 0
    for name, parameter in model.named_parameters():
        master = inner.state[parameter]["master_param"]
        assert parameter.dtype == dtype and torch.equal(parameter, master.to(dtype))
        moved += int((master != master.to(dtype).float()).sum())
        if not schedule:
            assert torch.equal(master, found[name])
    assert moved > 10_000, "masters have no more digits than their copies"
    return found


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_masters_and_their_copies_are_both_written(dtype, schedule):
    first, second = run_ranks(2, with_masters, dtype, schedule)
    assert same(first, second)


def without_masters(rank, world_size, dtype):
    model = network(dtype)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = local_sgd.DiLoCo(
        model, inner, sync_every=2, codec="int4", momentum=0.0, nesterov=False, error_feedback=False
    )
    train(model, inner, rank, range(1, 5))
    before, parameters = backups(outer), flat(model)
    assert any(not torch.equal(value, value.to(dtype).float()) for value in before.values())
    for group in inner.param_groups:
        group["lr"] = 0.0
    train(model, inner, rank, range(5, 9))
    assert outer.outer_steps == 4
    assert same(backups(outer), before) and torch.equal(flat(model), parameters)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name].to(dtype))
    return before


@pytest.mark.parametrize("dtype", HALF)
def test_sites_that_do_not_move_change_nothing(dtype):
    """What a half parameter cannot hold of the outer step is not taken for a movement."""
    first, second = run_ranks(2, without_masters, dtype)
    assert same(first, second)


INNERS = {
    "foreach": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
}


def by_torch(rank, world_size, kind):
    model = network()
    inner = INNERS[kind](model.parameters())
    outer = local_sgd.DiLoCo(model, inner, sync_every=4)
    train(model, inner, rank, range(1, 9))
    assert outer.outer_steps == 2 and not torch.equal(flat(model), flat(network()))
    return flat(model)


@pytest.mark.parametrize("kind", INNERS)
def test_any_optimizer_of_torch(kind):
    first, second = run_ranks(2, by_torch, kind)
    assert torch.equal(first, second)


def convolutions(memory_format):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 40, 5)).to(memory_format=memory_format)


def in_format(rank, world_size, formats, codec):
    """Return the parameters, in one order, after steps whose gradients do not depend on the order in memory."""
    model = convolutions(formats[rank])
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    local_sgd.DiLoCo(model, inner, sync_every=2, codec=codec)
    for step in range(4):
        give_grads(model, rank, step)
        inner.step()
    return flat(model)


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_parameters_in_channels_last(codec):
    last, plain = torch.channels_last, torch.contiguous_format
    first, second = run_ranks(2, in_format, (last, last), codec)
    expected, _ = run_ranks(2, in_format, (plain, plain), codec)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected, rtol=0, atol=0 if codec == "raw" else 0.01)


def in_different_formats(rank, world_size):
    with pytest.raises(ValueError, match="expected the same at all sites"):
        in_format(rank, world_size, (torch.channels_last, torch.contiguous_format), "raw")


def test_sites_with_different_orders_in_memory_are_refused():
    """Elements are averaged in their order in memory."""
    run_ranks(2, in_different_formats)


class Odd(nn.Module):
    """Frozen, tied, unused and empty parameters, a scalar, and one that the inner optimizer does not have."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.unused, self.left_out = nn.Parameter(torch.randn(40, 30)), nn.Parameter(torch.randn(1, 1, 7))
        self.empty, self.nothing = nn.Parameter(torch.empty(0, 5)), nn.Parameter(torch.empty(0))
        self.factor = nn.Parameter(torch.randn(()))
        self.last = nn.Linear(64, 10)

    def forward(self, x):
        return self.last(self.frozen(self.second(self.first(x)))) * self.factor + self.left_out.sum()


TRAINED = ["empty", "factor", "first.bias", "first.weight", "last.bias", "last.weight", "left_out", "nothing", "unused"]


def odd_model(rank, world_size, schedule):
    model, start, own = Odd(rank), Odd(0), Odd(rank)
    given = [p for name, p in model.named_parameters() if p.requires_grad and name != "left_out"]
    inner = optim.AdamW(given, lr=1e-3)
    outer = local_sgd.DiLoCo(model, inner, sync_every=9, **schedule)
    train(model, inner, rank, range(1, 19))
    outer.finish()
    assert outer.outer_steps == 2 * schedule.get("fragments", 1)
    assert torch.equal(model.frozen.weight, own.frozen.weight)
    assert torch.equal(model.unused, start.unused) and torch.equal(model.left_out, start.left_out)
    assert model.second.weight is model.first.weight and not torch.equal(model.first.weight, start.first.weight)
    found = backups(outer)
    assert sorted(found) == TRAINED and found["empty"].shape == (0, 5)
    return found


@pytest.mark.parametrize("schedule", [dict(), dict(fragments=9), dict(fragments=3, delay=2)])
def test_frozen_tied_unused_and_empty_parameters(schedule):
    """With nine fragments each has one parameter, so two have no elements."""
    first, second, third = run_ranks(3, odd_model, schedule)
    assert same(first, second) and same(first, third)


def alone(rank, world_size, codec, schedule):
    model = network()
    inner = optim.AdamW(model.parameters(), lr=1e-3)
    outer = local_sgd.DiLoCo(model, inner, sync_every=4, codec=codec, **schedule)
    train(model, inner, rank, range(1, 13))
    outer.finish()
    assert outer.outer_steps == 3 * schedule.get("fragments", 1)
    return flat(model)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_single_site_loses_nothing_to_a_codec(schedule):
    (exact,) = run_ranks(1, alone, "raw", schedule)
    (coded,) = run_ranks(1, alone, "int4", schedule)
    assert torch.equal(exact, coded)


def with_overflows(rank, world_size, scaler_of, inner_of, schedule):
    model = network()
    inner = inner_of(model.parameters(), lr=1e-3)
    scaler = scaler_of("cpu", init_scale=1024.0)
    outer = local_sgd.DiLoCo(model, inner, sync_every=4, **schedule)
    step = 0
    while outer.outer_steps < 4:
        step += 1
        inner.zero_grad()
        bad = (rank == 1 and step in (1, 3, 4)) or (rank == 0 and step == 6)
        scaler.scale(loss_of(model, rank, step) * (math.inf if bad else 1.0)).backward()
        scaler.step(inner)
        scaler.update()
        assert flat(model).isfinite().all()
    assert scaler.get_scale() == (128.0 if rank == 1 else 512.0)
    assert outer.metrics()["outer/nonfinite"] == 0
    return backups(outer), flat(model)


@pytest.mark.parametrize("scaler_of", [amp.LossScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("inner_of", [optim.AdamW, torch.optim.AdamW])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_overflow_at_one_site(scaler_of, inner_of, schedule):
    """Sites that skip steps, even the first, reach the averages later; the others wait."""
    (first, parameters), (second, others) = run_ranks(2, with_overflows, scaler_of, inner_of, schedule)
    assert same(first, second)
    if not schedule:
        assert torch.equal(parameters, others)


def by_every_way(rank, world_size, way):
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    before = torch.optim.lr_scheduler.StepLR(inner, step_size=3, gamma=0.5)
    outer = local_sgd.DiLoCo(model, inner, sync_every=2)
    after = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1.0 / (1 + step))

    def closure():
        inner.zero_grad()
        loss = loss_of(model, rank, outer.steps + 1)
        loss.backward()
        return loss

    for step in range(1, 7):
        if way == "closure":
            assert inner.step(closure) > 0
            continue
        inner.zero_grad()
        for micro in range(2 if way == "accumulation" else 1):
            loss_of(model, rank, 100 * micro + step).backward()
        inner.step()
        if way == "schedulers":
            before.step()
            after.step()
    assert outer.steps == 6 and outer.outer_steps == 3
    return flat(model)


def test_closures_schedulers_and_accumulation():
    found = {way: run_ranks(2, by_every_way, way) for way in ("plain", "closure", "schedulers", "accumulation")}
    for first, second in found.values():
        assert torch.equal(first, second)
    assert torch.equal(found["plain"][0], found["closure"][0])
    assert not torch.equal(found["plain"][0], found["accumulation"][0])
    assert not torch.equal(found["plain"][0], found["schedulers"][0])


def by_lbfgs(rank, world_size):
    model = network()
    inner = torch.optim.LBFGS(model.parameters(), max_iter=3)
    outer = local_sgd.DiLoCo(model, inner, sync_every=2)

    def closure():
        inner.zero_grad()
        loss = loss_of(model, rank, 1)
        loss.backward()
        return loss

    for _ in range(4):
        inner.step(closure)
    assert outer.outer_steps == 2
    return flat(model)


def test_an_optimizer_that_calls_its_closure_often():
    first, second = run_ranks(2, by_lbfgs)
    assert torch.equal(first, second)


def beside_other_hooks(rank, world_size):
    model = network(seed=rank)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    calls = []
    inner.register_step_pre_hook(lambda *_: calls.append("before"))
    local_sgd.DiLoCo(model, inner, sync_every=2)
    inner.register_step_pre_hook(lambda *_: calls.append("after"))
    train(model, inner, rank, range(1, 5))
    assert calls == ["before", "after"] * 4
    return flat(model)


def test_other_hooks_of_the_inner_optimizer_are_called():
    first, second = run_ranks(2, beside_other_hooks)
    assert torch.equal(first, second)
