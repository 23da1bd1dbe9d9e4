"""Fuzz tests of outer optimizers: an error names the argument, and nothing has changed."""

import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from fuzzing import anything, attempt, bits, fuzz, plain, spoiled
from hypothesis import given
from hypothesis import strategies as st
from test_fuzz_optim import corrupted
from torch import nn

from dltrain_ext import codecs, elastic, local_sgd

pytestmark = pytest.mark.usefixtures("group")

OPTIONS = {
    "sync_every": st.just(4),
    "fragments": st.sampled_from([1, 2]),
    "delay": st.sampled_from([0, 1]),
    "mix": st.floats(0, 0.9),
    "codec": st.sampled_from([codec for codec in codecs.CODECS if codec != "sign"]),
    "error_feedback": st.booleans(),
    "group": st.none(),
    "timeout": st.none(),
    "min_compress_numel": st.integers(0, 100),
    "allow_public": st.booleans(),
    "store": st.none(),
    "quorum": st.just("all"),
    "grace": st.none(),
    "weight": st.just(1.0),
}
RULE = {"lr": st.floats(0.1, 1), "momentum": st.floats(0.1, 0.9), "nesterov": st.booleans()}


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, inner, steps=5):
    for _ in range(steps):
        inner.zero_grad()
        model(torch.ones(5, 6)).square().mean().backward()
        inner.step()


@fuzz(
    *("local_sgd.DiLoCo", "local_sgd.LocalSGD", "local_sgd.DiLoCo.close", "local_sgd.DiLoCo.metrics"),
    *("local_sgd.DiLoCo.group", "local_sgd.DiLoCo.lost", "local_sgd.DiLoCo.finish", "comm.Communicator.culprit"),
    *(f"local_sgd.LocalSGD.{name}" for name in ("close", "metrics", "group", "lost", "finish")),
    *(f"local_sgd.{kind}.{name}" for kind in ("DiLoCo", "LocalSGD") for name in ("steps", "outer_steps", "store")),
    examples=80,
)
@given(st.data())
def test_outer_optimizers(data):
    model, inner = make()
    kind = data.draw(st.sampled_from([local_sgd.DiLoCo, local_sgd.LocalSGD]))
    rule = RULE if kind is local_sgd.DiLoCo else {}
    arguments = data.draw(spoiled({"model": st.just(model), "inner": st.just(inner), **OPTIONS, **rule}))
    made, error = attempt(kind, arguments, names=[*arguments, *OPTIONS, *RULE])
    assert bool(inner._optimizer_step_post_hooks) == (made is not None and arguments["inner"] is inner)
    if made is None:
        assert error is not None
        return
    if arguments["model"] is model:
        train(model, inner)
        made.finish()
        assert made.lost is None and made.outer_steps == arguments["fragments"]
        assert made.metrics()["outer/nonfinite"] == 0 and made.group is not None and made.store is None
    made.close()


@fuzz(
    *(f"local_sgd.{kind}.{name}" for kind in ("DiLoCo", "LocalSGD") for name in ("state_dict", "load_state_dict")),
    examples=60,
)
@given(st.data())
def test_checkpoints(data):
    model, inner = make()
    outer = local_sgd.DiLoCo(model, inner, sync_every=2, min_compress_numel=10)
    train(model, inner)
    state = outer.state_dict()
    before = copy.deepcopy(state)
    broken = data.draw(st.one_of(corrupted(state), anything()))
    _, error = attempt(outer.load_state_dict, {"state_dict": broken}, also="backup of|momentum of|feedback of")
    if error is not None:
        assert bits(outer.state_dict()) == bits(before)
    train(model, inner)
    outer.close()


@fuzz("elastic.Membership")
@given(st.data())
def test_memberships(data):
    fits = {
        "store": st.just(dist.HashStore()),
        "name": st.text(),
        "least": st.integers(1, 9),
        "timeout": st.just(timedelta(seconds=9)),
    }
    made, _ = attempt(elastic.Membership, data.draw(spoiled(fits)))
    assert made is None or (made.number, made.members, made.epoch) == (0, (), 0)


@fuzz("local_sgd.DiLoCo.recover", "local_sgd.LocalSGD.recover")
@given(plain)
def test_recovering_needs_a_group(group):
    model, inner = make()
    outer = local_sgd.DiLoCo(model, inner, sync_every=2)
    _, error = attempt(outer.recover, {"group": group})
    assert error is not None
    train(model, inner)
    assert outer.outer_steps == 2, "a refused call changes nothing"
    outer.close()
