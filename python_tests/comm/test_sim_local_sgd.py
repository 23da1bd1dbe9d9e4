"""Simulated training at sites behind slow links, compared with formulas, a clock that follows steps, and DiLoCo."""

import math
from dataclasses import replace

import pytest
import torch
from properties import property_test, st
from ranks import run_ranks
from torch import nn

from dltrain_ext import codecs, local_sgd, sim
from dltrain_ext.local_sgd import fragments
from dltrain_ext.sim import sites

MB = 10**6
LINK = sim.Network(latency=0, bandwidth=1e6, memory_bandwidth=1e18)  # nothing but its bandwidth takes time
SIZES = ((256, 96), (96, 64), (64, 64))


@pytest.mark.parametrize("codec", codecs.CODECS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64])
def test_a_site_sends_and_waits_as_by_the_formula(world_size, codec):
    numel = 64 * 1024 * 3
    found = sim.local_sgd(world_size, 4 * numel, sync_every=50, compute=2.0, codec=codec, network=LINK)
    burst = 2 * (world_size - 1) / world_size * codecs.nbytes(codec, numel)
    assert found.burst == pytest.approx(burst, rel=0.01)
    assert found.wire_bytes == found.burst / 50
    assert found.all_reduce == found.standstill == pytest.approx(found.burst / 1e6, rel=1e-3, abs=1e-9)
    assert found.exposed == found.standstill / 50
    assert (found.seconds, found.compute) == (2.0 + found.exposed, 2.0)
    assert found.efficiency == pytest.approx(100 / (100 + found.standstill))
    assert found.mean_bandwidth == pytest.approx(found.burst / (100 + found.standstill))
    assert found.peak_bandwidth == (math.inf if world_size > 1 else 0)


