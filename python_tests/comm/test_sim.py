"""Simulated all-reduces, parameter servers and training steps, compared with formulas."""

import math
from dataclasses import replace

import pytest

from dltrain_ext import codecs, comm, sim

MB = 10**6


def test_the_time_of_a_ring_is_that_of_its_formula():
    network = sim.Network(latency=1e-4, bandwidth=1e9, memory_bandwidth=12e9)
    for p in (2, 3, 8, 64):
        nbytes = 4 * 64 * 64 * 64 * 3
        n = nbytes // 4
        formula = 2 * (p - 1) * 1e-4 + 2 * nbytes * (p - 1) / p / 1e9 + n * (p - 1) / p * 1e-9
        assert sim.simulate("ring", p, nbytes, network=network, segments=1).seconds == pytest.approx(formula, rel=1e-3)


@pytest.mark.parametrize("algorithm", comm.ALGORITHMS)
def test_bytes_are_those_of_the_formula(algorithm):
    p, nbytes = 8, 4 * 1024 * 1024
    estimate = sim.simulate(algorithm, p, nbytes)
    sent = max(
        sum(step.chunks[1] - step.chunks[0] for steps in plan.rounds for step in steps if "send" in step.op)
        / plan.chunks
        for plan in (comm.plan(algorithm, rank, p) for rank in range(p))
    )
    assert estimate.algorithm == algorithm
    assert estimate.wire_bytes == pytest.approx(nbytes * sent, rel=0.01)
    assert estimate.rounds == len(comm.plan(algorithm, 0, p).rounds)


def test_codecs_send_less():
    slow = sim.Network(bandwidth=125e6)
    times = {
        codec: sim.best(4, 16 * MB, codec=codec, network=slow).seconds for codec in ("raw", "fp16", "int8", "int4")
    }
    assert times["raw"] > 1.8 * times["fp16"] > 1.8 * 1.8 * times["int8"] > 1.8**3 * times["int4"]


def test_measured_speeds_are_used():
    slow = sim.Network(speeds={"int8": sim.Speed(encode=1e6, decode=1e6)})
    assert sim.simulate("direct", 2, 4 * MB, codec="int8", network=slow).seconds > 1
    assert sim.Network.from_dict(slow.to_dict()) == slow


def test_two_levels_reduce_the_traffic_of_the_link():
    network = sim.Network(bandwidth=1e9, ranks_per_host=8, inside_bandwidth=100e9)
    one, two = (sim.simulate("ring", 32, 64 * MB, network=network, levels=levels) for levels in (1, 2))
    direct = sim.simulate("direct", 32, 64 * MB, network=network)
    assert two.seconds < direct.seconds / 4
    assert two.seconds < 1.2 * one.seconds  # in a ring, only the messages of one rank leave the host
    with pytest.raises(ValueError, match="levels: expected 1 where there are not several hosts"):
        sim.simulate("ring", 8, 64 * MB, network=network, levels=2)


def test_two_levels_of_hosts_with_unequal_ranks():
    """The smaller host has as many shards as ranks, and its link still carries one tensor in each direction."""
    network = sim.Network(bandwidth=1e9, ranks_per_host=5, inside_bandwidth=100e9)
    flat, uneven, even = (
        sim.simulate("direct", ranks, 64 * MB, network=network, levels=levels)
        for ranks, levels in ((8, 1), (8, 2), (10, 2))
    )
    assert uneven.wire_bytes == pytest.approx(64 * MB / 3, rel=1e-3)  # sent by each of three
    assert uneven.seconds < flat.seconds / 2.5  # 3.75 tensors
    assert even.seconds < uneven.seconds < 1.5 * even.seconds


def test_two_levels_use_at_most_eight_segments():
    slow = sim.Network(latency=1.0, ranks_per_host=2)
    one, many = (sim.simulate("direct", 4, n * 2**22, network=slow, segments=1, levels=2) for n in (1, 100))
    assert 2 < one.seconds < 3  # two rounds between the hosts
    assert 2 * 8 < many.seconds < 2 * 9


