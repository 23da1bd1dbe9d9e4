"""Fuzz tests of population based training: an error names the argument, and nothing has changed."""

import pytest
import torch
from fuzzing import attempt, fuzz, numbers, plain, spoiled
from hypothesis import given
from hypothesis import strategies as st

from dltrain_ext import population

pytestmark = pytest.mark.usefixtures("group")


@fuzz("population.exploit")
@given(st.data())
def test_exploit(data):
    model = torch.nn.Linear(3, 2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    fits = {
        "model": st.just(model),
        "optimizer": st.just(torch.optim.SGD(model.parameters(), lr=0.1)),
        "score": numbers,
        "fraction": st.floats(0, 1),
        "settings": st.sampled_from([None, {"lr": 1.0}]),
        "seed": st.integers(0, 2**63 - 1),
        "group": st.none(),
        "timeout": st.none(),
    }
    winner, _ = attempt(population.exploit, data.draw(spoiled(fits)))
    assert winner is None  # there is one member
    assert all(map(torch.equal, model.parameters(), before))


settings = st.dictionaries(st.sampled_from("ab"), numbers)


@fuzz("population.perturb", "population.resample")
@given(st.data())
def test_settings(data):
    perturbed = {"settings": settings, "factors": st.lists(numbers), "generator": st.none()}
    attempt(population.perturb, data.draw(spoiled(perturbed)))
    priors = st.dictionaries(st.sampled_from("abc"), st.one_of(st.just(lambda: 1.0), plain))
    resampled = {"settings": settings, "priors": priors, "probability": numbers, "generator": st.none()}
    attempt(population.resample, data.draw(spoiled(resampled)))
