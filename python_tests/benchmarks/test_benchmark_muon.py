"""The case muon: all sides are checked and timed, and a wrong one is not timed."""

import json
from types import MappingProxyType

import commands
import pytest
import torch

from benchmarks.cases import muon
from dltrain_ext import optim

pytestmark = pytest.mark.needs("matplotlib", "rich")


def test_the_case(tmp_path):
    file = tmp_path / "results.json"
    done = commands.benchmarks("muon", "--quick", "--width", "16", "-n", "1", "--json", file)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["cases"]["muon"]["rows"]
    sides = {(row["workload"], row["side"]): row for row in rows}
    assert [side for workload, side in sides if workload == muon.ALONE] == list(muon.ALONE_SIDES)
    assert [side for workload, side in sides if workload == "2 ranks"] == list(muon.SHARED_SIDES)
    assert all(row["correct"] and len(row["samples"]) == 1 for row in rows)
    assert {side: row["against"] for (workload, side), row in sides.items() if row["against"]} == muon.PEERS


def test_a_wrong_side_is_not_timed():
    sides = MappingProxyType(
        {muon.TORCH: torch.optim.Muon, "ours": lambda params: optim.Muon(params, adjust_lr_fn="match_rms_adamw")}
    )
    theirs, ours = muon.measure(sides, muon.Job(blocks=1, width=8, rounds=1), "cpu", lambda done: None)
    assert theirs.correct and len(theirs.samples) == 1
    assert not ours.correct and not ours.samples


def test_shapes_are_those_of_gpt2():
    numel = sum(rows * columns for rows, columns in muon.shapes(muon.Job(12, 768, 1)))
    assert numel == 12 * 12 * 768**2


@pytest.mark.parametrize("bad", [["--blocks", "0"], ["--width", "4"], ["-n", "0"]])
def test_bad_options(bad):
    done = commands.benchmarks("muon", *bad)
    assert done.returncode == 2 and bad[0] in done.stderr
