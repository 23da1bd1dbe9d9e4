"""The benchmark of training techniques: its sides, their memory, and that its checks can fail."""

import json
from pathlib import Path

import commands
import pytest
from torch import Tensor

from benchmarks.cases import techniques

pytestmark = pytest.mark.needs("matplotlib", "rich")
SMALL = techniques.Job(layers=1, width=16, device="cpu")


def test_every_side_is_checked_and_timed(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = commands.benchmarks("techniques", "--quick", "--width", "32", "-n", "1", "--json", file)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["side"]: row for row in json.loads(file.read_text())["cases"]["techniques"]["rows"]}
    assert list(rows) == list(techniques.SIDES)
    assert all(row["correct"] and len(row["samples"]) == 1 for row in rows.values())
    assert all((row["ratio"] is None) == (name == techniques.PLAIN) for name, row in rows.items())
    saved = {name: row["figures"]["saved MB"] for name, row in rows.items()}
    for name in ("checkpointing, not reentrant", "checkpointing, reentrant"):
        assert 0 < saved[name] < 0.2 * saved["plain"]
    assert saved["accumulation, 4 micro-batches"] == pytest.approx(saved["plain"] / 4, rel=0.2)
    masters = rows["bf16 model with masters"]["figures"]
    assert (masters["state B/param"], masters["model B/param"]) == (12, 2)
    assert (rows["plain"]["figures"]["state B/param"], rows["plain"]["figures"]["model B/param"]) == (8, 4)


def no_update(side: techniques.Side) -> None:
    pass


def without_a_micro_batch(side: techniques.Side, loss: Tensor) -> None:
    if side.optimizer.param_groups[0]["params"][0].grad is None:
        loss.backward()


@pytest.mark.parametrize(
    ("side", "method", "wrong"),
    [
        ("checkpointing, not reentrant", "update", no_update),
        ("accumulation, 4 micro-batches", "backward", without_a_micro_batch),
        ("autocast bf16", "loss", lambda side, x: 1.2 * techniques.Side.loss(side, x)),
        ("K-FAC", "update", no_update),
    ],
)
def test_a_wrong_side_is_detected(monkeypatch: pytest.MonkeyPatch, side: str, method: str, wrong: object) -> None:
    monkeypatch.setattr(techniques.SIDES[side], method, wrong)
    others = {name: kind for name, kind in techniques.SIDES.items() if name in (techniques.PLAIN, side)}
    monkeypatch.setattr(techniques, "SIDES", others)
    rows, _ = techniques.verify(SMALL, lambda name, done: None)
    assert rows[techniques.PLAIN].correct
    assert not rows[side].correct and rows[side].check == "1"


def test_a_wrong_side_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(techniques.Checkpointed, "update", no_update)
    monkeypatch.setattr(techniques, "SIDES", dict(list(techniques.SIDES.items())[:2]))
    file = tmp_path / "figures.json"
    done = commands.benchmarks("techniques", "--quick", "--width", "16", "-n", "1", "--json", file)
    assert done.returncode != 0
    plain, wrong = json.loads(file.read_text())["cases"]["techniques"]["rows"]
    assert plain["correct"] and plain["samples"]
    assert not wrong["correct"] and not wrong["samples"] and wrong["ratio"] is None


@pytest.mark.parametrize("bad", [["--layers", "0"], ["--width", "3"]])
def test_a_bad_option_is_refused(bad: list[str]) -> None:
    done = commands.benchmarks("techniques", *bad)
    assert done.returncode != 0
    assert bad[1] in done.stdout + done.stderr
