"""The large-batch example: a short run, its learning rates, and its summary."""

import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import commands
import pytest
import torch

pytestmark = pytest.mark.needs("matplotlib", "rich", "sklearn")

SCRIPT = Path(__file__).parents[2] / "examples" / "large_batch.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    threads = torch.get_num_threads()
    yield importlib.import_module("large_batch")
    torch.set_num_threads(threads)


def test_a_short_run(tmp_path: Path) -> None:
    picture, json_file = tmp_path / "new" / "errors.png", tmp_path / "runs.json"
    short = "--epochs 2 --warmup 1 --seeds 2 --batches 512 256"
    done = commands.example("large_batch.py", *short.split(), "--out", picture, "--json", json_file, COLUMNS="100")
    assert done.returncode == 0, done.stderr
    assert not done.stderr

    lines = done.stdout.splitlines()
    assert any("SGD" in line and "LARS (paper)" in line and "AdamW" in line for line in lines)
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert [row[:2] for row in rows] == [["256", "12"], ["512", "6"]]
    assert sum(line.startswith("LARS against ") for line in lines) == 2
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

    runs = json.loads(json_file.read_text())["runs"]
    got = {(run["optimizer"], run["batch"], run["seed"]): run for run in runs}
    assert len(got) == len(runs)
    assert set(got) == {
        (name, batch, seed) for name in ("sgd", "lars", "adamw") for batch in (256, 512) for seed in (0, 1)
    }
    assert all(0 <= run["accuracy"] <= 1 for run in runs)
    assert len({run["accuracy"] for run in runs}) > 1
    for name in ("sgd", "lars", "adamw"):
        assert got[name, 512, 0]["lr"] == 2 * got[name, 256, 0]["lr"]
    for row in rows:
        for name, cell in zip(("sgd", "lars", "adamw"), row[2:], strict=True):
            mean = sum(got[name, int(row[0]), seed]["accuracy"] for seed in (0, 1)) / 2
            assert float(cell.split()[0]) == pytest.approx(100 * mean, abs=0.006)


def test_one_optimizer_one_seed(tmp_path: Path) -> None:
    short = "--optimizers lars --preset larc --validation --epochs 2 --warmup 1 --seeds 1 --batches 512"
    said = commands.example("large_batch.py", *short.split(), "--out", tmp_path / "errors.png").stdout
    assert "validation accuracy" in said and "LARS (larc)" in said and "another optimizer" in said
    assert "SGD" not in said and "±" not in said


@pytest.mark.parametrize(("rule", "factor"), [("linear", 32), ("sqrt", math.sqrt(32)), ("none", 1)])
def test_scaling_rule(example: ModuleType, rule: str, factor: float) -> None:
    assert example.scaled_lr(0.03, 512, 16, rule) == pytest.approx(0.03 * factor)
    assert example.scaled_lr(0.03, 16, 16, rule) == 0.03


@pytest.mark.parametrize(("base_lr", "lr", "start"), [(0.1, 0.8, 0.1), (0.1, 0.1, 0.1), (0.1, 0.05, 0.05)])
def test_warm_up_then_polynomial_decay(example: ModuleType, base_lr: float, lr: float, start: float) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr)
    warmup, steps = 4, 12
    schedule = example.schedule(optimizer, base_lr, warmup, steps)
    got = []
    for _ in range(steps + 1):
        got.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    climb = [start + (lr - start) * step / warmup for step in range(warmup)]
    decay = [lr * (1 - step / (steps - warmup)) ** 2 for step in range(steps - warmup + 1)]
    assert got == pytest.approx(climb + decay)


def test_summary_says_where_lars_helps(example: ModuleType) -> None:
    def around(mean: float) -> list[float]:  # with a standard deviation of 0.01
        return [mean - 0.01, mean, mean + 0.01]

    scores = {
        "sgd": {16: around(0.95), 64: around(0.95), 256: around(0.5), 512: around(0.1)},
        "lars": {batch: around(0.9) for batch in (16, 64, 256, 512)},
        "adamw": {16: around(0.905), 64: around(0.92), 256: around(0.895), 512: around(0.88)},
    }
    assert example.summary(scores) == [
        "LARS against SGD: ahead by more than a standard deviation at batch 256, 512; "
        "behind by more than a standard deviation at batch 16, 64.",
        "LARS against AdamW: ahead by more than a standard deviation at batch 512; "
        "behind by more than a standard deviation at batch 64; within a standard deviation at batch 16, 256.",
        "LARS is ahead of both SGD and AdamW at batch 512.",
    ]
    scores["adamw"][512] = around(0.9)
    assert example.summary(scores)[-1] == "LARS is ahead of both SGD and AdamW at no batch size."
    del scores["adamw"]
    assert len(example.summary(scores)) == 1
    assert "another optimizer" in example.summary({"lars": scores["lars"]})[0]
    assert "another optimizer" not in example.summary(scores)[0]
    assert "two seeds" in example.summary({"sgd": {16: [0.9]}, "lars": {16: [0.8]}})[0]


def test_standard_deviations_are_pooled(example: ModuleType) -> None:
    wide, narrow = [0.8, 0.9, 1.0], [0.84, 0.84, 0.84]  # standard deviations 0.1 and 0; pooled 0.0707
    assert example.compare(wide, narrow) == "within"
    assert example.compare(wide, [0.82] * 3) == "ahead"
    assert example.compare([0.82] * 3, wide) == "behind"
    assert example.compare(narrow, narrow) == "within"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--batches 0", ("--batches", "0 is below 1")),
        ("--batches 16 5000", ("--batches", "5000", "1437")),
        ("--seeds 0", ("--seeds", "0 is below 1")),
        ("--epochs 3 --warmup 3", ("--warmup", "3")),
        ("--lars-lr 0", ("--lars-lr", "0")),
        ("--optimizers sgd nonsense", ("--optimizers", "nonsense", "sgd", "lars", "adamw")),
        ("--preset nonsense", ("--preset", "nonsense", "paper", "tensorflow", "larc")),
        ("--rule nonsense", ("--rule", "nonsense", "linear", "sqrt", "none")),
    ],
)
def test_the_error_names_the_wrong_option(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    named: tuple[str, ...],
) -> None:
    monkeypatch.setattr(sys, "argv", ["large_batch.py", *arguments.split()])
    with pytest.raises(SystemExit) as end:
        example.main()
    printed = capsys.readouterr().err.splitlines()
    answer = printed[-1] if printed else end.value.code  # the interpreter would print a text code
    assert end.value.code
    assert all(word in answer for word in named), answer
