"""A run that goes on from a checkpoint, also with another number of sites, and states that are refused."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from local_training import backups, flat, network, same, train
from ranks import run_ranks
from torch import Tensor

from dltrain_ext import local_sgd, optim

OPTIONS = dict(sync_every=4, codec="int4", min_compress_numel=64)
SCHEDULES = [dict(), dict(fragments=4), dict(fragments=2, delay=1), dict(delay=3, mix=0.25)]
NAMES = {f"{layer}.{kind}" for layer in range(3) for kind in ("weight", "bias")}
INNERS = {"ours": optim.AdamW, "torch": torch.optim.AdamW}


def make(dtype=torch.float32, kind="ours", **options):
    model = network(dtype)
    inner = INNERS[kind](model.parameters(), lr=1e-3)
    return model, inner, local_sgd.DiLoCo(model, inner, **(OPTIONS | options))


def as_saved(state):
    """Return the state as ``torch.load`` returns it by default, which only takes plain tensors and numbers."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def save(model, inner, outer):
    return as_saved([outer.state_dict(), model.state_dict(), inner.state_dict()])


def resume(rank, world_size, schedule, saved_after, dtype, kind):
    """Return the parameters of a run that saves and goes on, and of one that goes on from what it saved."""
    found = []
    model, inner, outer = make(dtype, kind, **schedule)
    train(model, inner, rank, range(1, saved_after + 1))
    state, *others = copy.deepcopy(save(model, inner, outer))
    for fresh in (False, True):
        if fresh:
            model, inner, outer = make(dtype, kind, **schedule)
            train(model, inner, rank, range(50, 53))  # it has gone astray
            model.load_state_dict(others[0])
            outer.load_state_dict(state)
            inner.load_state_dict(others[1])
        train(model, inner, rank, range(saved_after + 1, 16))
        found.append((flat(model), backups(outer), outer.steps, outer.outer_steps, outer.state_dict()["feedback"]))
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("saved_after", "dtype", "kind"), [(4, torch.float32, "torch"), (7, torch.bfloat16, "ours")])
def test_a_run_that_resumes_has_the_bits_of_one_that_went_on(schedule, saved_after, dtype, kind):
    for expected, found in run_ranks(2, resume, schedule, saved_after, dtype, kind):
        assert torch.equal(found[0], expected[0]) and same(found[1], expected[1])
        assert found[2:4] == expected[2:4]
        (ours,), (theirs,) = found[4].values(), expected[4].values()
        assert same(ours, theirs) and any(lost.any() for lost in ours.values())


def before_any_step(rank, world_size):
    """A state of the beginning, and one loaded before the first step, keep the sites from beginning again."""
    model, inner, outer = make()
    state = outer.state_dict()
    train(model, inner, rank, range(1, 5))
    expected = flat(model)
    model, inner, outer = make()
    outer.load_state_dict(state)
    train(model, inner, rank, range(1, 5))
    assert torch.equal(flat(model), expected)
    return expected


def test_a_state_of_the_beginning():
    first, second = run_ranks(2, before_any_step)
    assert torch.equal(first, second)


def residuals(state) -> dict[str, Tensor]:
    """Return the sum over the sites of what encoding has lost, by parameter."""
    total: dict[str, Tensor] = {}
    for by_parameter in state["feedback"].values():
        for name, lost in by_parameter.items():
            total[name] = total.get(name, torch.zeros_like(lost)).double() + lost
    return total


def saved_by(rank, world_size):
    model, inner, outer = make(fragments=2)
    train(model, inner, rank, range(1, 9))
    return outer.state_dict(), model.state_dict()


def loaded_by(rank, world_size, states, parameters):
    model, inner, outer = make(fragments=2)
    model.load_state_dict(parameters)
    outer.load_state_dict(states)
    again = outer.state_dict()
    assert outer.outer_steps == 4 and outer.steps == 8
    train(model, inner, rank, range(9, 17))
    assert outer.outer_steps == 8
    return again, backups(outer)


@pytest.mark.parametrize("sites", [1, 2, 3, 5])
def test_another_number_of_sites_keeps_the_sum_of_what_was_lost(sites):
    states, parameters = zip(*run_ranks(3, saved_by), strict=True)
    loaded, values = zip(*run_ranks(sites, loaded_by, list(states), parameters[0]), strict=True)
    assert all(same(each, values[0]) for each in values)
    before: dict[str, Tensor] = {}
    after: dict[str, Tensor] = {}
    for total, some in ((before, states), (after, loaded)):
        for state in some:
            for name, lost in residuals(state).items():
                total[name] = total.get(name, 0) + lost
    assert before.keys() == NAMES and all(bool(lost.any()) == name.endswith("weight") for name, lost in before.items())
    if sites > 1:
        for name, lost in before.items():
            torch.testing.assert_close(after[name], lost, rtol=1e-5, atol=1e-8)
    for key in ("backup", "momentum"):
        assert same(loaded[0][key], states[0][key])


def without(state, key):
    return {name: value for name, value in state.items() if name != key}


def changed(state, key, value):
    return {**state, key: value}


def in_parameter(state, key, name, value):
    return {**state, key: {**state[key], name: value}}


