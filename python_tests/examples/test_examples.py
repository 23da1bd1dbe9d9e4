"""The example train.py: its table, picture and figures, and its errors for wrong options."""

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands
import pytest
from ranks import ROOT, run_example

from dltrain_ext import codecs, comm

pytestmark = pytest.mark.needs("matplotlib", "rich", "sklearn")


def train(tmp_path: Path, *arguments: object, ranks: int = 2) -> tuple[str, Path, dict[str, Any]]:
    """Run the example; return its output, its picture and its figures."""
    picture, json_file, here = tmp_path / "new" / "train.png", tmp_path / "figures.json", tmp_path / "here"
    here.mkdir()
    files = ("--out", picture, "--json", json_file)
    said = run_example("train.py", here, *arguments, *files, ranks=ranks)
    return said, picture, json.loads(json_file.read_text())


def torchrun(tmp_path: Path, *arguments: object) -> tuple[str, Path, dict[str, Any]]:
    """Do the same with torchrun."""
    picture, json_file = tmp_path / "new" / "train.png", tmp_path / "figures.json"
    files = ("--out", picture, "--json", json_file)
    done = commands.torchrun(2, ROOT / "examples" / "train.py", *arguments, *files)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, picture, json.loads(json_file.read_text())


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.endswith(b"IEND\xaeB`\x82"), "cut off"
    return struct.unpack(">II", content[16:24])


@pytest.mark.parametrize(
    ("data", "steps", "start"), [("digits", 30, torchrun), ("python-source", 3, train), ("photographs", 30, train)]
)
def test_both_sides_train_alike(tmp_path: Path, data: str, steps: int, start: Callable) -> None:
    said, picture, figures = start(tmp_path, "--data", data, "--steps", steps)
    progress = [line for line in said.splitlines() if line.startswith("step ")]
    assert 0 < len(progress) == len(set(progress)) <= 10, "few lines, from one rank"
    width, height = png_size(picture)
    assert width >= 800 and height >= 400

    plain, ours = figures["plain"], figures["ours"]
    for side in (plain, ours):
        shown = (f"{side['final_loss']:.5f}", f"{side['wire_bytes_per_step']:,.0f}", f"{side['step_ms']:.2f}")
        assert all(number in said for number in shown), said
    assert figures["world_size"] == 2
    assert len(plain["losses"]) == len(ours["losses"]) == steps
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-3)
    assert ours["losses"][-1] < ours["losses"][0]
    assert ours["score"] == pytest.approx(plain["score"], abs=0.02)
    assert ours["throughput"] > 0
    # With two ranks every plan sends each gradient once, as Gloo's ring; the division in chunks may add a few bytes.
    assert ours["wire_bytes_per_step"] == pytest.approx(plain["wire_bytes_per_step"], rel=0.01)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gradients_are_sent_as_int8(tmp_path: Path, ranks: int) -> None:
    _, _, figures = train(tmp_path, "--steps", 30, "--codec", "int8", ranks=ranks)
    plain, ours = figures["plain"], figures["ours"]
    assert ours["wire_bytes_per_step"] < 0.27 * plain["wire_bytes_per_step"]
    assert ours["losses"] != plain["losses"]
    assert ours["score"] == pytest.approx(plain["score"], abs=0.05)


def test_one_rank_without_torchrun(tmp_path: Path) -> None:
    done = commands.example("train.py", "--steps", 2, "--out", tmp_path / "train.png")
    assert done.returncode == 0, done.stderr
    assert "torchrun --standalone --nproc-per-node 2 examples/train.py" in done.stdout
    png_size(tmp_path / "train.png")


@pytest.mark.parametrize(
    ("option", "valid"),
    [("--algorithm", ("auto", *comm.ALGORITHMS)), ("--codec", codecs.CODECS), ("--optimizer", ("adamw",))],
)
def test_the_error_for_an_unknown_name_lists_the_valid_ones(option: str, valid: tuple[str, ...]) -> None:
    done = commands.example("train.py", option, "nonsense")
    assert done.returncode == 2
    answer = done.stderr.splitlines()[-1]
    assert option in answer and "nonsense" in answer
    assert all(name in answer for name in valid), answer


@pytest.mark.parametrize("package", ["rich", "sklearn", "matplotlib"])
def test_the_error_for_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    commands.hide(monkeypatch, package)
    monkeypatch.delitem(sys.modules, "tasks", raising=False)
    done = commands.example("train.py")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert package in line and "pip install '.[examples]'" in line
