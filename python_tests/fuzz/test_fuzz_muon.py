"""Fuzz tests of Muon: an error names the argument, and nothing has changed."""

import torch
from fuzzing import anything, attempt, fuzz, odd_tensors, plain, spoiled
from hypothesis import given
from hypothesis import strategies as st
from optimizers import give_grads, make_params
from test_fuzz_optim import TORCHS, everything

from dltrain_ext import codecs, optim

SHAPES = [(2, 3), (4, 2)]
OPTIONS = {
    "lr": st.floats(0, 1),
    "weight_decay": st.floats(0, 1),
    "momentum": st.floats(0, 1),
    "nesterov": st.booleans(),
    "ns_coefficients": st.just((3.4445, -4.775, 2.0315)),
    "eps": st.floats(0, 1),
    "ns_steps": st.integers(0, 6),
    "adjust_lr_fn": st.sampled_from([None, "original", "match_rms_adamw"]),
}
OWN = {
    "dtype": st.sampled_from([None, torch.float32, torch.bfloat16]),
    "group": st.none(),
    "codec": st.sampled_from(codecs.CODECS),
}
ALSO = f"{TORCHS}|2D|[Ll]earning rate|momentum|weight decay|params|grad|state"


def make():
    params = make_params(SHAPES)
    optimizer = optim.Muon(params)
    give_grads(params, 0)
    optimizer.step()
    return params, optimizer


@fuzz("optim.Muon", "optim.Muon.close", examples=60)
@given(st.data())
def test_constructors(data):
    params = make_params(SHAPES)
    give_grads(params, 0)
    arguments = data.draw(spoiled({"params": st.just(params), **OPTIONS, **OWN}))
    if isinstance(arguments["params"], torch.Tensor | dict | set):
        return  # torch refuses these itself
    optimizer, _ = attempt(optim.Muon, arguments, also=ALSO)
    if optimizer is not None:
        attempt(optimizer.step, {}, keeps=lambda: params, also=ALSO)
        optimizer.close()


@fuzz("optim.Muon.add_param_group")
@given(st.data())
def test_add_param_group(data):
    _, optimizer = make()
    group = data.draw(spoiled({"params": st.just(make_params([(3, 3)])), **OPTIONS}))
    before = len(optimizer.param_groups)
    _, error = attempt(
        optimizer.add_param_group,
        {"param_group": data.draw(st.one_of(st.just(group), st.just(group), anything()))},
        names=["param_group", "params", *OPTIONS],
        keeps=lambda: everything(optimizer),
        also=TORCHS,
    )
    assert len(optimizer.param_groups) == before + (error is None)


@fuzz("optim.Muon.step", "optim.Muon.metrics", examples=80)
@given(st.data())
def test_step(data):
    """Parameters, gradients and state are of any kind, and a group may contain wrong options."""
    params, optimizer = make()
    give_grads(params, 7)
    for _ in range(data.draw(st.integers(0, 2))):
        index = data.draw(st.integers(0, 1))
        place = data.draw(st.sampled_from(["param", "grad", "state", "entry", "group"]))
        odd = data.draw(st.one_of(odd_tensors(SHAPES[index], broken=True), anything(SHAPES[index])))
        try:
            if place == "param":
                optimizer.param_groups[0]["params"][index] = odd
            elif place == "grad":
                params[index].grad = odd
            elif place == "state" and isinstance(optimizer.state[params[index]], dict):
                optimizer.state[params[index]]["momentum_buffer"] = odd
            elif place == "entry":
                optimizer.state[params[index]] = odd
            elif place == "group":
                optimizer.param_groups[0][data.draw(st.sampled_from(sorted(OPTIONS)))] = odd
        except (TypeError, RuntimeError, NotImplementedError):
            pass  # torch refuses it
    closure = data.draw(st.one_of(st.none(), st.none(), plain.filter(lambda value: not callable(value))))
    _, error = attempt(
        optimizer.step,
        {"closure": closure},
        names=["closure", *OPTIONS],
        keeps=lambda: everything(optimizer),
        also="params|grad|state|momentum_buffer",
    )
    if error is None:
        assert all(isinstance(value, float) for value in optimizer.metrics().values())
