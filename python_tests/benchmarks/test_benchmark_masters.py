"""The case masters: what each side keeps and how far it errs, and sides whose package is missing."""

import json

import commands
import pytest

from benchmarks.cases import masters

pytestmark = pytest.mark.needs("matplotlib", "rich")


def test_the_case(tmp_path):
    file = tmp_path / "results.json"
    done = commands.benchmarks("masters", "--quick", "--numel", "20K", "-n", "1", "--json", file)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["cases"]["masters"]["rows"]
    timed = {row["side"]: row for row in rows if row["workload"] == "20,000 elements"}
    ours = [name for name, side in masters.SIDES.items() if side.ours]
    assert {*ours, "torch fused"} <= timed.keys()
    for row in timed.values():
        assert row["correct"] and len(row["samples"]) == 1
        assert 0 < row["figures"]["update error"] <= masters.SIDES[row["side"]].bound
    state = {name: row["figures"]["state B/param"] for name, row in timed.items()}
    assert state["masters"] == 12 and state['master_weights="8bit"'] == 9 and state["stochastic"] == 8
    assert state['"8bit", int8 moments'] == pytest.approx(3.06, abs=0.01)
    error = {name: row["figures"]["update error"] for name, row in timed.items()}
    assert error["masters"] < error['master_weights="8bit"'] < error["stochastic"]
    moments = {row["side"]: row["figures"] for row in rows if row["workload"] == masters.MOMENTS}
    assert moments["ours"]["error, sigma 0"] < moments["ours"]["error, sigma 1"] < moments["ours"]["error, sigma 3"] < 1


def test_a_wrong_side_is_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(masters, "SIDES", {"masters": masters.ours(0.0)})
    file = tmp_path / "results.json"
    done = commands.benchmarks("masters", "--quick", "--numel", "5K", "-n", "1", "--json", file)
    assert done.returncode == 1
    row = json.loads(file.read_text())["cases"]["masters"]["rows"][0]
    assert not row["correct"] and not row["samples"] and row["check"] == "1"


@pytest.mark.parametrize("bad", [["--numel", "0"], ["--numel", "2G"], ["-n", "0"]])
def test_bad_options(bad):
    done = commands.benchmarks("masters", *bad)
    assert done.returncode == 2 and bad[0] in done.stderr
