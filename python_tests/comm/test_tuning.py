"""Tuning: measuring a group, and the selection of plan and codec from the result."""

import itertools
import json
import warnings
from dataclasses import replace

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import codecs, comm, ddp, sim
from dltrain_ext.comm import Choice, Tuning, connections, tuner

NETWORK = sim.Network(speeds={"raw": sim.Speed(float("inf"), 4e9)})


def table(**seconds):
    """Make a tuning of two ranks in which a codec takes the given seconds at 1 KiB, and 1,000 times that at 1 MiB."""
    return Tuning(
        2,
        NETWORK,
        {
            codec: [
                Choice(1 << 10, "native" if codec == "native" else "direct", 1, time, True),
                Choice(1 << 20, "native" if codec == "native" else "ring", 4, 1000 * time, False),
            ]
            for codec, time in seconds.items()
        },
    )


def test_the_fit_finds_the_values_of_the_model():
    truth = replace(NETWORK, latency=7e-5, bandwidth=2e8, overhead=3e-5)
    trials = list(tuner._calibrating())
    model = tuner.Model(truth, 4, 1)
    start = replace(NETWORK, latency=1e-4, bandwidth=1e9, overhead=1e-5, copy=1e-12)
    found = tuner.fit(start, 4, 1, {trial: model.seconds(trial) for trial in trials})
    assert found.bandwidth == pytest.approx(truth.bandwidth, rel=0.1)
    others = [trial._replace(nbytes=2 * trial.nbytes) for trial in trials]
    for trial in others:
        assert tuner.Model(found, 4, 1).seconds(trial) == pytest.approx(model.seconds(trial), rel=0.1)


def test_the_table_has_the_measured_times_and_interpolates_between_them():
    trials = {
        tuner.Trial("raw", 4**6, "ring", 1): 3.0,
        tuner.Trial("raw", 4**6, "tree", 2): 1.0,
        tuner.Trial("raw", 4**8, "direct", 4): 16.0,
        tuner.Trial("native", 4**6, "native", 1): 2.0,
    }
    made = tuner.tabulate(tuner.Model(NETWORK, 4, 1), ("raw", "int8"), trials)
    raw = {choice.nbytes: choice for choice in made["raw"]}
    assert tuple(raw) == tuner.SIZES
    assert raw[4**6] == Choice(4**6, "tree", 2, 1.0, True)
    assert (raw[4**7].seconds, raw[4**7].measured) == (pytest.approx(4.0), False)
    assert raw[4**5].seconds == 1.0
    foreseen = tuner.Model(NETWORK, 4, 1)
    expected, trial = foreseen.ranking("raw", 4**10)[0]
    last = foreseen.seconds(tuner.Trial("raw", 4**8, "direct", 4))
    assert raw[4**10] == Choice(4**10, trial.algorithm, trial.segments, expected * 16.0 / last, False)
    model = sim.simulate("direct", 4, 4**13, codec="int8", network=NETWORK, segments=1).seconds
    assert made["int8"][-1].seconds <= model and not made["int8"][-1].measured
    assert made["native"][-1].algorithm == "native"


def test_what_may_be_the_fastest_is_timed_again():
    times = {
        tuner.Trial("raw", 4**6, "ring", 1): 3.1,
        tuner.Trial("raw", 4**6, "tree", 1): 2.9,
        tuner.Trial("raw", 4**6, "direct", 1): 2.0,
        tuner.Trial("raw", 4**8, "direct", 1): 4.0,
        tuner.Trial("native", 4**6, "native", 1): 2.0,
    }
    assert [trial.algorithm for trial in tuner._close(times)] == ["tree", "direct"]


@pytest.mark.parametrize(("codec", "segments"), [("raw", 64), ("fp16", 32)])
def test_segments_have_the_size_that_suits_the_transport(codec, segments):
    model = tuner.Model(NETWORK, 4, 1, segment_bytes=256 << 10)
    assert {trial.segments for _, trial in model.ranking(codec, 16 << 20)} == {segments}
    assert {trial.segments for _, trial in model.ranking(codec, 1024)} == {1}


@pytest.mark.parametrize(
    ("seconds", "codec"),
    [
        (dict(raw=1.0, native=1.2, fp16=0.95, int8=0.92, int4=0.91), "raw"),
        (dict(raw=1.2, native=1.0, fp16=0.95, int8=0.92), "native"),
        (dict(raw=2.0, native=2.0, fp16=1.0, bf16=1.0, int8=0.95), "fp16"),
        (dict(raw=2.0, native=2.0, fp16=1.0, int8=0.5, int4=0.46), "int8"),
        (dict(raw=2.0, native=2.0, fp16=1.0, int8=0.5, int4=0.4), "int4"),
        (dict(raw=2.0, native=2.0, fp16=1.0, int8=0.5, int4=0.4, sign=0.1), "int4"),
    ],
)
def test_the_most_accurate_of_the_fast_codecs_is_selected(seconds, codec):
    assert table(**seconds).codec_for(1 << 10) == codec


