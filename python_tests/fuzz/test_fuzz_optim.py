"""Fuzz tests of the optimizers and the loss scaler: an error names the argument, and nothing is changed."""

import copy
import inspect
import math
from functools import partial

import pytest
import torch
from fuzzing import BROKEN, PLAIN, TENSORS, anything, attempt, fuzz, numbers, odd_tensors, plain, spoiled, tensors
from hypothesis import given
from hypothesis import strategies as st
from optimizers import FUSED, KINDS, OPS, STATES, call_op, give_grads, make_params, names_of_lists, telling

from dltrain_ext import amp, optim

SHAPES = [(4,), (2, 3)]
kinds = st.sampled_from(KINDS)
# Errors of torch for arguments of its optimizers; names of entries of a state, or of attributes of a parameter.
TORCHS = (
    "unsupported tensor layout|Invalid |optimizer got|optimizer can only|foreach|fused|params argument|parameter|"
    "can't optimize|Tensor lr"
)
LISTS = {name for op in OPS for names in names_of_lists(op) for name in names}
STATE = "|".join(
    [
        "exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer|master|step|param|grad|lr|momentum|dampening|betas|eps",
        r"state\[",
        *(rf"\b{name}\[" for name in sorted(LISTS)),
    ]
)

# Values by the names of the arguments.
VALUES = {
    "lr": st.floats(0, 1),
    "betas": st.just((0.9, 0.99)),
    "eps": st.floats(0, 1),
    "weight_decay": st.floats(0, 1),
    "amsgrad": st.booleans(),
    "momentum": st.floats(0.1, 1),
    "dampening": st.just(0.0),
    "nesterov": st.booleans(),
    "lr_decay": st.floats(0, 1),
    "initial_accumulator_value": st.floats(0, 1),
    "trust_coefficient": st.one_of(st.none(), st.floats(0, 1)),
    "preset": st.sampled_from(["paper", "tensorflow", "larc"]),
    "adapt": st.sampled_from(["auto", True, False]),
    "state_codec": st.sampled_from([None, "int8"]),
    "rounding": st.sampled_from(["nearest", "stochastic"]),
    "seed": st.integers(0, 2**53 - 1),
}
OPTIONS = {
    kind: {name: VALUES[name] for name in inspect.signature(kind).parameters if name in VALUES} for kind in KINDS
}
COMMON = {"maximize": st.booleans(), "master_weights": st.sampled_from(["auto", True, False, "8bit"])}


def everything(optimizer):
    return [optimizer.param_groups, {id(p): entry for p, entry in optimizer.state.items()}]


def with_params(kind, steps=1, **options):
    params = make_params(SHAPES)
    optimizer = kind(params, **{"lr": 0.1, **telling(kind, **options)})
    for seed in range(steps):
        give_grads(params, seed)
        optimizer.step()
    return params, optimizer


@fuzz(*(f"optim.{name}" for name in FUSED), examples=60)
@given(kinds, st.data())
def test_constructors(kind, data):
    params = make_params(SHAPES)
    give_grads(params, 0)
    arguments = data.draw(spoiled({"params": st.just(params), **OPTIONS[kind], **COMMON}))
    if isinstance(arguments["params"], torch.Tensor | dict | set):
        return  # torch refuses these itself
    optimizer, _ = attempt(kind, arguments, also=TORCHS)
    if optimizer is not None:
        attempt(optimizer.step, {}, keeps=lambda: params, also=STATE)


@fuzz(*(f"optim.{name}.add_param_group" for name in FUSED))
@given(kinds, st.data())
def test_add_param_group(kind, data):
    _, optimizer = with_params(kind)
    more = make_params([(3,)])
    group = data.draw(spoiled({"params": st.just(more), **OPTIONS[kind], **COMMON}))
    before = len(optimizer.param_groups)
    given_group = data.draw(st.one_of(st.just(group), st.just(group), anything()))
    _, error = attempt(
        optimizer.add_param_group,
        {"param_group": given_group},
        names=["param_group", "params", *COMMON, *OPTIONS[kind]],
        keeps=lambda: everything(optimizer),
        also=TORCHS,
    )
    assert len(optimizer.param_groups) == before + (error is None)


