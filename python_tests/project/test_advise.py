"""The advice: its prediction of a step, its arguments, and a whole run on two ranks."""

import contextlib
import io
import itertools
import json
import os
import sys

import pytest
import torch
from ranks import as_torchrun, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import comm, sim
from dltrain_ext.advise import prediction, session, workload
from dltrain_ext.advise.__main__ import count, main, parse
from dltrain_ext.advise.workload import Workload
from dltrain_ext.comm.tuning import seconds_for

MIB = 1 << 20
MODEL = """
import torch

def make():
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    inputs = torch.randn(4, 64)
    return model, lambda: model(inputs).square().mean()

def no_loss():
    return make()[0], 3

def frozen():
    model, loss_of = make()
    return model.requires_grad_(False), loss_of
"""


def tuning_of(**seconds):
    """Make a tuning in which an all-reduce of a codec takes the given seconds for 1 MiB, and 16 times that for 16."""
    table = {
        codec: [
            comm.Choice(size * MIB, "native" if codec == "native" else "direct", 1, size * time, True)
            for size in (1, 16)
        ]
        for codec, time in seconds.items()
    }
    return comm.Tuning(2, sim.Network(), table)


def workload_of(*numels, forward=1.0, backward=4.0, torch_step=3.0, our_step=2.0):
    return Workload(numels, forward, backward, torch_step, our_step)


def test_times_between_sizes_are_interpolated():
    choices = tuning_of(raw=2.0).table["raw"]
    assert [seconds_for(choices, size * MIB) for size in (1, 4, 16)] == pytest.approx([2.0, 8.0, 32.0])
    assert seconds_for(choices, MIB // 2) == 2.0
    assert seconds_for(choices, 32 * MIB) == pytest.approx(64.0)


def test_a_step_is_forward_backward_what_is_exposed_and_the_optimizer():
    # The buckets are full after 2 s and 4 s of backward; the first is sent until 3 s, the second from 4 to 5 s.
    work = workload_of(MIB // 4, MIB // 4)
    (step,) = prediction.predict(tuning_of(int8=1.0), work)
    assert (step.sending, step.exposed) == pytest.approx((2.0, 1.0))
    assert step.seconds == pytest.approx(1.0 + 4.0 + 1.0 + 2.0)
    base = prediction.plain(tuning_of(native=3.0), work)  # from 2 to 5 and from 5 to 8 s
    assert (base.exposed, base.optimizer) == pytest.approx((4.0, 3.0))


@pytest.mark.parametrize(
    ("seconds", "codec", "words"),
    [
        ({"native": 3.0, "raw": 3.0, "int8": 1.0, "int4": 0.95}, "int8", 'codec="int8", algorithm="direct"'),
        ({"native": 9.0, "raw": 9.0, "int8": 5.0, "int4": 1.0}, "int4", 'codec="int4"'),
        ({"native": 1.0, "raw": 3.0, "int8": 1.0}, "native", "no hook"),
    ],
)
def test_the_most_accurate_of_the_fast_codecs_is_advised(seconds, codec, words):
    tuning, work = tuning_of(**seconds), workload_of(4 * MIB, backward=0.0)
    chosen = prediction.best(prediction.predict(tuning, work))
    assert chosen.codec == codec
    assert words in "\n".join(session.recommendation(prediction.plain(tuning, work), chosen))


def test_plain_ddp_is_advised_where_nothing_is_faster():
    tuning, work = tuning_of(native=1.0, raw=3.0, int8=3.0), workload_of(MIB, our_step=3.0)
    chosen = prediction.best(prediction.predict(tuning, work))
    (words,) = session.recommendation(prediction.plain(tuning, work), chosen)
    assert words.startswith("use plain DDP and torch's optimizer")


def of_ddp(rank, world_size, widths):
    """Return the bytes of the buckets that DDP has after the first pass."""
    seen = []

    def hook(state, bucket):
        seen.append(bucket.buffer().nbytes)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(widths))))
    model.register_comm_hook(None, hook)
    for _ in range(3):
        seen.clear()
        model(torch.randn(2, widths[0])).sum().backward()
    numels = [parameter.numel() for parameter in model.parameters()]
    return sorted(seen), sorted(workload_of(*numels).buckets)


@pytest.mark.parametrize("widths", [(8, 8), (1500, 2000, 2500, 1000, 400), (300, 300, 300, 300, 2600, 2700)])
def test_buckets_are_those_of_ddp(widths):
    for found, expected in run_ranks(2, of_ddp, widths):
        assert found == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("made:nothing", "no attribute 'nothing'"),
        ("made", "got 'made'"),
        ("made:no_loss", "to return a module and a function"),
        ("made:frozen", "parameters that require gradients"),
    ],
)
def test_a_model_that_cannot_be_measured_is_refused(text, words, tmp_path, monkeypatch):
    (tmp_path / "made.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "made", raising=False)
    with pytest.raises(ValueError, match=f"--model: expected .*{words}"):
        workload.of_model(*workload.load(text), torch.device("cpu"))


def test_numbers_of_parameters():
    assert [count(text) for text in ("350000", "12.6M", "1.3b")] == [350_000, 12_600_000, 1_300_000_000]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "1"], "--ranks: expected at least 2, got 1"),
        (["--parameters", "many"], "expected a number of parameters such as 350000, 12.6M or 1.3B, got 'many'"),
        (["--backward", "-1"], "expected a number of milliseconds of at least 0, got '-1'"),
        (["--seconds", "nan"], "--seconds: expected 1 to 3600, got nan"),
        (["--model", "no_such_module:f"], "--model: expected module:function of a module that can be imported"),
        (["--model", ":f"], "--model: expected module:function of a module that can be imported, got ':f'"),
        (["--json", "/no/such/folder/x"], "--json: expected a file in a folder that exists"),
    ],
)
def test_wrong_arguments_are_named(arguments, words, capsys):
    with pytest.raises(SystemExit):
        parse(arguments, None)
    assert words in capsys.readouterr().err


def run_in(folder):
    """Run it as a rank of torchrun."""
    sys.path.insert(0, str(folder))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = main(["--seconds", "1", "--model", "made:make", "--json", str(folder / "out.json")])
    return status, said.getvalue()


def test_two_ranks(tmp_path):
    (tmp_path / "made.py").write_text(MODEL)
    (status, said), second = as_torchrun(2, run_in, tmp_path, fresh=True)
    assert status == 0 and second == (0, "")
    kept = json.loads((tmp_path / "out.json").read_text())
    assert sum(kept["workload"]["numels"]) == 64 * 256 + 256 + 256 * 8 + 8
    assert all(kept["workload"][name] > 0 for name in ("forward", "backward", "torch_step", "our_step"))
    codecs = [each["codec"] for each in kept["predictions"]]
    assert sorted(codecs) == sorted(["native", "raw", *session.CODECS]) and kept["chosen"] in codecs
    for each in (kept["plain"], *kept["predictions"]):
        parts = kept["workload"]["forward"] + kept["workload"]["backward"] + each["exposed"] + each["optimizer"]
        assert each["seconds"] == pytest.approx(parts) and each["exposed"] <= 1.001 * each["sending"]
    assert "18,696 parameters" in said
    assert said.count("\nuse ") == 1


def test_ranks_are_started_here(tmp_path):
    arguments = ["--seconds", "1", "--parameters", "1000", "--json", str(tmp_path / "out.json")]
    assert not {"RANK", "WORLD_SIZE"} & os.environ.keys() and main(arguments) == 0
    assert json.loads((tmp_path / "out.json").read_text())["workload"]["numels"] == [1000]