def test_the_all_reduce_is_that_of_the_simulator():
    network = sim.Network(latency=0.05, bandwidth=1e6, memory_bandwidth=1e8, overhead=1e-3, copy=1e-9)
    for codec in ("raw", "int4"):
        whole = sim.simulate("direct", 5, MB, codec=codec, network=network)
        part = sim.simulate("direct", 5, MB // 4, codec=codec, network=network)
        one = sim.local_sgd(5, MB, sync_every=8, compute=1, codec=codec, network=network)
        four = sim.local_sgd(5, MB, sync_every=8, compute=1, fragments=4, codec=codec, network=network)
        assert (one.all_reduce, one.burst) == (whole.seconds, whole.wire_bytes)
        assert (four.all_reduce, four.burst) == (part.seconds, part.wire_bytes)
        assert four.exposed == pytest.approx(4 * part.seconds / 8)
        assert four.wire_bytes == 4 * part.wire_bytes / 8


def test_encoding_takes_time():
    slow = replace(LINK, speeds={"int4": sim.Speed(encode=1e6, decode=1e6)})
    options = {"sync_every": 10, "compute": 1.0}
    free, coded = (sim.local_sgd(4, 4 * MB, network=network, **options) for network in (LINK, slow))
    assert coded.all_reduce > free.all_reduce + 0.2
    assert coded.burst == free.burst


def test_a_delay_hides_as_many_steps():
    """The all-reduce of a fragment takes 2 s."""
    nbytes = 4 * 2 * MB
    options = {"codec": "raw", "fragments": 4, "compute": 0.5, "network": LINK}
    found = [sim.local_sgd(2, nbytes, sync_every=32, delay=delay, **options) for delay in range(8)]
    assert [each.standstill for each in found] == pytest.approx([2, 1.5, 1, 0.5, 0, 0, 0, 0], abs=2e-3)
    assert [each.exposed for each in found] == pytest.approx([each.standstill / 8 for each in found])
    assert found[4].efficiency == pytest.approx(1, abs=1e-3)
    assert [each.peak_bandwidth for each in found[1:]] == pytest.approx([2e6 / (0.5 * n) for n in range(1, 8)])


def test_an_all_reduce_may_take_longer_than_the_steps_between_two():
    """It takes 2 s, and two fragments are 1 s apart: each waits for the one before."""
    options = {"codec": "raw", "fragments": 4, "sync_every": 8, "network": LINK}
    for delay, waiting in ((0, 2), (1, 1.5)):
        found = sim.local_sgd(2, 4 * 2 * MB, compute=0.5, delay=delay, **options)
        assert found.standstill == pytest.approx(waiting, abs=2e-3)
        assert found.seconds * 2 == pytest.approx(1 + waiting, abs=2e-3)  # from one fragment to the next


def test_a_link_that_carries_the_peak_hides_everything():
    options = {"sync_every": 100, "compute": 1.0, "fragments": 4, "delay": 10}
    peak = sim.local_sgd(8, 64 * MB, network=LINK, **options).peak_bandwidth
    for factor, hidden in ((1.001, True), (0.98, False)):
        found = sim.local_sgd(8, 64 * MB, network=replace(LINK, bandwidth=factor * peak), **options)
        assert (found.standstill == 0, found.efficiency == 1) == (hidden, hidden)


def test_the_largest_fragment_makes_the_burst():
    options = {"sync_every": 8, "compute": 1.0, "fragments": 4, "codec": "raw", "network": LINK}
    even, uneven = (sim.local_sgd(2, 16 * MB, largest=largest, **options) for largest in (None, 10 * MB))
    assert (even.burst, uneven.burst) == (4 * MB, 10 * MB)
    assert uneven.all_reduce == pytest.approx(10, rel=1e-3)
    assert uneven.wire_bytes == even.wire_bytes == 2 * MB
    assert uneven.exposed == pytest.approx(even.exposed, rel=1e-3)  # without a delay
    even, uneven = (sim.local_sgd(2, 16 * MB, delay=1, largest=largest, **options) for largest in (4 * MB, 10 * MB))
    assert even.exposed == pytest.approx(4 * (4 - 1) / 8, rel=1e-3)
    assert uneven.exposed == pytest.approx((10 - 1 + 3 * (2 - 1)) / 8, rel=1e-3)


schedules = st.tuples(st.integers(1, 6), st.integers(1, 9)).flatmap(  # fragments, and steps between two of them
    lambda pair: st.tuples(st.just(pair[0]), st.just(pair[1]), st.integers(0, pair[1] - 1))
)
seconds = st.floats(1e-3, 1e3)
bandwidths = st.floats(1e3, 1e9)


def clock(fragments: int, interval: int, delay: int, compute: float, all_reduce: float) -> float:
    """Return the mean time of the steps of two rounds, each followed as in DiLoCo._stepped, after one that warms up."""
    rounds = 3 * fragments * interval
    now, due, flight, began = 0.0, interval, None, 0.0
    for step in range(1, rounds + interval):
        now += compute
        if flight is not None and step >= flight[0]:
            now, flight = max(now, flight[1]), None
        if step >= due:
            assert flight is None
            due = step + interval
            if step == rounds // 3:
                began = now
            if step == rounds:
                return (now - began) / (2 * fragments * interval)
            flight = (step + delay, now + all_reduce)
            if delay == 0:
                now, flight = flight[1], None
    raise AssertionError


@property_test(100, schedule=schedules, compute=seconds, bandwidth=bandwidths, codec=st.sampled_from(codecs.CODECS))
def test_a_clock_that_follows_the_steps_agrees(schedule, compute, bandwidth, codec):
    fragments, interval, delay = schedule
    found = sim.local_sgd(
        3,
        4 * 1024 * fragments,
        sync_every=fragments * interval,
        compute=compute,
        fragments=fragments,
        delay=delay,
        codec=codec,
        network=sim.Network(bandwidth=bandwidth, latency=0.01),
    )
    assert found.seconds == pytest.approx(clock(fragments, interval, delay, compute, found.all_reduce))


@property_test(
    100,
    schedule=schedules,
    compute=seconds,
    bandwidth=bandwidths,
    faster=st.floats(1.01, 100),
    world_size=st.integers(2, 9),
)
def test_faster_links_rarer_averages_and_delays_never_slow_down(schedule, compute, bandwidth, faster, world_size):
    fragments, interval, delay = schedule

    def estimated(interval=interval, delay=delay, bandwidth=bandwidth, codec="int4"):
        return sim.local_sgd(
            world_size,
            10**6,
            sync_every=fragments * interval,
            compute=compute,
            fragments=fragments,
            delay=delay,
            codec=codec,
            network=replace(LINK, bandwidth=bandwidth),
        )

    found = estimated()
    assert 0 <= found.standstill <= found.all_reduce
    assert compute <= found.seconds <= compute + found.all_reduce * fragments
    assert 0 < found.efficiency <= 1
    assert found.mean_bandwidth <= bandwidth * 1.001
    assert (found.standstill > 0) or found.peak_bandwidth <= bandwidth * 1.001
    for better in (
        estimated(bandwidth=faster * bandwidth),
        estimated(interval=interval + 1),
        estimated(delay=interval - 1),
    ):
        assert better.seconds <= found.seconds * (1 + 1e-9)
        assert better.burst == found.burst
    raw = estimated(codec="raw")
    assert raw.seconds >= found.seconds and raw.burst > 7 * found.burst


def train(rank: int, world_size: int, options: dict, steps: int) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(*size, bias=False) for size in SIZES))
    inner = torch.optim.SGD(model.parameters(), lr=1e-5)
    outer = local_sgd.DiLoCo(model, inner, min_compress_numel=0, **options)
    before = outer.metrics()["outer/wire_bytes"]
    for step in range(steps):
        inner.zero_grad()
        model(torch.full((4, SIZES[0][0]), step + rank + 1.0)).square().mean().backward()
        inner.step()
    outer.finish()
    return outer.metrics()["outer/wire_bytes"] - before