def test_sizes_are_rounded_to_the_next_one():
    tuning = table(raw=1e-3)
    assert tuning.choose("raw", 0).algorithm == tuning.choose("raw", 20_000).algorithm == "direct"
    assert tuning.choose("raw", 40_000).algorithm == "ring"
    assert tuning.choose("raw", 4 << 20).seconds == pytest.approx(4.0)


def test_a_tuning_is_saved_completely(tmp_path):
    tuning = table(raw=1.0, int8=0.25, native=1.0)
    tuning.save(tmp_path / "tuning.json")
    assert Tuning.load(tmp_path / "tuning.json") == tuning
    assert [path.name for path in tmp_path.iterdir()] == ["tuning.json"]
    json.loads((tmp_path / "tuning.json").read_text(), parse_constant=pytest.fail)
    assert "direct/1 250" in str(tuning) and "ring/4 ~1e+06" in str(tuning)


def one_choice(times=1, **change):
    choice = {"nbytes": 8, "algorithm": "ring", "segments": 1, "seconds": 1.0, "measured": True} | change
    return {"table": {"raw": times * [choice]}}


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"table": {"raw": []}},
        {"table": {"int3": []}},
        {"table": []},
        {"network": {}},
        one_choice(nbytes=1.5),
        one_choice(segments=2**62),
        one_choice(seconds="1"),
        one_choice(seconds=0),
        one_choice(algorithm="rign"),
        one_choice(times=2),
    ],
)
def test_other_json_is_refused(change):
    plain = json.loads(table(raw=1.0).to_json())
    Tuning.from_json(json.dumps(plain | one_choice()))
    with pytest.raises(ValueError, match=r"tuning: expected what Tuning.to_json\(\) wrote"):
        Tuning.from_json(json.dumps(plain | change))
    with pytest.raises(ValueError, match="tuning: expected"):
        Tuning.from_json("[1")


def tune(rank, world_size):
    communicator = comm.Communicator()
    assert communicator.plan_for("raw", 1 << 20) == ("auto", None)
    tuning = communicator.tune(seconds=3, codecs=["int8", "int4"])
    assert tuning is communicator.tuning and tuning.world_size == world_size
    assert set(tuning.table) == {"raw", "int8", "int4", "native"}
    assert any(choice.measured for choice in tuning.table["raw"])
    segments = communicator.tuning.choose("raw", 16 << 20).segments
    assert segments > 16 or world_size == 1, "the transport's segments are smaller than those of a network"
    for codec, numel in itertools.product(("raw", "int8", "auto"), (0, 1, 1000, 100_000)):
        tensor = torch.full((numel,), 2.0**rank)
        communicator.all_reduce(tensor, codec=codec)
        torch.testing.assert_close(tensor, torch.full((numel,), 2.0**world_size - 1), rtol=0.2, atol=0)
    wide = torch.full((5,), rank, dtype=torch.float64)
    communicator.all_reduce(wide, codec="auto")
    assert torch.equal(wide, torch.full((5,), sum(range(world_size)), dtype=torch.float64))
    return tuning.to_json()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_have_the_same_tuning(world_size):
    first, *others = run_ranks(world_size, tune)
    assert all(other == first for other in others)


def go_by_a_tuning(rank, world_size, path):
    communicator = comm.Communicator(tuning=path)
    sent = []
    for tensor in (torch.ones(256), torch.ones(1 << 18)):
        before = communicator.stats()["wire_bytes"]
        communicator.all_reduce(tensor, codec="auto")
        sent.append((communicator.stats()["wire_bytes"] - before) / tensor.numel())
    assert communicator.plan_for("int8", 1 << 20) == ("ring", 4)
    with pytest.raises(ValueError, match="codec: expected one by its name where there is a residual, got 'auto'"):
        communicator.all_reduce(torch.ones(3), codec="auto", residual=torch.zeros(3))
    with pytest.raises(ValueError, match="tuning: expected one of 2 ranks, got one of 3"):
        comm.Communicator(tuning=replace(communicator.tuning, world_size=3))
    return sent


def test_auto_uses_a_saved_tuning(tmp_path):
    path = tmp_path / "tuning.json"
    table(raw=1.0, int8=0.25, native=1.0).save(path)
    sizes = [codecs.encode(torch.ones(n), "int8").nbytes / n for n in (128, 1 << 18)]  # direct's halves, the ring
    assert run_ranks(2, go_by_a_tuning, path) == [pytest.approx(sizes, rel=0.05)] * 2