def test_thousands_of_ranks():
    for algorithm in comm.ALGORITHMS:
        estimate = sim.simulate(algorithm, 4096, 100 * MB, network=sim.Network(ranks_per_host=8))
        assert math.isfinite(estimate.seconds) and estimate.seconds > 0.1


def test_a_late_rank_is_waited_for():
    late = [0.0] * 6
    late[2] = 0.25
    alone = sim.simulate("ring", 6, MB).seconds
    assert 0.25 < sim.simulate("ring", 6, MB, late=late).seconds <= 0.25 + alone + 1e-9


def test_a_step_hides_communication_behind_backward():
    network = sim.Network(bandwidth=1e9)
    buckets = [25 * MB] * 4
    one = sim.best(8, buckets[0], network=network).seconds
    long = sim.training_step(8, buckets, backward=100.0, network=network)
    assert long.exposed == pytest.approx(one)  # that of the last bucket
    short = sim.training_step(8, buckets, backward=0.0, other=1.0, network=network)
    assert short.exposed == pytest.approx(4 * one)
    assert short.efficiency == pytest.approx(1 / (1 + 4 * one))
    assert sim.training_step(1, buckets, backward=1.0).efficiency == 1
    waiting = sim.training_step(100, buckets, backward=100.0, network=network, stragglers=(0.01, 2.0))
    assert waiting.straggling == pytest.approx(2 * (1 - 0.99**100))


def test_break_even():
    network = sim.Network(memory_bandwidth=10e9)
    bandwidth = sim.break_even("int8", 4, 16 * MB, network=network)
    for factor, wins in ((0.9, True), (1.1, False)):
        there = replace(network, bandwidth=bandwidth * factor)
        ours, theirs = (sim.best(4, 16 * MB, codec=codec, network=there).seconds for codec in ("int8", "raw"))
        assert (ours < theirs) == wins
    assert sim.break_even("int8", 4, 16 * MB, network=replace(network, memory_bandwidth=1e16)) is None
    assert sim.break_even("int8", 4, 16 * MB, network=replace(network, memory_bandwidth=1e3)) == 0
    for codec in codecs.CODECS[1:]:
        sim.break_even(codec, 3, MB, against="bf16", network=network)


def test_a_server_takes_the_time_of_its_link():
    network = sim.Network(latency=0, bandwidth=1e9, memory_bandwidth=1e15)
    for workers in (2, 16, 100):
        for servers in (1, 2):
            carried = workers * 16 * MB / servers / 1e9
            each, halves = (
                sim.parameter_server(workers, 16 * MB, servers=servers, network=network, segments=segments).seconds
                for segments in (1, 2)
            )
            assert each == pytest.approx(2 * carried, rel=1e-3)  # everything is pushed before the first pull
            assert halves == pytest.approx(1.5 * carried, rel=1e-3)  # one half is pulled while the other one is pushed
            in_pieces = sim.parameter_server(workers, 16 * MB, servers=servers, network=network).seconds
            assert carried < in_pieces < 1.15 * carried


def test_servers_have_less_to_do_by_codecs_levels_and_shares():
    hosts = sim.Network(bandwidth=1e9, ranks_per_host=8)
    for servers in (1, 4):
        raw, int8 = (
            sim.parameter_server(64, 64 * MB, servers=servers, network=hosts, codec=codec) for codec in ("raw", "int8")
        )
        assert raw.wire_bytes == pytest.approx(64 * 64 * MB / servers, rel=1e-3)
        assert int8.wire_bytes / raw.wire_bytes == pytest.approx(0.254, abs=1e-3)
        assert int8.seconds < 0.27 * raw.seconds
        hierarchical = sim.parameter_server(64, 64 * MB, servers=servers, network=hosts, levels=2)
        assert hierarchical.wire_bytes == pytest.approx(8 * 64 * MB / servers, rel=1e-3)
        assert hierarchical.seconds < raw.seconds / 7
    assert raw.algorithm == "parameter_server"
    for levels in (1, 2):
        options = {"codec": "int8", "network": hosts, "levels": levels}
        assert sim.parameter_server(64, MB, **options) == sim.simulate("direct", 64, MB, **options)