@pytest.mark.parametrize("codec", ["raw", "int8", "int4"])
@pytest.mark.parametrize("schedule", [{"sync_every": 4}, {"sync_every": 6, "fragments": 2, "delay": 1}])
def test_diloco_sends_as_many_bytes(codec, schedule):
    each = [inputs * outputs for inputs, outputs in SIZES]
    largest = 4 * (each[0] if "fragments" in schedule else sum(each))
    expected = sim.local_sgd(2, 4 * sum(each), compute=1.0, codec=codec, largest=largest, **schedule)
    steps = 3 * schedule["sync_every"]
    for sent in run_ranks(2, train, {"codec": codec, **schedule}, steps):
        assert sent - 8 == pytest.approx(steps * expected.wire_bytes)  # 8: a digest of the parameters at the beginning


def test_the_plan_is_that_of_diloco():
    assert sites._ALGORITHM == fragments.ALGORITHM


def estimate(**options):
    return sim.local_sgd(**{"world_size": 4, "nbytes": 400, "sync_every": 100, "compute": 1.0, **options})


WRONG = [
    (ValueError, "world_size: expected at least 1, got 0", {"world_size": 0}),
    (TypeError, "world_size: expected an int, got 'x'", {"world_size": "x"}),
    (ValueError, "nbytes: expected 0 to 281474976710655, got -1", {"nbytes": -1}),
    (TypeError, "nbytes: expected an int, got 1.5", {"nbytes": 1.5}),
    (ValueError, "sync_every: expected a multiple of fragments, 1, got 0", {"sync_every": 0}),
    (ValueError, "sync_every: expected a multiple of fragments, 8, got 100", {"fragments": 8}),
    (TypeError, "sync_every: expected an int, got None", {"sync_every": None}),
    (ValueError, "fragments: expected at least 1, got 0", {"fragments": 0}),
    (ValueError, "delay: expected less than sync_every / fragments, 10, .* got 10", {"fragments": 10, "delay": 10}),
    (ValueError, "delay: expected 0 to 2147483647, got -1", {"delay": -1}),
    (ValueError, "compute: expected more than 0 s, got 0", {"compute": 0}),
    (ValueError, "compute: expected at least 0 s, got nan", {"compute": math.nan}),
    (ValueError, "codec: expected one of", {"codec": "int3"}),
    (TypeError, "network: expected a Network or None, got 3", {"network": 3}),
    (ValueError, "largest: expected 400 to 400 bytes, got 399", {"largest": 399}),
    (ValueError, "largest: expected 40 to 400 bytes, got 39", {"fragments": 10, "largest": 39}),
    (ValueError, "largest: expected 40 to 400 bytes, got 401", {"fragments": 10, "largest": 401}),
    (TypeError, "largest: expected an int, got 'all'", {"largest": "all"}),
]


@pytest.mark.parametrize(("kind", "match", "options"), WRONG)
def test_errors_name_the_wrong_argument(kind, match, options):
    with pytest.raises(kind, match=match):
        estimate(**options)


@pytest.mark.parametrize("schedule", [{"fragments": 3}, {"delay": 100}, {"fragments": 2, "delay": 50}])
def test_schedules_that_diloco_refuses_are_refused_alike(schedule):
    with pytest.raises(ValueError) as simulated:
        estimate(**schedule)
    with pytest.raises(ValueError) as refused:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        local_sgd.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), sync_every=100, **schedule)
    assert str(simulated.value) == str(refused.value)