@fuzz(*(f"optim.{name}.step" for name in FUSED), examples=80)
@given(kinds, st.data())
def test_step(kind, data):
    """Parameters, gradients and state are of any kind, and a group may contain wrong hyper-parameters."""
    params, optimizer = with_params(kind, steps=data.draw(st.integers(0, 1)))
    give_grads(params, 7)
    for _ in range(data.draw(st.integers(0, 2))):
        index = data.draw(st.integers(0, 1))
        place = data.draw(st.sampled_from(["param", "data", "grad", "state", "entry", "group", "closure"]))
        odd = data.draw(st.one_of(odd_tensors(SHAPES[index], broken=place != "data"), anything(SHAPES[index])))
        try:
            if place == "param":
                optimizer.param_groups[0]["params"][index] = odd
            elif place == "data" and type(odd) is torch.Tensor:  # a subclass would lose its attributes
                params[index].data = odd
            elif place == "grad":
                params[index].grad = odd
            elif place == "state" and isinstance(optimizer.state[params[index]], dict):
                optimizer.state[params[index]].setdefault("step", torch.tensor(1.0))
                key = data.draw(st.sampled_from(sorted(optimizer.state[params[index]])))
                optimizer.state[params[index]][key] = odd
            elif place == "entry":
                optimizer.state[params[index]] = odd
            elif place == "group":
                optimizer.param_groups[0][data.draw(st.sampled_from(sorted(OPTIONS[kind])))] = odd
        except (TypeError, RuntimeError, NotImplementedError):
            pass  # torch refuses it
    closure = data.draw(st.one_of(st.none(), st.none(), plain.filter(lambda value: not callable(value))))
    attempt(
        optimizer.step,
        {"closure": closure},
        names=["closure", *OPTIONS[kind]],
        keeps=lambda: everything(optimizer),
        also=STATE,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_each_option_of_a_step(kind):
    """Each hyper-parameter of a group is set to each of these values; most are wrong."""
    odd = [None, "x", 1j, [], {}, torch.ones(4), *(make((4,)) for make in BROKEN.values())]
    for name in sorted({"lr", *OPTIONS[kind]}):
        for value in odd:
            params, optimizer = with_params(kind)
            give_grads(params, 7)
            optimizer.param_groups[0][name] = value
            attempt(optimizer.step, {}, names=[name], keeps=partial(everything, optimizer))


ENTRIES = ["step", "exp_avg", "exp_avg_sq", "momentum_buffer", "master_param"]


@st.composite
def corrupted(draw, saved):
    """Draw a checkpoint in which an entry is missing, has another type, or is in another place."""
    saved = copy.deepcopy(saved)
    for _ in range(draw(st.integers(0, 2))):
        places = [saved]
        while True:
            inner = [value for value in (places[-1].values() if isinstance(places[-1], dict) else places[-1])]
            inner = [value for value in inner if isinstance(value, dict | list) and value]
            if not inner or draw(st.booleans()):
                break
            places.append(draw(st.sampled_from(inner)))
        place = places[-1]
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            continue
        key = draw(st.sampled_from(keys))
        what = draw(st.sampled_from(["drop", "replace", "swap", "add"]))
        if what == "drop":
            del place[key]
        elif what == "replace":
            place[key] = draw(anything())
        elif what == "swap":
            other = draw(st.sampled_from(keys))
            place[key], place[other] = place[other], place[key]
        elif isinstance(place, dict):
            place[draw(st.sampled_from([*PLAIN[1:12], *ENTRIES]))] = draw(anything())
    return draw(st.one_of(st.just(saved), st.just(saved), st.just(saved), anything()))


@fuzz(*(f"optim.{name}.state_dict" for name in FUSED))
@given(kinds, st.data())
def test_state_dict(kind, data):
    _, optimizer = with_params(kind)
    arguments = data.draw(spoiled({"compressed": st.booleans()}))
    state, _ = attempt(optimizer.state_dict, arguments, keeps=lambda: everything(optimizer))
    if state is not None:
        optimizer.load_state_dict(state)


@fuzz(*(f"optim.{name}.load_state_dict" for name in FUSED), examples=80)
@given(kinds, st.booleans(), st.data())
def test_load_state_dict(kind, half, data):
    params, optimizer = with_params(kind)
    if half:
        params = [torch.nn.Parameter(p.detach().half()) for p in params]
        optimizer = kind(params, lr=0.1)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    saved = data.draw(corrupted(optimizer.state_dict()))
    _, error = attempt(
        optimizer.load_state_dict, {"state_dict": saved}, keeps=lambda: everything(optimizer), also="loaded state dict"
    )
    if error is None:
        attempt(optimizer.step, {}, keeps=lambda: everything(optimizer), also=f"{STATE}|amsgrad|weight_decay")


# Errors of torch's dispatcher before it calls an op.
DISPATCHER = "Could not run|no tensor arguments|Overflow when|NestedTensor|one of them undefined|Cannot access storage"


@fuzz(*(f"ops.{op}" for op in OPS), examples=80)
@given(st.sampled_from(sorted(OPS)), st.data())
def test_ops(name, data):
    shape = data.draw(st.sampled_from([(), (4,), (2, 3), (0,)]))
    states, counters = names_of_lists(name)
    lists = ["params", "grads", *states]
    fits = {each: st.lists(tensors(shape), min_size=1, max_size=1) for each in lists}
    fits |= {each: st.just([torch.tensor(3.0)]) for each in counters}
    if "max_exp_avg_sqs" in fits:
        fits["max_exp_avg_sqs"] = st.sampled_from([[], [torch.ones(shape)]])
    fits["masters"] = st.just([])
    fits |= {each: st.just(value) for each, value in OPS[name].items()}
    fits |= {each: st.sampled_from([None, torch.ones(())]) for each in ("tensor_lr", "grad_scale", "found_inf")}
    arguments = data.draw(spoiled(fits, shape))
    for each in data.draw(st.lists(st.sampled_from([*lists, "masters"]), max_size=2)):
        if isinstance(arguments[each], list):
            everyones = [t for value in arguments.values() if isinstance(value, list) for t in value]
            odd = st.one_of(odd_tensors(shape, broken=True), st.sampled_from(everyones or [None]))
            arguments[each] = data.draw(st.lists(odd, max_size=2))
    attempt(getattr(torch.ops.dltrain_ext, name), arguments, names=[*fits, "lr"], also=DISPATCHER)


@fuzz("ops.sum_squares", "ops.unscale_and_clip", examples=80)
@given(st.data())
def test_ops_of_clipping(data):
    shape = data.draw(st.sampled_from([(), (4,), (2, 3), (0,)]))
    one = st.just(torch.ones(()))
    clipping = {
        "sum_squares": st.just(torch.ones((), dtype=torch.float64)),
        "grad_scale": st.one_of(st.none(), one),
        "found_inf": st.one_of(st.none(), one),
        "max_norm": st.one_of(st.none(), st.floats()),
    }
    sums = {"grads": st.lists(tensors(shape), min_size=1, max_size=3)}
    library = torch.ops.dltrain_ext
    op, fits = data.draw(st.sampled_from([(library.sum_squares, sums), (library.unscale_and_clip, clipping)]))
    arguments = data.draw(spoiled(fits, shape))
    if isinstance(arguments.get("grads"), list):
        arguments["grads"] += data.draw(st.lists(odd_tensors(shape, broken=True), max_size=2))
    attempt(op, arguments, names=fits, also=DISPATCHER)


@pytest.mark.parametrize("kind", KINDS)
def test_an_expanded_parameter_is_refused_before_anything_is_changed(kind):
    good, expanded = torch.nn.Parameter(torch.ones(3)), torch.zeros(1).expand(4).requires_grad_()
    optimizer = kind([good, expanded], lr=0.1)
    good.grad, expanded.grad = torch.ones(3), torch.ones(4)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    with pytest.raises(ValueError, match=r"params\[1\]: expected elements that each have a place of their own"):
        optimizer.step()
    assert torch.equal(good.detach(), torch.ones(3))
    torch.testing.assert_close(optimizer.state_dict()["state"], before)


@pytest.mark.parametrize("name", sorted(OPS))
def test_an_expanded_list_entry_is_refused_before_anything_is_changed(name):
    params, grads = [torch.ones(3), torch.zeros(1).expand(4)], [torch.ones(3), torch.ones(4)]
    states = [[torch.zeros(3), torch.zeros(4)] for _ in range(STATES)]
    with pytest.raises(ValueError, match=r"params\[1\]: expected elements that each have a place of their own"):
        call_op(torch.ops.dltrain_ext, name, params, grads, states, [])
    assert torch.equal(params[0], torch.ones(3)) and not states[0][0].any()


@pytest.mark.parametrize("which", ["param", "grad", "exp_avg", "step"])
def test_a_step_without_memory_is_refused(which):
    params, optimizer = with_params(optim.AdamW)
    tensor = {"param": params[0].data, "grad": params[0].grad}.get(which)
    (optimizer.state[params[0]][which] if tensor is None else tensor).untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"s\[0\]: expected a tensor whose elements are all in memory, got one"):
        optimizer.step()


