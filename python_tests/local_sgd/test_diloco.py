"""Outer steps against plain torch, the same bits at all sites, and how fragments and delays are ordered."""

import pytest
import torch
from ranks import run_ranks
from torch import nn

from dltrain_ext import local_sgd, optim

SIZES = ((64, 96), (96, 64), (64, 10))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*size) for size in SIZES))


def train(model: nn.Module, inner: torch.optim.Optimizer, steps: int, rank: int, after=lambda step: None) -> None:
    data = torch.Generator().manual_seed(rank)
    for step in range(1, steps + 1):
        inputs = torch.randn(16, 64, generator=data)
        targets = torch.randint(10, (16,), generator=data)
        inner.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        inner.step()
        after(step)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])


def values_of(outer: local_sgd.DiLoCo) -> torch.Tensor:
    """Return what all sites had after the last outer steps."""
    saved = outer.state_dict()["backup"]
    return torch.cat([saved[name].flatten() for name in sorted(saved)])


def reference(world_size: int, steps: int, sync_every: int, **outer_options) -> torch.Tensor:
    """Return the parameters after outer steps by torch.optim.SGD."""
    start = network()
    outer = torch.optim.SGD(start.parameters(), **outer_options)
    sites = [network() for _ in range(world_size)]
    inners = [torch.optim.AdamW(site.parameters(), lr=1e-3) for site in sites]
    data = [torch.Generator().manual_seed(rank) for rank in range(world_size)]
    for step in range(1, steps + 1):
        for site, inner, generator in zip(sites, inners, data, strict=True):
            inputs = torch.randn(16, 64, generator=generator)
            targets = torch.randint(10, (16,), generator=generator)
            inner.zero_grad()
            nn.functional.cross_entropy(site(inputs), targets).backward()
            inner.step()
        if step % sync_every == 0:
            for parameter, *own in zip(start.parameters(), *(site.parameters() for site in sites), strict=True):
                parameter.grad = parameter.detach() - torch.stack([each.detach() for each in own]).mean(0)
            outer.step()
            for site in sites:
                site.load_state_dict(start.state_dict())
    return flat(start)


def raw_run(rank: int, world_size: int, options: dict) -> torch.Tensor:
    model = network()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = local_sgd.DiLoCo(model, inner, sync_every=8, codec="raw", **options)
    train(model, inner, 24, rank)
    assert outer.outer_steps == 3 * options.get("fragments", 1)
    return flat(model)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "rule",
    [
        dict(lr=0.7, momentum=0.9, nesterov=True),
        dict(lr=0.5, momentum=0.9, nesterov=False),
        dict(lr=1.0, momentum=0.0, nesterov=False),
    ],
)
def test_raw_outer_steps_are_those_of_torch(world_size, rule):
    expected = reference(world_size, 24, 8, **rule)
    found = run_ranks(world_size, raw_run, rule)
    for each in found:
        assert torch.equal(each, found[0])
        torch.testing.assert_close(each, expected, rtol=1e-5, atol=1e-6)


def coded_run(rank: int, world_size: int, options: dict) -> tuple[torch.Tensor, torch.Tensor]:
    model = network()
    inner = optim.AdamW(model.parameters(), lr=1e-3)
    outer = local_sgd.DiLoCo(model, inner, sync_every=8, **options)
    train(model, inner, 32, rank)
    values = values_of(outer)
    assert outer.outer_steps == 4 * options.get("fragments", 1)
    return values, flat(model)


@pytest.mark.parametrize("codec", ["raw", "bf16", "fp16", "fp8", "int8", "int4"])
@pytest.mark.parametrize("schedule", [dict(), dict(fragments=4), dict(fragments=2, delay=3), dict(delay=7, mix=0.0)])
def test_sites_have_the_same_bits(codec, schedule):
    found = run_ranks(3, coded_run, dict(codec=codec, **schedule))
    for values, parameters in found:
        assert torch.equal(values, found[0][0])
        if "delay" not in schedule and "fragments" not in schedule:
            assert torch.equal(parameters, found[0][1])
    assert found[0][0].isfinite().all()
