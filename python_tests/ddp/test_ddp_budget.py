"""Codecs by an error budget: what is selected for each bucket, when it is measured, and what is lost."""

import logging
import math
import re

import pytest
import torch
import torch.distributed as dist
from contributions import same_everywhere
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import amp, comm, ddp, sim
from dltrain_ext.comm import Choice, Tuning
from dltrain_ext.ddp.budget import Search, by_speed, is_due, relative_error

SECONDS = {"native": 1.0, "raw": 1.0, "fp16": 0.6, "int8": 0.3, "int4": 0.2}


class Tails(nn.Module):
    """The inputs of the layers, and so their gradients, have tails of different weight. Codecs of blocks lose more or
    less of these."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(64, 40, bias=False, dtype=dtype) for _ in range(3)])
        self.scales = [torch.randn(64).mul(tail).exp().to(dtype) for tail in (0.0, 1.0, 2.5)]

    def forward(self, x):
        return sum(layer(x * scale) / scale.norm() for layer, scale in zip(self.layers, self.scales, strict=True))


def tuning(world_size, **seconds):
    table = {
        codec: [Choice(1 << 20, "native" if codec == "native" else "direct", 1, time, True)]
        for codec, time in (SECONDS | seconds).items()
    }
    return Tuning(world_size, sim.Network(), table)


def make(world_size, max_error, seconds=None, dtype=torch.float32, **options):
    """Make a model with a bucket for each layer, and the state of its hook."""
    model = DistributedDataParallel(Tails(dtype), bucket_cap_mb=1e-3)
    options = {
        "tuning": tuning(world_size, **(seconds or {})),
        "error_feedback": False,
        "min_compress_numel": 0,
    } | options
    return model, ddp.register(model, "auto", max_error=max_error, **options)


def batch(rank, step, dtype=torch.float32):
    return torch.randn(512, 64, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def loss_of(model, x):
    return model(x).float().square().mean()


def errors_of(model, x, world_size):
    """Take a backward pass, and return the error of each gradient."""
    exact = torch.autograd.grad(loss_of(model.module, x), list(model.parameters()))
    model.zero_grad()
    loss_of(model, x).backward()
    found = []
    for parameter, own in zip(model.parameters(), exact, strict=True):
        average = own.float()
        dist.all_reduce(average)
        average /= world_size
        found.append(float((parameter.grad.float() - average).norm() / average.norm()))
        assert same_everywhere(parameter.grad)
    return found


def codecs_of(state):
    return [*state.state_dict()["budget"]["codecs"].values()]


def descend(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def keep_within(rank, world_size, max_error, options):
    model, state = make(world_size, max_error, **options)
    dtype = options.get("dtype", torch.float32)
    least = {torch.float32: 1e-6, torch.float16: 2e-3}[dtype]
    found, measured = [], []
    for step in range(1, 16):
        errors = errors_of(model, batch(rank, step, dtype), world_size)
        assert all(error <= max(max_error, least) for error in errors), step
        found.append(codecs_of(state))
        measured.append(all(error <= least for error in errors))
        descend(model)
    assert state.codec == state.stats()["codec"] == "auto"
    return found, measured, state.metrics(), [bucket["codec"] for bucket in state.stats()["per_bucket"]]


@pytest.mark.parametrize(
    ("max_error", "expected"),
    [
        (0.5, ["int4", "int4", "int4"]),
        (0.14, ["int8", "int8", "int4"]),
        (0.02, ["int8", "fp16", "int8"]),
        (1e-3, ["fp16", "fp16", "fp16"]),
        (1e-5, ["native", "native", "native"]),
    ],
)
def test_each_bucket_is_sent_in_the_fastest_codec_within_the_budget(max_error, expected):
    for found, measured, metrics, in_buckets in run_ranks(2, keep_within, max_error, {}):
        assert found[2] == ["auto"] * 3 and measured[:4] == [True] * 4
        assert found[-1] == expected
        assert in_buckets == expected[::-1]
        is_lossy = expected[0] != "native"
        assert measured[10] and measured[-1] != is_lossy  # the 11th pass measures; the last one does not
        shares = {name: share for name, share in metrics.items() if name.startswith("ddp/share")}
        assert shares.keys() == {f"ddp/share_{codec}" for codec in expected} and sum(shares.values()) == pytest.approx(
            1
        )
        assert (0 < metrics["ddp/budget_error"] <= max_error) if is_lossy else (metrics["ddp/budget_error"] == 0)


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(3, {}), (3, {"algorithm": "ring"}), (2, {"dtype": torch.float16}), (2, {"rounding": "stochastic"})],
)
def test_a_budget_is_kept_on_any_ranks_plans_and_dtypes(world_size, options):
    for found, *_ in run_ranks(world_size, keep_within, 0.2, options):
        assert found[-1] == found[6] and {*found[-1]} <= {"int4", "int8"}


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (dict.fromkeys(("fp16", "int8", "int4"), 0.95), "native"),  # not faster by more than 10 %
        ({"raw": 0.8, "fp16": 0.75, "int8": 2.0, "int4": 2.0}, "raw"),
        ({"int8": 0.201}, "int8"),  # as fast as int4
    ],
)
def test_nothing_is_slower_than_plain(seconds, expected):
    for found, *_ in run_ranks(2, keep_within, 0.9, {"seconds": seconds}):
        assert found[-1] == [expected] * 3


def go_on(rank, world_size):
    models = [make(world_size, 0.14, error_feedback=True) for _ in range(2)]
    (whole, _), (first, state) = models
    for model, _ in models:
        for step in range(1, 7):
            errors_of(model, batch(rank, step), world_size)
            descend(model)
    saved = state.state_dict()
    assert codecs_of(state) == ["int8", "int8", "int4"]
    second, resumed = make(world_size, 0.14, {"fp16": 0.1}, error_feedback=True)
    second.module.load_state_dict(first.module.state_dict())
    resumed.load_state_dict(saved)
    assert codecs_of(resumed) == codecs_of(state)
    for step in (7,):
        for model in (whole, second):
            errors_of(model, batch(rank, step), world_size)
    assert all(map(torch.equal, *([p.grad for p in model.parameters()] for model in (whole, second))))
    for options in ({"max_error": 0.3}, {"max_error": None}):
        other = DistributedDataParallel(Tails())
        anew = ddp.register(other, "auto", tuning=tuning(world_size), **options)
        before = anew.choice
        anew.load_state_dict(saved)
        assert anew.choice == before and anew.steps == 6
        assert options["max_error"] is None or codecs_of(anew) == ["auto"] * 3
    for spoilt in (
        [],
        {"max_error": 0.14},
        {"max_error": torch.ones(2), "codecs": {}},
        {"max_error": 0.14, "codecs": {"layers.7.weight": "int8"}},
    ):
        with pytest.raises(ValueError, match="state_dict: expected .*budget"):
            resumed.load_state_dict(saved | {"budget": spoilt})
    with pytest.raises(ValueError, match=r"codec of a parameter in budget, got 'int3' for 'layers.0.weight'"):
        resumed.load_state_dict(saved | {"budget": {"max_error": 0.14, "codecs": {"layers.0.weight": "int3"}}})
    assert codecs_of(resumed) == codecs_of(state)
    without = {key: value for key, value in saved.items() if key != "budget"}
    resumed.load_state_dict(without)  # of a version before there were budgets
    assert codecs_of(resumed) == ["auto"] * 3
    errors_of(second, batch(rank, 7), world_size)  # measures, since no codec is known


def test_a_run_that_continues_has_the_codecs_and_the_bits():
    run_ranks(2, go_on)


def overflow(rank, world_size):
    model, state = make(world_size, 0.5)
    for step in range(1, 8):
        x = batch(rank, step)
        if step in (4, 5) and rank == 1:
            x[0, 0] = math.inf
        model.zero_grad()
        loss_of(model, x).backward()
        assert (codecs_of(state) == ["auto"] * 3) == (step < 7), step  # a step after the one that was finite
    assert codecs_of(state) == ["int4"] * 3


def test_a_step_that_overflows_measures_nothing():
    run_ranks(2, overflow)


def feed_back(rank, world_size):
    """One bucket is searched for longer than the others; no residual is lost meanwhile."""
    model, state = make(world_size, 0.14, error_feedback=True, scaler=amp.LossScaler("cpu", init_scale=8.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    residuals = []
    for step in range(1, 13):
        model.zero_grad()
        state.scaler.scale(loss_of(model, batch(rank, step))).backward()
        state.scaler.step(optimizer, grad_stats=state.grad_stats)
        state.scaler.update()
        (found,) = state.state_dict()["feedback"].values()
        residuals.append([*found.values()])
    assert codecs_of(state) == ["int8", "int8", "int4"]
    assert not any(residual.any() for residual in residuals[3])  # the 4th pass was the first that measured
    fifth, tenth, eleventh, twelfth = (residuals[step - 1] for step in (5, 10, 11, 12))
    assert fifth[2].any() and not fifth[1].any()  # int4 was found for the last layer; others try int8
    assert all(residual.any() for residual in tenth)
    assert all(map(torch.equal, tenth, eleventh))  # the 11th pass sends all of them plain
    assert not torch.equal(twelfth[2], eleventh[2]) and all(map(torch.equal, twelfth[:2], eleventh[:2]))
    assert float(twelfth[2].norm()) < 3 * float(tenth[2].norm())


def test_residuals_are_kept_while_a_bucket_is_measured():
    run_ranks(2, feed_back)


class Branches(Tails):
    """The last layer is not used in some passes."""

    def forward(self, x):
        self.uses = self.layers if getattr(self, "whole", True) else self.layers[:2]
        return sum(layer(x * scale) / scale.norm() for layer, scale in zip(self.uses, self.scales, strict=False))


def measure_nothing(rank, world_size):
    """A bucket without gradients in the passes that measure is sent plain in the others."""
    model = DistributedDataParallel(Branches(), bucket_cap_mb=1e-3, find_unused_parameters=True)
    options = {"tuning": tuning(world_size), "error_feedback": False, "min_compress_numel": 0}
    state = ddp.register(model, "auto", max_error=0.5, **options)
    for step in range(1, 12):
        model.module.whole = not 4 <= step <= 7
        model.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        if step > 7:
            assert codecs_of(state) == ["int4", "int4", "native"], (step, codecs_of(state))
    loss_of(model, batch(rank, 12)).backward()  # was measured in pass 11
    assert codecs_of(state) == ["int4"] * 3


def test_gradients_that_are_zero_are_no_measurement():
    run_ranks(2, measure_nothing)


def exceed_fp16(rank, world_size):
    """An average in fp16 is NaN where the ranks overflow with different signs, and its sum is finite in fp32."""
    model, state = make(world_size, 0.01, {"int8": 2.0, "int4": 2.0})
    for step in range(1, 7):
        model.zero_grad()
        (loss_of(model, batch(rank, step)) * 1e9 * (1 - 2 * rank)).backward()
    assert codecs_of(state) == ["native"] * 3, codecs_of(state)


def test_a_codec_that_overflows_is_none():
    run_ranks(2, exceed_fp16)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(64, 64), nn.Parameter(torch.ones(64))

    def forward(self, x):
        return self.first(x) * self.last


def leave_small(rank, world_size):
    """A small parameter is not called compressed; a bucket of small ones is not measured."""
    model = DistributedDataParallel(Small(), bucket_cap_mb=1e-4)
    state = ddp.register(model, "auto", max_error=0.5, tuning=tuning(world_size, raw=0.9))
    for step in range(1, 7):
        model.zero_grad()
        loss_of(model, batch(rank, step)).backward()
    found = state.state_dict()["budget"]["codecs"]
    assert found == {"first.weight": "int4", "first.bias": "raw", "last": "raw"}
    assert state.metrics()["ddp/share_int4"] == pytest.approx(64 * 64 / (64 * 66))
    assert any(bucket["codec"] == "raw" for bucket in state.stats()["per_bucket"])


def test_small_parameters_are_sent_as_they_are():
    run_ranks(2, leave_small)


def drop_residuals(rank, world_size):
    """What a bucket has lost is not added to the gradients of a much later pass."""
    model, state = make(world_size, 0.02, {"fp16": 2.0, "int4": 2.0}, error_feedback=True)
    tails = torch.randn(64, generator=torch.Generator().manual_seed(0)).exp()
    for step in range(1, 13):
        model.zero_grad()
        loss_of(model, batch(rank, step) * (1.0 if step < 11 else tails)).backward()
        (found,) = state.state_dict()["feedback"].values()
        if step == 10:
            assert codecs_of(state)[0] == "int8" and found["layers.0.weight"].any()
    assert codecs_of(state)[0] == "native" and not found["layers.0.weight"].any()


def test_residuals_of_buckets_that_become_plain_are_dropped():
    run_ranks(2, drop_residuals)


def join(rank, world_size):
    """A rank that has no more batches takes part in what the others measure."""
    model, state = make(world_size, 0.5)
    with model.join():
        for step in range(1, 12 - 8 * rank):
            model.zero_grad()
            loss_of(model, batch(rank, step)).backward()
    return codecs_of(state), state.steps


def test_ranks_that_have_joined_measure_with_the_others():
    assert run_ranks(2, join) == [(["int4"] * 3, 11)] * 2


def measure_links(rank, world_size):
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("dltrain_ext").addHandler(handler)
    model, state = make(world_size, 0.3, tuning=None)
    for step in range(1, 8):
        errors = errors_of(model, batch(rank, step), world_size)
        assert max(errors) <= 0.3
    assert state.stats()["buckets"] == 1 + 6 * 3  # in the first pass all parameters are in one
    assert state.communicator.stats()["calls"] <= 7 * 3 + 3 * 3 + 3  # none of measuring the links
    return codecs_of(state), told


def test_links_are_measured_without_a_tuning():
    (codecs, told), (others, silent) = run_ranks(2, measure_links, fresh=True)
    assert codecs == others and "auto" not in codecs and not silent
    assert all(re.match(r"max_error 0.3: gradients travel: .* % as \w+; error", line) for line in told)


def override(rank, world_size):
    """The environment selects a plan that accepts raw alone."""
    for algorithm in ("recursive_doubling", "native"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DLTRAIN_ALGORITHM", algorithm)
            model, state = make(world_size, 0.5)
        assert state.algorithm == algorithm
        for step in range(1, 7):
            assert max(errors_of(model, batch(rank, step), world_size)) < 1e-6
        assert codecs_of(state) == ["raw"] * 3


def test_the_environment_may_leave_raw_alone():
    run_ranks(2, override)


def tell(rank, world_size):
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("dltrain_ext").addHandler(handler)
    for max_error, seconds in ((0.5, {}), (0.14, {}), (0.5, dict.fromkeys(("fp16", "int8", "int4"), 2.0))):
        model, state = make(world_size, max_error, seconds)
        assert "ddp/budget_error" not in state.metrics()
        for step in range(1, 16):
            loss_of(model, batch(rank, step)).backward()
            known = state.metrics().get("ddp/budget_error")
            assert (known is None) == (step < (4 if seconds else 5))
        assert (known == 0) if seconds else (0 < known <= max_error)
    return told


def test_the_selection_is_told_when_it_changes():
    told, silent = run_ranks(2, tell, fresh=True)
    assert [re.sub("error [.0-9]+$", "error E", line) for line in told] == [
        "max_error 0.5: gradients travel: 100 % as int4; error E",
        "max_error 0.14: gradients travel: 33.3 % as int4, 66.7 % as int8; error E",
        "max_error 0.5: gradients travel: 100 % as native; error E",
    ]
    assert not silent


def refuse(rank, world_size):
    for error, options, message in (
        (ValueError, {"codec": "auto", "max_error": 0.0}, "max_error: expected a number above 0 and below 1, or None"),
        (ValueError, {"codec": "auto", "max_error": math.nan}, "max_error: expected a number above 0 and below 1"),
        (TypeError, {"codec": "auto", "max_error": "x"}, "max_error: expected a number, got 'x'"),
        (
            ValueError,
            {"codec": "int8", "max_error": 0.1},
            "max_error: expected None, or the codec 'auto', got 0.1 with",
        ),
        (ValueError, {"max_error": 0.1}, "max_error: expected None, or the codec 'auto', got 0.1 with 'int8'"),
    ):
        with pytest.raises(error, match=message):
            ddp.register(DistributedDataParallel(Tails()), **options)
    model = DistributedDataParallel(Tails())
    with pytest.raises(ValueError, match="max_error: expected None"):
        ddp.register(model, shard=torch.optim.SGD(model.parameters()), max_error=0.1)
    model, state = make(world_size, 0.5, algorithm="recursive_doubling")  # encodes more than once
    for step in range(1, 7):
        assert max(errors_of(model, batch(rank, step), world_size)) < 1e-6
    assert codecs_of(state) == ["raw"] * 3


def test_a_budget_is_one_of_the_codec_auto():
    run_ranks(2, refuse)


def test_a_process_without_peers_accepts_a_budget():
    assert ddp.register(Tails(), "auto", max_error=0.1).codec == "raw"
    with pytest.raises(ValueError, match="max_error"):
        ddp.register(Tails(), "int8", max_error=0.1)


def test_errors_are_measured_often_at_first():
    assert [count for count in range(-3, 800) if is_due(count)] == [4, 11, 19, 35, 67, 131, 259, 515, 771]


def test_codecs_are_tried_by_their_speed():
    assert by_speed(SECONDS) == ("native", ["int4", "int8", "fp16"])
    assert by_speed(SECONDS | {"raw": 0.5}) == ("raw", ["int4", "int8"])
    assert by_speed({"raw": 1.0, "int8": 0.5}) == ("raw", ["int8"])
    assert by_speed({"int8": 0.5}) == ("raw", [])
    assert by_speed(SECONDS | {"fp16": 0.21}) == ("native", ["fp16", "int4", "int8"])
    assert by_speed({}) == ("raw", [])


def test_a_search_ends_at_the_first_codec_within_the_budget():
    search = Search([], "native", ["int4", "int8"])
    assert search.judge(math.nan, 0.1) is None and search.left == ["int4", "int8"]
    assert search.judge(math.inf, 0.1) is None and search.left == ["int8"]
    assert search.judge(0.08, 0.1) == "int8" and not search.left
    search = Search([], "native", ["int8"])
    assert search.judge(0.081, 0.1) == "native"


def test_the_error_is_relative_to_the_exact_average():
    exact = torch.tensor([3.0, -4.0])
    assert float(relative_error(torch.tensor([3.0, -3.5]), exact)) == pytest.approx(0.1)
    assert float(relative_error(exact.clone(), exact)) == 0
    assert float(relative_error(1e-30 * torch.tensor([3.0, -3.5]), 1e-30 * exact)) == pytest.approx(0.1)
    for zero in (torch.zeros(2), torch.ones(2)):
        assert float(relative_error(zero, torch.zeros(2))) == math.inf  # says nothing about other steps
    for wrong in (math.inf, math.nan):
        assert float(relative_error(torch.tensor([3.0, wrong]), exact)) == math.inf
    assert math.isnan(relative_error(exact.clone(), torch.tensor([3.0, math.inf])))
    assert math.isnan(relative_error(torch.tensor([3.0, math.nan]), torch.tensor([3.0, math.nan])))


def test_a_tuning_tells_the_times_of_codecs():
    found = tuning(2)
    assert found.times_for(1 << 20) == SECONDS
    assert found.times_for(1 << 20, torch.float16)["native"] == 1.0  # the nearest size
    assert found.times_for(1 << 22)["int8"] == pytest.approx(4 * SECONDS["int8"])
    assert "sign" not in Tuning(2, sim.Network(), found.table | {"sign": found.table["int4"]}).times_for(1)


def tell_times(rank, world_size):
    communicator = comm.Communicator()
    times = communicator.times_for(1 << 16)
    assert times.keys() == {"native", "raw", "fp16", "int8", "int4"} and all(time > 0 for time in times.values())
    assert communicator.times_for(1 << 16) == times and communicator.stats()["calls"] == 0
    assert communicator.times_for(1 << 16, "tree").keys() == times.keys()
    assert communicator.times_for(1 << 16, "native") == {}
    with pytest.raises(ValueError, match="dtype: expected"):
        communicator.times_for(1, dtype=torch.int8)
    return times


def test_a_communicator_tells_the_same_times_on_all_ranks():
    first, second = run_ranks(2, tell_times)
    assert first == second