@pytest.mark.parametrize("kind", ["freed", "nested", "jagged", "quantized", "meta", "torch.bool", "zero", "one more"])
def test_a_step_count_of_another_kind_is_refused(kind):
    """torch moves a step count to the device of the parameter, and for some kinds reads memory that does not exist."""
    params, optimizer = with_params(optim.AdamW)
    del optimizer.state[params[0]]["exp_avg"]
    optimizer.state[params[0]]["step"] = {**TENSORS, **BROKEN}[kind](())
    with pytest.raises((TypeError, ValueError), match=r"steps\[0\]: expected"):
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_refused_as_a_number(kind):
    for text in ("1", b"1", bytearray(b"1"), memoryview(b"1")):
        with pytest.raises(TypeError, match=r"lr: expected a number, got"):
            kind(make_params(SHAPES), lr=text)


def test_a_state_that_cannot_be_completed_does_not_change():
    params, optimizer = with_params(optim.AdamW, steps=0)
    give_grads(params, 0)
    optimizer.state[params[1]]["exp_avg"] = torch.zeros(7)
    with pytest.raises(ValueError, match=r"exp_avgs\[1\]: expected shape"):
        optimizer.step()
    assert params[0] not in optimizer.state and list(optimizer.state[params[1]]) == ["exp_avg"]