def test_as_many_servers_as_workers_take_the_time_of_direct():
    network = sim.Network(latency=0, bandwidth=1e9)
    direct = sim.parameter_server(16, 64 * MB, network=network, segments=1)
    servers = sim.parameter_server(16, 64 * MB, servers=16, network=network, segments=1)
    assert servers.seconds == pytest.approx(direct.seconds * 16 / 15, rel=0.01)  # a worker keeps its own share


LATE = {"compute": 1.0, "stragglers": (0.1, 4.0)}  # 1.4 on average


def test_synchronous_and_asynchronous_steps_take_the_times_of_their_formulas():
    for workers in (1, 4, 16):
        synchronous = sim.bounded_staleness(workers, staleness=0, **LATE)
        longest = 1 + 4 * (1 - 0.9**workers)
        assert synchronous.seconds == pytest.approx(longest, rel=0.02)
        assert synchronous.waiting == pytest.approx(1 - 1.4 / longest, abs=0.02)
        assert synchronous.reads == (1.0,)
        independent = sim.bounded_staleness(workers, staleness=None, **LATE)
        assert independent.seconds == pytest.approx(1.4, rel=0.02)
        assert independent.waiting == 0


def test_bounds_hide_stragglers():
    """With four workers, these are the most that a bound can gain over synchronous steps."""
    found = {s: sim.bounded_staleness(4, staleness=s, pushes=400_000, **LATE) for s in (0, 1, 4, 8, 64)}
    gain = {s: found[0].seconds / each.seconds for s, each in found.items()}
    assert gain[4] == pytest.approx(1.485, abs=0.015)
    assert gain[8] == pytest.approx(1.572, abs=0.015)
    assert 1 < gain[1] < gain[4] < gain[8] < gain[64] < 2.3756 / 1.4
    for staleness, each in found.items():
        assert len(each.reads) == staleness + 1 and sum(each.reads) == pytest.approx(1)
        assert each.reads[-1] > 0
    again = sim.bounded_staleness(4, staleness=4, pushes=400_000, **LATE)
    assert again == found[4] != sim.bounded_staleness(4, staleness=4, pushes=400_000, seed=1, **LATE)


def test_a_worker_that_is_always_slow_sets_the_pace_at_any_bound():
    compute = [1.0, 1.0, 1.0, 2.0]
    for staleness in (0, 4, 64):
        assert sim.bounded_staleness(4, staleness=staleness, compute=compute).seconds == pytest.approx(2, rel=0.01)
    alone = sim.bounded_staleness(4, staleness=None, compute=compute, pushes=7000)
    assert alone.seconds == pytest.approx(4 / 3.5, rel=0.01)
    assert len(alone.reads) == pytest.approx(7000 / 3.5 / 2, rel=0.01)  # the others are ahead by half of their steps


def test_workers_queue_for_the_servers():
    busy = {"compute": 1.0, "serving": 0.5, "exchange": 0.25}
    assert sim.bounded_staleness(8, staleness=0, **busy).seconds == pytest.approx(1 + 0.25 + 8 * 0.5)
    assert sim.bounded_staleness(8, staleness=None, **busy).seconds == pytest.approx(8 * 0.5, rel=1e-3)
    assert sim.bounded_staleness(2, staleness=None, **busy).seconds == pytest.approx(1 + 0.25 + 0.5, rel=1e-3)
    alone = sim.bounded_staleness(3, staleness=4, compute=1.0)
    assert alone == sim.StalenessEstimate(seconds=1.0, waiting=0.0, reads=(1.0,))


def serve(**options):
    return sim.parameter_server(4, 1, **options)


