"""The code that ddp and fsdp share, without a process group."""

import math
from functools import partial

import pytest
import torch

from dltrain_ext import amp, codecs
from dltrain_ext.compress import checkpoint
from dltrain_ext.compress.feedback import Feedback
from dltrain_ext.compress.layout import Layout, Region, divided, regions_of, rows_of
from dltrain_ext.compress.parameters import Parameters
from dltrain_ext.compress.scaling import StepOutcome, loss_scale_of


def state_of(rank, saved_by, residuals, **changed):
    key = checkpoint.key_of(rank, saved_by)
    return {"version": 1, "steps": 3, "world_size": saved_by, "feedback": {key: residuals}, **changed}


def merge(states, rank=0, world_size=2, parameters=None):
    return checkpoint.merge(states, rank, world_size, parameters or {"w": torch.zeros(2, 3)}, of="a Hook")


@pytest.mark.parametrize("world_size", range(1, 6))
@pytest.mark.parametrize("saved_by", range(1, 6))
def test_every_saved_state_is_loaded_by_one_rank(saved_by, world_size):
    states = [state_of(rank, saved_by, {"w": torch.full((2, 3), 10.0**rank)}) for rank in range(saved_by)]
    merged = [merge(states, rank, world_size) for rank in range(world_size)]
    assert {steps for steps, _ in merged} == {3}
    taken = sum(residuals["w"] for _, residuals in merged if residuals)
    assert taken.shape == (2, 3) and (taken == sum(10**rank for rank in range(saved_by))).all()


def test_merging_saved_states_restores_them():
    parameters = {"w": torch.zeros(2, 3), "b": torch.zeros(3)}
    feedback = Feedback(torch.float32, double_buffered=False)
    feedback.lay({parameters["w"]: (0, 6)}, torch.zeros(6))["residual"].copy_(torch.arange(6.0))
    collect = partial(checkpoint.residuals_of, feedback, parameters)
    saved = checkpoint.save(collect, steps=3, rank=1, world_size=2, saved_by=None)
    steps, residuals = merge([saved], 1, 2, parameters)
    assert steps == 3 and torch.equal(residuals["w"], torch.arange(6.0).view(2, 3)) and not residuals["b"].any()
    for saved_by, keys in ((1, []), (5, ["rank 1 of 5", "rank 3 of 5"])):
        places = checkpoint.save(collect, steps=3, rank=1, world_size=2, saved_by=saved_by)["feedback"]
        assert list(places) == keys and all(not part.any() for place in places.values() for part in place.values())
    none = partial(checkpoint.residuals_of, None, parameters)
    assert checkpoint.save(none, 3, 1, 2, None)["feedback"] == {"rank 1 of 2": {}}


OWN = {"w": torch.ones(2, 3)}
REFUSED = {
    "no state": (7, TypeError, "state_dict: expected a state_dict of a Hook, or a list of them"),
    "no feedback": ({"steps": 1}, TypeError, "state_dict: expected a state_dict of a Hook"),
    "version": (state_of(0, 2, OWN, version=9), ValueError, r"expected version 1, got \[9\]"),
    "steps": (state_of(0, 2, OWN, steps=-1), ValueError, "expected steps of at least 0, got -1"),
    "world size": (state_of(0, 2, OWN, world_size=2**32), ValueError, "expected a world_size of at most"),
    "no residuals": (state_of(0, 2, 5), ValueError, "expected feedback by rank and by parameter"),
    "no rank": (state_of(0, 2, {}, feedback={"rank one": {}}), ValueError, r"ranks \[0\] are missing"),
    "not there": (state_of(5, 2, OWN), ValueError, r"ranks \[0\] are missing"),
    "some missing": (
        state_of(0, 4, OWN),
        ValueError,
        r"expected the feedback of the ranks \[0, 2\] of 4 on rank 0 of 2, ranks \[2\] are missing",
    ),
    "nobody's": (state_of(0, 2, {"nobody": torch.zeros(1)}), ValueError, "the model's parameters, got nobody"),
    "shape": (
        state_of(0, 2, {"w": torch.zeros(3)}),
        ValueError,
        r"expected feedback of shape \(2, 3\) for w, got \(3,\)",
    ),
    "whole numbers": (state_of(0, 2, {"w": torch.ones(2, 3).int()}), ValueError, "for w, got .* of torch.int32"),
    "no tensor": (
        state_of(0, 2, {"w": 1.0}),
        ValueError,
        "expected feedback of w as a dense tensor, got <class 'float'>",
    ),
}


