"""The selftest: its report for a correct installation and for a wrong one, and its run by torchrun."""

import argparse
import contextlib
import io
import json
import os
import runpy
import sys
from functools import partial

import pytest
import torch
from ranks import as_torchrun

from dltrain_ext import codecs, comm
from dltrain_ext.selftest import checks, faults, links, ranks, session, together
from dltrain_ext.selftest.__main__ import main
from dltrain_ext.selftest.report import Check, Found, Skip

NAMES = [check.name for check in (*checks.CHECKS, *together.CHECKS, *links.CHECKS, *together.LAST)]


def outcomes(path, device="cpu"):
    kept = json.loads(path.read_text())
    assert kept["complete"] and kept["facts"]["torch"] == torch.__version__
    return {one["check"]: one for one in kept["outcomes"] if one["device"] == device}


def check_all(kept, named, skipped):
    assert list(kept) == named
    assert {name: one["outcome"] for name, one in kept.items() if one["outcome"] != "passed"} == dict.fromkeys(
        skipped, "skipped"
    )


def test_two_ranks_and_one_that_is_killed(tmp_path, capfd):
    assert main(["--quick", "--faults", "--device", "cpu", "--json", str(tmp_path / "out.json")]) == 0
    kept = outcomes(tmp_path / "out.json")
    check_all(kept, [*NAMES[:-1], faults.CHECKS[0].name, NAMES[-1]], {"captured graphs", "captured all-reduces"})
    assert "the culprit is rank 1: it has left" in kept["a killed rank"]["figures"]["words"]
    gained = kept["links and gains"]["figures"]
    assert gained["network"]["bandwidth"] > 0 and gained["predicted"].keys() == {"raw", *links.GAINS}
    said = capfd.readouterr().out
    assert all(name in said for name in NAMES) and f"{len(kept) - 2} passed, 0 failed" in said


@pytest.mark.gpu
def test_on_a_device(tmp_path):
    assert main(["--ranks", "1", "--quick", "--device", "cuda", "--json", str(tmp_path / "out.json")]) == 0
    check_all(outcomes(tmp_path / "out.json", "cuda"), NAMES, {"links and gains"})


def run_in_short(folder, path):
    """Run it as a rank of torchrun, with less time to measure the group."""
    os.chdir(folder)
    tune = comm.Communicator.tune
    comm.Communicator.tune = lambda self, seconds, **options: tune(self, seconds=0.1, **options)
    sys.argv = ["selftest", "--quick", "--device", "cpu", "--json", str(path)]
    with contextlib.redirect_stdout(io.StringIO()) as said, pytest.raises(SystemExit) as end:
        runpy.run_module("dltrain_ext.selftest", run_name="__main__")
    return end.value.code, said.getvalue()


def test_by_torchrun(tmp_path):
    (status, said), second = as_torchrun(2, run_in_short, tmp_path, tmp_path / "out.json", fresh=True)
    assert status == 0, said
    assert second == (0, "")
    check_all(outcomes(tmp_path / "out.json"), NAMES, {"captured graphs", "captured all-reduces"})


def wrong_bits(site):
    """Make a rank that decodes one number wrongly."""
    if site.rank == 1:
        right = codecs.decode
        codecs.decode = lambda encoded: right(encoded) + 1
    return checks.message_bytes(site)


def not_here(site):
    raise Skip("nothing to look at")


def run_broken(path):
    checks.CHECKS[:] = [
        Check("wrong bits", wrong_bits),
        Check("not here", not_here),
        Check("the others go on", lambda site: Found("in step")),
    ]
    together.CHECKS[:], together.LAST[:], links.CHECKS[:] = [], [], []
    options = argparse.Namespace(device="cpu", json=path, quick=True, faults=False, only=None)
    with path.with_name("said").open("a") as said, contextlib.redirect_stdout(said):
        return session.run(options)


@pytest.fixture
def forked(monkeypatch):
    """Have the selftest fork its ranks from a process that has already imported torch."""
    monkeypatch.setattr(ranks.mp, "spawn", partial(ranks.mp.start_processes, start_method="forkserver"))


def test_a_wrong_rank_fails_and_is_named(tmp_path, forked):
    assert ranks.launch(2, run_broken, tmp_path / "out.json") == 1
    kept = outcomes(tmp_path / "out.json")
    assert [one["outcome"] for one in kept.values()] == ["FAILED", "skipped", "passed"]
    assert kept["wrong bits"]["text"].startswith("rank 1: AssertionError: raw, nearest, 1 elements: ")
    assert "Traceback" in kept["wrong bits"]["traceback"]
    assert kept["not here"]["text"] == "nothing to look at"
    said = (tmp_path / "said").read_text()
    assert "1 passed, 1 failed, 1 skipped" in said


def crash(path):
    checks.CHECKS[:] = [Check("before", lambda site: Found("fine")), Check("crashes", lambda site: os._exit(9))]
    together.CHECKS[:] = []
    return session.run(argparse.Namespace(device="cpu", json=path, quick=True, faults=False, only=None))


def test_the_results_before_a_crash_are_reported(tmp_path, forked):
    with pytest.raises(torch.multiprocessing.ProcessExitedException):
        ranks.launch(1, crash, tmp_path / "out.json")
    kept = json.loads((tmp_path / "out.json").read_text())
    assert not kept["complete"] and [one["check"] for one in kept["outcomes"]] == ["before"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "0"], "--ranks: expected at least 1, got 0"),
        (["--json", "/nowhere/out.json"], "--json: expected a file in a folder that exists, got /nowhere/out.json"),
        (["--json", ""], "--json: expected a file in a folder that exists, got ."),
        (["--only", "what is not"], "argument --only: invalid choice: 'what is not' (choose from "),
        pytest.param(
            ["--device", "cuda"],
            "--device: expected cpu, since ",
            marks=pytest.mark.skipif(session.without_cuda() is None, reason="there is CUDA"),
        ),
    ],
)
def test_errors_name_the_wrong_option(arguments, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert said in capsys.readouterr().err
