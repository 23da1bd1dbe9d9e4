"""The example, run as a reader runs it: its table, picture and figures, and its answers to mistakes."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from dltrain_ext import codecs, comm

pytestmark = pytest.mark.needs("matplotlib", "rich", "sklearn")

SCRIPT = Path(__file__).parents[1] / "examples" / "train.py"


def torchrun(ranks: int) -> tuple[str, ...]:
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))


TORCHRUN = torchrun(2)


def run(*arguments: object, launcher: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, SCRIPT, *arguments]
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=120, env=os.environ | environment
    )


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.endswith(b"IEND\xaeB`\x82"), "cut off"
    return struct.unpack(">II", content[16:24])


@pytest.mark.parametrize(
    ("data", "metric", "unit", "steps"),
    [
        ("digits", "test accuracy", "images", 30),
        ("python-source", "test bits per byte", "bytes", 3),
        ("photographs", "test PSNR, dB", "colour values", 30),
    ],
)
def test_both_sides_train_alike(tmp_path: Path, data: str, metric: str, unit: str, steps: int) -> None:
    picture, json_file = tmp_path / "new" / "train.png", tmp_path / "figures.json"
    done = run("--data", data, "--steps", steps, "--out", picture, "--json", json_file, launcher=TORCHRUN)
    assert done.returncode == 0, done.stderr

    for label in (metric, "training loss", "bytes sent", "computed", "median step", f"{unit} per second", "curves: "):
        assert label in done.stdout
    progress = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert 0 < len(progress) == len(set(progress)) <= 10, "few lines, from one rank"
    assert "Traceback" not in done.stderr
    width, height = png_size(picture)
    assert width >= 800 and height >= 400

    figures = json.loads(json_file.read_text())
    plain, ours = figures["plain"], figures["ours"]
    assert figures["world_size"] == 2
    assert len(plain["losses"]) == len(ours["losses"]) == steps
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-3)
    assert ours["losses"][-1] < ours["losses"][0]
    assert ours["score"] == pytest.approx(plain["score"], abs=0.02)
    assert ours["throughput"] > 0
    # Two ranks: every plan sends each gradient once, as Gloo's ring does; chunk borders may add a few bytes.
    assert ours["wire_bytes_per_step"] == pytest.approx(plain["wire_bytes_per_step"], rel=0.01)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gradients_travel_as_int8(tmp_path: Path, ranks: int) -> None:
    json_file = tmp_path / "figures.json"
    done = run(
        "--steps", 30, "--codec", "int8", "--out", tmp_path / "train.png", "--json", json_file, launcher=torchrun(ranks)
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(json_file.read_text())
    plain, ours = figures["plain"], figures["ours"]
    assert ours["wire_bytes_per_step"] < 0.27 * plain["wire_bytes_per_step"]
    assert ours["losses"] != plain["losses"]
    assert ours["score"] == pytest.approx(plain["score"], abs=0.05)


def test_one_rank_without_torchrun(tmp_path: Path) -> None:
    done = run("--steps", 2, "--out", tmp_path / "train.png")
    assert done.returncode == 0, done.stderr
    assert "torchrun --standalone --nproc-per-node 2 examples/train.py" in done.stdout


@pytest.mark.parametrize(
    ("option", "valid"),
    [("--algorithm", ("auto", *comm.ALGORITHMS)), ("--codec", codecs.CODECS), ("--optimizer", ("adamw",))],
)
def test_an_unknown_name_is_answered_with_the_valid_ones(option: str, valid: tuple[str, ...]) -> None:
    done = run(option, "nonsense")
    assert done.returncode == 2
    answer = done.stderr.splitlines()[-1]
    assert option in answer and "nonsense" in answer
    assert all(name in answer for name in valid), answer


@pytest.mark.parametrize("package", ["rich", "sklearn", "matplotlib"])
def test_a_missing_package_is_one_line(tmp_path: Path, package: str) -> None:
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('gone', name='{package}')")
    done = run(PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert package in line and "pip install '.[examples]'" in line
