"""SGLD: its noise is normal, reproducible and independent; its samples have the posterior's moments."""

import copy
import math

import pytest
import torch
from optimizers import assert_same_bits_for_any_number_of_threads, assert_untouched, everything, make_params

from dltrain_ext import optim, reference

MANY = 2**20


def noise(seed=0, steps=1, numel=MANY, params=1, device="cpu", **options):
    """The change of parameters that start at 0 and have gradients of 0, by a learning rate of 1."""
    params = [torch.nn.Parameter(torch.zeros(numel, device=device)) for _ in range(params)]
    optimizer = optim.SGLD(params, lr=1.0, seed=seed, **options)
    made = []
    for _ in range(steps):
        before = [p.detach().clone() for p in params]
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        made += [p.detach() - b for p, b in zip(params, before, strict=True)]
    return made


def test_the_noise_is_standard_normal(device):
    (z,) = noise(device=device)
    z = z.double().cpu()
    moments = [z.pow(k).mean().item() for k in (1, 2, 3, 4)]
    spread = [math.sqrt(v / MANY) for v in (1, 2, 15, 96)]  # of these means
    for got, expected, deviation in zip(moments, (0, 1, 0, 3), spread, strict=True):
        assert abs(got - expected) < 5 * deviation
    ordered = z.sort().values
    expected = torch.special.ndtr(ordered)
    distance = (expected - torch.arange(1, MANY + 1, dtype=torch.float64) / MANY).abs().max()
    assert distance < 2 / math.sqrt(MANY)  # Kolmogorov-Smirnov: p = 0.0007


def test_the_noise_of_seeds_steps_and_parameters_is_independent(device):
    streams = [*noise(0, steps=2, params=2, device=device), *noise(1, device=device), *noise(2**40, device=device)]
    correlations = torch.corrcoef(torch.stack(streams).double().cpu())
    assert (correlations - torch.eye(len(streams))).abs().max() < 5 / math.sqrt(MANY)
    (z,) = noise(device=device)
    assert abs((z[:-1] * z[1:]).mean().item()) < 5 / math.sqrt(MANY)


def test_the_logarithm_and_the_cosine_are_accurate():
    (z,) = noise()
    p, step, number = torch.zeros(MANY, dtype=torch.float64), torch.zeros(()), torch.zeros(())
    reference.sgld_([p], [torch.zeros_like(p)], [step], [number], [], lr=1.0)
    assert (z.double() - p).abs().max() < 2e-6
    assert z.abs().max() > 4.5


def test_any_number_of_threads():
    assert_same_bits_for_any_number_of_threads(lambda: noise(3, numel=100_003))


def test_a_resumed_run_has_the_same_noise(device):
    params = make_params([(3, 5), (7,), (64, 33)], device)
    optimizer = optim.SGLD(params, lr=1e-2, weight_decay=0.1, seed=5)

    def step(params, optimizer, seeds):
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).to(device)
            optimizer.step()

    step(params, optimizer, range(3))
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = optim.SGLD(twins, lr=1.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(params, optimizer, range(3, 6))
    step(twins, resumed, range(3, 6))
    assert_untouched(everything(twins, resumed), everything(params, optimizer))
    assert [optimizer.state[p]["number"].item() for p in params] == [0, 1, 2]


def test_samples_of_a_posterior():
    """The mean of a normal distribution with known deviation: its posterior is normal, and known."""
    data = torch.randn(50, generator=torch.Generator().manual_seed(0)).double() + 1.0
    precision = len(data) + 1.0  # of the posterior: the prior is standard normal
    chains = torch.nn.Parameter(torch.zeros(4000))
    optimizer = optim.SGLD([chains], lr=2e-3, weight_decay=1.0, seed=1)
    for _ in range(300):
        chains.grad = len(data) * chains.detach() - data.sum().float()
        optimizer.step()
    samples = chains.detach().double()
    bias = 1 / (1 - optimizer.param_groups[0]["lr"] * precision / 4)  # of the variance, by the step's length
    assert abs(samples.mean() - data.sum() / precision) < 5 / math.sqrt(precision * len(samples))
    assert abs(samples.var() * precision / bias - 1) < 5 * math.sqrt(2 / len(samples))


def test_a_temperature_of_zero_is_sgd_with_half_the_rate():
    results = []
    for make in (
        lambda p: optim.SGLD(p, lr=0.2, weight_decay=0.1, temperature=0.0),
        lambda p: optim.SGD(p, lr=0.1, weight_decay=0.1),
    ):
        params = make_params([(7,), (33, 3)])
        optimizer = make(params)
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        results.append(params)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"seed": 0.5}, TypeError, "seed: expected an int, got 0.5"),
        ({"seed": 2**53}, ValueError, "seed: expected 0 to 9007199254740991"),
        ({"temperature": -1.0}, ValueError, "temperature: expected a number >= 0, got -1.0"),
    ],
)
def test_wrong_options_are_named(options, error, text):
    with pytest.raises(error, match=text):
        optim.SGLD([torch.nn.Parameter(torch.zeros(3))], **options)


def test_noise_does_not_depend_on_the_layout():
    """It belongs to the index of an element, not to its place in memory."""
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        p = torch.nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=layout))
        p.grad = torch.zeros_like(p)
        optim.SGLD([p], lr=1.0, seed=3).step()
        results.append(p.detach())
    assert torch.equal(*results)


def test_a_number_that_was_loaded_is_kept():
    params = make_params([(4,), (2, 3)])
    optimizer = optim.SGLD(params, lr=0.1)
    optimizer.state[params[1]]["number"] = torch.tensor(7.0)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert [optimizer.state[p]["number"].item() for p in params] == [0, 7]