@fuzz("amp.LossScaler", examples=60)
@given(
    spoiled(
        {
            "device": st.just("cpu"),
            "init_scale": st.just(4.0),
            "growth_factor": st.just(2.0),
            "backoff_factor": st.just(0.5),
            "growth_interval": st.just(2),
            "enabled": st.booleans(),
            "min_scale": st.just(1.0),
            "max_scale": st.just(8.0),
            "hysteresis": st.integers(1, 3),
        }
    )
)
def test_loss_scaler(arguments):
    try:
        attempt(amp.LossScaler, arguments)
    except AssertionError as error:  # an error of torch
        assert "factor must be" in str(error), error


def scaled(data):
    _, optimizer = with_params(data.draw(kinds))
    scaler = amp.LossScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    return optimizer, scaler


def scaler_keeps(optimizer, scaler):
    return [*everything(optimizer), scaler._scale, scaler._growth_tracker, scaler._skipped, scaler._overflows]


@fuzz("amp.LossScaler.step", "amp.GradStats", examples=60)
@given(st.data())
def test_scaled_step(data):
    optimizer, scaler = scaled(data)
    one = st.just(torch.tensor(2.0, dtype=torch.float64))
    stats = spoiled({"sum_squares": one, "found_inf": st.sampled_from([None, torch.zeros(())])}, ())
    arguments = data.draw(
        spoiled(
            {
                "optimizer": st.just(optimizer),
                "max_norm": st.one_of(st.none(), st.floats(0, 9)),
                "grad_stats": st.one_of(st.none(), stats.map(lambda fields: amp.GradStats(**fields))),
            }
        )
    )
    attempt(
        scaler.step,
        arguments,
        names=["optimizer", "max_norm", "grad_stats", "sum_squares", "found_inf"],
        keeps=lambda: scaler_keeps(optimizer, scaler),
    )


@fuzz("amp.LossScaler.update", "amp.LossScaler.skipped_steps", "amp.LossScaler.total_norm", "amp.LossScaler.state_dict")
@given(st.data())
def test_update(data):
    optimizer, scaler = scaled(data)
    scaler.step(optimizer)
    new_scale = data.draw(st.one_of(st.none(), anything(()), numbers))
    try:
        attempt(
            scaler.update,
            {"new_scale": new_scale},
            keeps=lambda: scaler_keeps(optimizer, scaler),
            also="without overflow|quantized|tensor layout",
        )
    except AssertionError as error:  # an error of torch
        assert "new_scale should be" in str(error), error
    assert scaler.skipped_steps.numel() == scaler.total_norm.numel() == 1
    assert scaler.state_dict()["skipped_steps"] == 0


@fuzz("amp.LossScaler.load_state_dict", examples=60)
@given(st.data(), st.booleans())
def test_load_scaler(data, begun):
    _, scaler = scaled(data)
    if not begun:
        scaler = amp.LossScaler("cpu")
    before = scaler.state_dict()
    saved = data.draw(corrupted(before))
    _, error = attempt(
        scaler.load_state_dict, {"state_dict": saved}, names=["state_dict", "min_scale", "max_scale", "hysteresis"]
    )
    if error is not None:
        assert scaler.state_dict() == before
    else:
        assert math.isfinite(scaler.min_scale) and isinstance(scaler.hysteresis, int)