def test_a_tuning_with_sign_only_selects_no_codec():
    with pytest.raises(ValueError, match="codec: expected one by its name where the tuning holds sign alone"):
        table(sign=1.0).codec_for(1 << 20)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=f"tuning: expected the path of a file, got the folder {tmp_path}"):
        comm.Tuning.load(tmp_path)


def obey_the_environment(rank, world_size, path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLTRAIN_TUNING", str(path))
        assert comm.Communicator().plan_for("raw", 1 << 20) == ("ring", 4)
        patch.setenv("DLTRAIN_ALGORITHM", "oneshot")
        patch.setenv("DLTRAIN_SEGMENTS", "2")
        communicator = comm.Communicator()
        assert communicator.plan_for("raw", 1 << 20) == ("oneshot", 2)
        for algorithm, sent in (("auto", 4000 * (world_size - 1)), ("direct", 4000 * 2 * (world_size - 1) // 3)):
            before = communicator.stats()["wire_bytes"]
            communicator.all_reduce(torch.ones(1000), algorithm=algorithm)
            assert communicator.stats()["wire_bytes"] - before == pytest.approx(sent, rel=0.1)
        for name, value, match in (
            ("ALGORITHM", "rign", "DLTRAIN_ALGORITHM: algorithm: expected one of"),
            ("ALGORITHM", "auto", "DLTRAIN_ALGORITHM: expected a plan's name, got 'auto'"),
            ("SEGMENTS", "0", "DLTRAIN_SEGMENTS: expected a number of 1 to 65535, got '0'"),
            ("SEGMENTS", "9" * 5000, f"DLTRAIN_SEGMENTS: expected a number of 1 to 65535, got '{'9' * 20}'"),
            ("TUNING", "/nowhere", "DLTRAIN_TUNING=/nowhere"),
        ):
            with pytest.MonkeyPatch.context() as wrong, pytest.raises(ValueError, match=match):
                wrong.setenv(f"DLTRAIN_{name}", value)
                comm.Communicator()
        patch.setenv("DLTRAIN_ALGORITHM", "native")
        with pytest.raises(ValueError, match=r"DLTRAIN_ALGORITHM: algorithm \(for the codec int8\): expected one of"):
            comm.Communicator().all_reduce(torch.ones(3), codec="int8")
        patch.setenv("DLTRAIN_SEGMENTS", str(1 + rank))
        with pytest.raises(ValueError, match="_SEGMENTS: expected the same on all ranks"):
            comm.Communicator()


def test_the_environment_takes_precedence(tmp_path):
    path = tmp_path / "tuning.json"
    replace(table(raw=1.0), world_size=3).save(path)
    run_ranks(3, obey_the_environment, path)


def train(rank, world_size):
    connections.tell_once.cache_clear()  # another test may have printed it in this process
    outcomes = []
    for tuning in (table(raw=1.0, native=1.0, int8=0.3), table(raw=1.0, native=0.9, int8=0.95)):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(100, 100))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            state = ddp.register(model, codec="auto", tuning=tuning)
            for _ in range(2):
                model(torch.full((1, 100), float(rank))).sum().backward()
        plan, steps = state.communicator.plan_for(state.codec, 25 << 20)[0], state.stats()
        texts = [str(each.message) for each in told if "codec 'auto'" in str(each.message)]
        outcomes.append((state.codec, state.algorithm, plan, steps["ratio"] > 3, len(texts)))
        expected = torch.full((100, 100), (world_size - 1) / 2 * 2)
        torch.testing.assert_close(model.module.weight.grad, expected, rtol=0.01, atol=0.01)
    return outcomes


def test_the_hook_uses_the_tuned_codec_or_reports_that_there_is_none():
    first, second = run_ranks(2, train)
    assert first == [("int8", "ring", "ring", True, 0), ("raw", "native", "ring", False, 1)]
    assert second == [*first[:1], (*first[1][:-1], 0)]  # rank 0 prints it once


def test_errors_name_the_wrong_argument():
    run_ranks(1, refuse)


def refuse(rank, world_size):
    communicator = comm.Communicator()
    with pytest.raises(ValueError, match="codec: expected one of"):
        communicator.tune(codecs=["int3"])
    with pytest.raises(ValueError, match="seconds: expected a number of at least 0, got -1"):
        communicator.tune(seconds=-1)
    with pytest.raises(FileNotFoundError):
        comm.Communicator(tuning="/nowhere")
    with pytest.raises(TypeError, match="tuning: expected a Tuning or the path of a saved one, got 5"):
        comm.Communicator(tuning=5)
