"""Fuzz tests of owners and of K-FAC: an error names the argument, and nothing has changed."""

import copy

import pytest
import torch
from fuzzing import anything, attempt, bits, fuzz, numbers, plain, spoiled, tensors
from hypothesis import given
from hypothesis import strategies as st
from test_fuzz_optim import corrupted
from torch import nn

from dltrain_ext import codecs, comm, kfac

pytestmark = pytest.mark.usefixtures("group")

codec_names = st.sampled_from(codecs.CODECS)
NAMES = ("a", "b")


@pytest.fixture(scope="module")
def owners(group):
    return comm.Owners({"a": 2.0, "b": 1.0})


def items(values):
    """Draw mappings from the names to values, some of which are anything."""
    odd = st.dictionaries(st.one_of(st.sampled_from(NAMES), st.text(max_size=2)), st.one_of(values, anything()))
    return st.one_of(st.fixed_dictionaries(dict.fromkeys(NAMES, values)), odd, plain)


@fuzz("comm.Owners", "comm.Owners.loads", "comm.Owners.close", "comm.Owners.stats")
@given(st.data())
def test_owners(data):
    fits = {"costs": items(numbers), "workers": st.integers(0, 2), "group": st.none(), "device": st.none()}
    made, _ = attempt(comm.Owners, data.draw(spoiled({**fits, "timeout": st.none()})))
    if made is not None:
        assert len(made.loads()) == 1 and isinstance(str(made), str) and made.stats()["wire_bytes"] == 0
        made.close()


@fuzz("comm.Owners.reduce", "comm.Owners.share", "comm.Owners.gather", "comm.Owners.sum", examples=60)
@given(st.data())
def test_what_owners_carry(owners, data):
    given, shape = items(tensors((4,))), items(st.just((4,)))
    name, fits = data.draw(
        st.sampled_from(
            [
                ("reduce", {"tensors": given, "codec": codec_names}),
                ("share", {"tensors": given, "shapes": shape, "codec": codec_names}),
                ("gather", {"tensors": given, "shapes": shape, "codec": codec_names}),
                ("sum", {"tensor": tensors((4,))}),
            ]
        )
    )
    attempt(getattr(owners, name), data.draw(spoiled(fits)))


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


MODEL = make()


@fuzz("kfac.KFAC", "kfac.KFAC.close", "kfac.KFAC.retries", examples=60)
@given(st.data())
def test_preconditioners(data):
    shares = st.floats(0, 1)
    fits = {
        "model": st.just(MODEL),
        "damping": st.floats(1e-6, 1),
        "factor_decay": shares,
        "factor_update_steps": st.integers(1, 3),
        "inv_update_steps": st.integers(1, 3),
        "kl_clip": st.one_of(st.none(), st.floats(1e-6, 1)),
        "lr": shares,
        "grad_worker_fraction": shares,
        "codec": codec_names,
        "gradient_codec": codec_names,
        "approximation": st.sampled_from(["expand", "reduce"]),
        "accumulation_steps": st.integers(1, 3),
        "skip_layers": st.lists(st.sampled_from(["0", "x"]), max_size=1),
        "scaler": st.none(),
        "group": st.none(),
    }
    made, _ = attempt(kfac.KFAC, data.draw(spoiled(fits)))
    assert not MODEL[0]._forward_hooks or made is not None, "a refused call leaves no hook"
    if made is not None:
        assert made.retries == 0
        made.close()


@fuzz("kfac.KFAC.step", "kfac.KFAC.state_dict", "kfac.KFAC.load_state_dict", examples=60)
@given(st.data())
def test_checkpoints(data):
    model = make()
    preconditioner = kfac.KFAC(model)
    model(torch.ones(5, 3)).square().mean().backward()
    preconditioner.step()
    state = preconditioner.state_dict()
    before = copy.deepcopy(state)
    broken = data.draw(st.one_of(corrupted(state), anything()))
    _, error = attempt(preconditioner.load_state_dict, {"state_dict": broken}, also="weight of")
    if error is not None:
        assert bits(preconditioner.state_dict()) == bits(before)
    else:
        model(torch.ones(5, 3)).square().mean().backward()
        preconditioner.step()
    preconditioner.close()
