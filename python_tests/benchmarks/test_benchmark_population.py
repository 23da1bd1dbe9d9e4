"""The benchmark of copying a member: its sides, and that a wrong copy is detected."""

import json
from pathlib import Path

import commands
import pytest
from ranks import run_ranks

from benchmarks.cases import population as case
from dltrain_ext import population

pytestmark = pytest.mark.needs("matplotlib", "rich")


def test_every_side_is_verified_and_timed(tmp_path: Path) -> None:
    done = commands.benchmarks("population", "--quick", "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["cases"]["population"]["rows"]
    assert [row["side"] for row in rows] == [case.EXPLOIT, case.FILE, case.SEND]
    assert all(row["correct"] and len(row["samples"]) == 2 and row["figures"]["MB"] > 0 for row in rows)
    assert [row["against"] for row in rows] == ["", case.EXPLOIT, case.EXPLOIT]


def test_there_are_two_members() -> None:
    done = commands.benchmarks("population", "--quick", "--ranks", 3)
    assert done.returncode != 0 and "ranks: expected 2, one member each, got 3" in done.stdout + done.stderr


def spoil(rank: int, ranks: int) -> list[tuple[str, int, int]]:
    def wrong(model: case.nn.Module, *_: object) -> None:
        next(model.parameters()).data[3] += 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(population, "exploit", wrong)
        found = list(case.work(rank, ranks, lambda *_: None, case.Job(2, quick=True)))
    return [(result.side, result.wrong, len(result.samples)) for result in found]


def test_a_wrong_copy_is_detected_and_not_timed() -> None:
    for (exploit, wrong, samples), file, send in run_ranks(2, spoil):
        assert exploit == case.EXPLOIT and wrong > 1000 and samples == 0
        assert file == (case.FILE, 0, 2) and send == (case.SEND, 0, 2)