INVALID = {
    "nothing": (lambda state: {}, TypeError, "expected a state_dict of DiLoCo"),
    "an empty list": (lambda state: [], TypeError, "expected a state_dict of DiLoCo"),
    "a number": (lambda state: 3, TypeError, "expected a state_dict of DiLoCo"),
    "version": (lambda state: changed(state, "version", 2), ValueError, r"expected version 1, got \[2\]"),
    "steps": (lambda state: changed(state, "steps", -1), ValueError, "expected steps of at least 0, got -1"),
    "many steps": (lambda state: changed(state, "steps", 2**63), ValueError, "expected steps"),
    "inner_steps": (lambda state: changed(state, "inner_steps", 1.5), ValueError, "expected inner_steps .*, got 1.5"),
    "no inner_steps": (lambda state: without(state, "inner_steps"), ValueError, "expected inner_steps .*, got None"),
    "due_in": (lambda state: changed(state, "due_in", 0), ValueError, "expected due_in of at least 1, got 0"),
    "no due_in": (lambda state: without(state, "due_in"), ValueError, "expected due_in of at least 1, got None"),
    "no backup": (lambda state: without(state, "backup"), ValueError, "expected backup of the parameters"),
    "no momentum": (lambda state: changed(state, "momentum", {}), ValueError, r"expected momentum of .*, got \[\]"),
    "fewer": (
        lambda state: changed(state, "backup", without(state["backup"], "1.bias")),
        ValueError,
        "expected backup of the parameters",
    ),
    "unknown": (
        lambda state: in_parameter(state, "backup", "more", torch.zeros(3)),
        ValueError,
        "expected backup of the parameters .*, got .*'more'",
    ),
    "shape": (
        lambda state: in_parameter(state, "momentum", "2.weight", torch.zeros(64, 10)),
        ValueError,
        r"expected momentum of 2.weight of shape \(10, 64\), got \(64, 10\)",
    ),
    "dtype": (
        lambda state: in_parameter(state, "backup", "0.bias", torch.zeros(96, dtype=torch.float64)),
        ValueError,
        "expected backup of 0.bias in float32, got .*float64",
    ),
    "NaN": (
        lambda state: in_parameter(state, "backup", "0.bias", torch.full((96,), float("nan"))),
        ValueError,
        "expected backup of 0.bias to be finite",
    ),
    "a list": (
        lambda state: in_parameter(state, "backup", "0.bias", [0.0] * 96),
        ValueError,
        "expected backup of 0.bias as a dense tensor, got list",
    ),
    "another rank": (
        lambda state: changed(state, "feedback", {"rank 7 of 2": {}}),
        ValueError,
        "expected the feedback of the ranks",
    ),
    "feedback": (
        lambda state: changed(
            state, "feedback", {key: {"0.weight": torch.zeros(3)} for key in ("rank 0 of 2", "rank 1 of 2")}
        ),
        ValueError,
        r"expected feedback of shape \(96, 64\) for 0.weight",
    ),
    "NaN in feedback": (
        lambda state: changed(
            state,
            "feedback",
            {key: {"0.weight": torch.full((96, 64), float("nan"))} for key in ("rank 0 of 2", "rank 1 of 2")},
        ),
        ValueError,
        "expected finite feedback of 0.weight",
    ),
    "two moments": (
        lambda state: [state, changed(state, "steps", state["steps"] + 1)],
        ValueError,
        "expected states of one moment",
    ),
}


def refuse(rank, world_size, key):
    model, inner, outer = make(fragments=2, delay=1)
    train(model, inner, rank, range(1, 6))
    state = outer.state_dict()
    assert state["backup"].keys() == NAMES
    before = copy.deepcopy(state), flat(model)
    spoil, error, match = INVALID[key]
    train(model, inner, rank, range(6, 7))
    mine = outer.steps, outer._exchange._due, outer._exchange._flight
    assert mine[-1] is not None
    with pytest.raises(error, match=match):
        outer.load_state_dict(spoil(state))
    assert (outer.steps, outer._exchange._due, outer._exchange._flight) == mine
    assert all(same(state[flats], before[0][flats]) for flats in ("backup", "momentum"))
    train(model, inner, rank, range(7, 12))
    return backups(outer)


@pytest.mark.parametrize("key", INVALID)
def test_invalid_states_are_refused_and_change_nothing(key):
    first, second = run_ranks(2, refuse, key)
    assert same(first, second)


def load_under_way(rank, world_size):
    model, inner, outer = make(delay=3)
    train(model, inner, rank, range(1, 7))
    state = copy.deepcopy(outer.state_dict())
    train(model, inner, rank, range(7, 9))
    assert outer._exchange._flight is not None
    with pytest.raises(RuntimeError, match="under way"):
        outer.load_state_dict(state)
    outer.finish()
    outer.load_state_dict(state)
    (lost,), (found,) = state["feedback"].values(), outer.state_dict()["feedback"].values()
    return same(lost, found)


def test_no_state_is_loaded_while_an_average_is_under_way():
    """That average would write to what was loaded."""
    assert all(run_ranks(2, load_under_way))


def loaded_by_one(rank, world_size):
    model, inner, outer = make()
    train(model, inner, rank, range(1, 5))
    state = outer.state_dict()
    train(model, inner, rank, range(5, 9))
    if rank == 0:
        outer.load_state_dict(state)
    with pytest.raises(dist.DistBackendError):
        train(model, inner, rank, range(9, 13))


def test_a_state_that_only_one_site_loads_is_an_error():
    run_ranks(2, loaded_by_one)


def with_gradients(rank, world_size):
    """Values that require gradients are taken as numbers."""
    model, inner, outer = make()
    train(model, inner, rank, range(1, 5))
    state = outer.state_dict()
    state["backup"] = {name: torch.nn.Parameter(value) for name, value in state["backup"].items()}
    outer.load_state_dict(state)
    train(model, inner, rank, range(5, 9))
    assert not any(value.requires_grad for value in backups(outer).values())
    return flat(model)


def test_a_state_of_parameters():
    first, second = run_ranks(2, with_gradients)
    assert torch.equal(first, second)