@pytest.mark.parametrize(("state", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_states_that_cannot_be_merged_are_refused(state, error, text):
    with pytest.raises(error, match=text):
        merge([state])


def test_states_of_different_runs_are_refused():
    for changed, text in (
        ({"steps": 5}, r"expected states of one moment, got some of \[3, 5\] steps"),
        ({"world_size": 4}, r"expected states of one world size, got some of \[2, 4\]"),
    ):
        with pytest.raises(ValueError, match=text):
            merge([state_of(0, 2, OWN), state_of(1, 2, OWN, **changed)])
    with pytest.raises(TypeError, match="or a list of them"):
        merge([])


def test_saved_by_has_to_be_a_world_size():
    for saved_by, text in ((0, "expected a world size of at least 1, or None, got 0"), (2**32, "expected at most")):
        with pytest.raises(ValueError, match=f"saved_by: {text}"):
            checkpoint.save(lambda as_they_are: {}, 3, 0, 1, saved_by)


def test_rows_are_those_of_shard():
    for size in (0, 1, 3, 8, 10):
        for ranks in (1, 2, 3, 4):
            chunks = torch.arange(size).chunk(ranks) if size else ()
            sizes = [len(chunk) for chunk in chunks] + [0] * (ranks - len(chunks))
            assert [count for _, count in rows_of(size, ranks)] == sizes
            firsts = [int(chunk[0]) for chunk in chunks if len(chunk)]
            assert [first for first, count in rows_of(size, ranks) if count] == firsts


def test_a_region_is_divided_among_owners():
    region = Region("part", 100, 7 * 5, "int8", 64)
    parts = divided(region, 7, 3)
    assert [(part.first, part.numel, part.number, part.owner) for part in parts] == [
        (100, 15, 64, 0),
        (115, 15, 76, 1),
        (130, 5, 92, 2),
    ]
    feedback = Feedback(torch.float32, double_buffered=False)
    assert Layout(torch.zeros(200), parts, feedback, by_parameter=True).has_feedback
    assert feedback.of("part").shape == (35,)


INT8 = ["int8"] * 3


def model_parameters():
    """Return a large parameter, one of one dimension, and a small one, as regions of one buffer in another order."""
    a, b, c = torch.zeros(30, 7), torch.zeros(50), torch.zeros(2, 3)
    named = [(name, tensor.requires_grad_()) for name, tensor in (("a", a), ("b", b), ("c", c))]
    return named, {c: 10, a: 16, b: 300}


def test_regions_depend_only_on_the_tensors():
    named, firsts = model_parameters()
    regions = regions_of(Parameters(named), firsts, INT8, 7)
    assert [(r.first, r.numel, r.codec, r.number, r.is_lossy) for r in regions] == [
        (10, 6, "raw", 264, False),
        (16, 210, "int8", 0, True),
        (300, 50, "raw", 212, False),
    ]
    assert [r.part for r in regions] == [*firsts]
    elsewhere = regions_of(Parameters(named), {tensor: 5 for tensor in firsts}, INT8, 7)
    assert [(r.part, r.codec, r.number) for r in elsewhere] == [(r.part, r.codec, r.number) for r in regions]
    assert [r.codec for r in regions_of(Parameters(named), firsts, ["int4"] * 3, 6)] == ["int4", "int4", "raw"]
    with pytest.raises(ValueError, match=r"named_parameters: expected all .*, one of shape \(2, 3\) is missing"):
        regions_of(Parameters(named[:2]), firsts, INT8, 7)


def test_parameters_without_names_are_numbered_in_their_order():
    _, firsts = model_parameters()
    assert [region.number for region in regions_of(Parameters(None), firsts, INT8, 7)] == [0, 8, 220]


def test_a_layout_has_the_bounds_of_its_regions():
    named, firsts = model_parameters()
    buffer = torch.zeros(350)
    regions = regions_of(Parameters(named), firsts, INT8, 7)
    layout = Layout(buffer, regions, None, with_squares=True)
    assert layout.numel == 350 and not layout.has_feedback and layout.handle.stats()["calls"] == 0
    assert layout.message_bytes == codecs.nbytes("int8", 210) + 4 * 56
    assert layout.squares.shape == (3,) and layout.squares.dtype == torch.float64
    assert Layout(buffer, regions, None).squares is None


@pytest.mark.parametrize("double_buffered", [False, True])
def test_residuals_follow_their_tensors_to_other_layouts(double_buffered):
    named, firsts = model_parameters()
    parameters, feedback = Parameters(named), Feedback(torch.float32, double_buffered)
    feedback.initial = {tensor: torch.full((tensor.numel(),), 1.0 + i) for i, tensor in enumerate(firsts)}
    for where in (firsts, {tensor: first + 3 for tensor, first in firsts.items()}):
        assert Layout(torch.zeros(400), regions_of(parameters, where, INT8, 7), feedback).has_feedback
        assert [feedback.of(tensor).unique().tolist() for tensor in firsts] == [[1.0], [2.0], [3.0]]
        assert not feedback.initial
    assert feedback.of(torch.zeros(1)) is None


def step_of_kernels(laid, value):
    """Read the residuals and write new ones, as encoding does."""
    laid["residual" if laid["swapped"].item() else "spare"].fill_(value)


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_step_that_is_not_taken_does_not_change_the_residuals(is_taken):
    feedback = Feedback(torch.float32, double_buffered=True)
    reached, unreached = (feedback.lay({part: (0, 4)}, torch.zeros(4)) for part in ("reached", "unreached"))
    step_of_kernels(unreached, 7.0)
    step_of_kernels(reached, 1.0)
    feedback.expect(StepOutcome.of_sum(lambda: torch.tensor(2.0)))
    assert not feedback.of("reached").any(), "residuals change only when the outcome is known"
    feedback.settle()
    step_of_kernels(reached, 2.0)
    feedback.expect(StepOutcome.of_sum(lambda: torch.tensor(2.0 if is_taken else math.inf)))
    for _ in range(2):  # the second time the outcome is already settled
        feedback.settle(unreached=["unreached"])
        assert feedback.of("reached").unique() == (2.0 if is_taken else 1.0)
        assert feedback.of("unreached").unique() == 7.0


def test_the_outcome_is_not_queried_if_no_step_can_be_skipped():
    feedback = Feedback(torch.float32, double_buffered=False)
    feedback.lay({"part": (0, 4)}, torch.zeros(4))["residual"].fill_(1.0)
    feedback.expect(StepOutcome.of_sum(lambda: pytest.fail("asked")))
    feedback.settle()
    assert (feedback.of("part") == 1.0).all()


SCALERS = {
    "ours": amp.LossScaler,
    "ours, at the bottom": lambda *args, **options: amp.LossScaler(*args, **options, min_scale=64.0),
    "torch's": torch.amp.GradScaler,
}


def scaled_step(scaler, weight, optimizer, factor=1.0, new_scale=None):
    optimizer.zero_grad()
    scaler.scale(weight.sum() * factor).backward()
    verdict = StepOutcome.of_scaler(scaler)
    scaler.step(optimizer)
    scaler.update(new_scale)
    return bool(verdict.ask())


@pytest.mark.parametrize("growth_interval", [1, 3])
@pytest.mark.parametrize("kind", [*SCALERS])
def test_a_scaler_reports_which_steps_it_has_taken(kind, growth_interval):
    scaler = SCALERS[kind]("cpu", init_scale=64.0, growth_interval=growth_interval)
    weight = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    factors = [1.0, math.inf, 1.0, 1.0, math.inf, math.nan, 1.0]
    taken = [scaled_step(scaler, weight, optimizer, factor) for factor in factors]
    assert taken == [math.isfinite(factor) for factor in factors]
    assert growth_interval == 1 or scaled_step(scaler, weight, optimizer, new_scale=1.0), "lower, as set by the user"


def test_passes_without_a_step_have_outcomes_by_sum_only():
    scaler, weight = amp.LossScaler("cpu"), torch.zeros(3, requires_grad=True)
    scaler.scale(weight.sum() * math.inf).backward()
    of_sum, of_scaler = StepOutcome.of_sum(weight.grad.double().square().sum), StepOutcome.of_scaler(scaler)
    assert not of_sum.ask() and of_scaler.ask(), "at the start of the next pass"
    scaler.step(torch.optim.SGD([weight], lr=1.0))
    assert not of_scaler.ask()


@pytest.mark.parametrize("kind", [*SCALERS])
def test_the_loss_scale_is_that_of_the_current_gradients(kind):
    scaler, cpu = SCALERS[kind]("cpu", init_scale=64.0), torch.device("cpu")
    for too_early in (lambda: loss_scale_of(scaler, cpu), lambda: StepOutcome.of_scaler(torch.amp.GradScaler("cpu"))):
        with pytest.raises(RuntimeError, match=r"scaler: expected one whose scale\(loss\) has been called before"):
            too_early()
    scaler.scale(torch.ones(()))
    found = loss_scale_of(scaler, cpu)
    assert found == 64.0 and found.dtype == torch.float32
    assert loss_scale_of(None, cpu) is None and loss_scale_of(SCALERS[kind]("cpu", enabled=False), cpu) is None