def stale(**options):
    return sim.bounded_staleness(4, **{"staleness": 1, "compute": 1.0, **options})


def step(**options):
    return sim.training_step(4, [1], backward=1, **options)


@pytest.mark.parametrize(
    ("match", "call"),
    [
        ("algorithm: expected one of", lambda: sim.simulate("rign", 4, 1)),
        ("expected one that is a plan, got 'native'", lambda: sim.simulate("native", 4, 1)),
        (r"algorithm \(for the codec int8\)", lambda: sim.simulate("recursive_doubling", 4, 1, codec="int8")),
        ("codec: expected one of", lambda: sim.simulate("ring", 4, 1, codec="int3")),
        ("world_size: expected", lambda: sim.simulate("ring", 0, 1)),
        ("nbytes: expected", lambda: sim.simulate("ring", 4, -1)),
        ("late: expected one for each of 4 ranks, got 1", lambda: sim.simulate("ring", 4, 1, late=[0.0])),
        ("bandwidth: expected a number above 0, got 0", lambda: sim.Network(bandwidth=0)),
        ("latency: expected a number of at least 0, got -1", lambda: sim.Network(latency=-1)),
        ("ranks_per_host: expected at least 1, got 0", lambda: sim.Network(ranks_per_host=0)),
        ("speeds: expected a mapping of Speed by codec, got 3", lambda: sim.Network(speeds=3)),
        ("speeds: expected a mapping of Speed by codec, got 'int8': 3", lambda: sim.Network(speeds={"int8": 3})),
        ("late: expected a sequence of seconds, got 3", lambda: sim.simulate("ring", 4, 1, late=3)),
        ("levels: expected 1 or 2, got 3", lambda: sim.simulate("ring", 4, 1, levels=3)),
        ("buckets: expected a sequence of bytes, got 3", lambda: sim.training_step(4, 3, backward=1)),
        (r"stragglers: expected a probability and seconds, got \(2, 1\)", lambda: step(stragglers=(2, 1))),
        ("stragglers: expected a probability and seconds, got 2", lambda: step(stragglers=2)),
        ("buckets: expected at least one", lambda: sim.training_step(4, [], backward=1)),
        ("backward: expected at least 0 s, got -1", lambda: sim.training_step(4, [1], backward=-1)),
        ("codec: expected one of", lambda: sim.break_even("int3", 4, 1)),
        ("world_size: expected at least 1, got 0", lambda: sim.parameter_server(0, 1, servers=1)),
        ("servers: expected 1 to 65536, got 0", lambda: serve(servers=0)),
        ("servers: expected an int, got 'all'", lambda: serve(servers="all")),
        ("codec: expected one of", lambda: serve(servers=1, codec="int3")),
        ("levels: expected 1 where there are not several hosts", lambda: serve(servers=1, levels=2)),
        ("world_size, servers, segments: expected at most", lambda: serve(servers=2**16, segments=2**15)),
        ("staleness: expected 0 to", lambda: stale(staleness=-1)),
        ("compute: expected seconds, or one number for each of 4 workers", lambda: stale(compute=[1.0])),
        ("compute: expected more than 0 s, got 0", lambda: stale(compute=0)),
        ("compute: expected at least 0 s, got 'x'", lambda: stale(compute=[1, 1, 1, "x"])),
        (r"stragglers: expected a probability and seconds, got \(2, 1\)", lambda: stale(stragglers=(2, 1))),
        ("serving: expected at least 0 s, got -1", lambda: stale(serving=-1)),
        ("exchange: expected at least 0 s, got inf", lambda: stale(exchange=math.inf)),
        ("pushes: expected at least 1, got 0", lambda: stale(pushes=0)),
        ("seed: expected an int, got 0.5", lambda: stale(seed=0.5)),
    ],
)
def test_errors_name_the_wrong_argument(match, call):
    with pytest.raises((TypeError, ValueError), match=match):
        call()
