"""The convergence example: a short run, its report, and how it classifies results."""

import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import commands
import pytest
import torch
import torch.distributed as dist
from ranks import run_example, run_ranks

pytestmark = pytest.mark.needs("matplotlib", "rich", "sklearn")

SCRIPT = Path(__file__).parents[2] / "examples" / "convergence.py"
SHORT = "--recipes photographs large-batch --codecs int8 powersgd --seeds 2 --steps 4"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("convergence")


def rows(said: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in said.splitlines() if line.startswith("│")]


def test_a_short_run_and_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture, again, json_file = tmp_path / "new" / "all.png", tmp_path / "again.png", tmp_path / "new" / "runs.json"
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.setenv("COLUMNS", "100")
    printed = run_example("convergence.py", here, *SHORT.split(), "--out", picture, "--json", json_file)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert {*json_file.parent.iterdir()} == {json_file, picture}

    results = json.loads(json_file.read_text())
    assert results["world_size"] == 2 and results["machine"]["torch"] == torch.__version__
    assert {name: about["steps"] for name, about in results["recipes"].items()} == {"photographs": 4, "large-batch": 4}
    names = ["plain", "int8", "powersgd"]
    got = {(run["recipe"], run["contestant"], run["seed"]): run for run in results["runs"]}
    assert [*got] == [(recipe, name, seed) for recipe in results["recipes"] for name in names for seed in (0, 1)]
    for (recipe, name, seed), a in got.items():
        assert a["error"] is None and math.isfinite(a["loss"]) and math.isfinite(a["score"])
        plain = got[recipe, "plain", seed]
        assert name == "plain" or a["loss"] != plain["loss"]
        assert a["loss"] == pytest.approx(plain["loss"], rel=0.2)
        share = a["wire_bytes"] / plain["wire_bytes"]
        # PowerSGD sends 2 of the 4 steps uncompressed.
        assert {"plain": share == 1, "int8": 0.25 < share < 0.27, "powersgd": 0.5 < share < 0.65}[name]

    said = rows(printed)
    assert [row[0] for row in said] == names * 2
    style = {"photographs": 1.0, "large-batch": 100.0}
    for row, recipe in zip(said, [recipe for recipe in style for _ in names], strict=True):
        mean = style[recipe] * (got[recipe, row[0], 0]["score"] + got[recipe, row[0], 1]["score"]) / 2
        assert float(row[2].split()[0].strip("%")) == pytest.approx(mean, abs=0.006)
    assert any(line.startswith("Chance alone") for line in printed.splitlines())

    kept = commands.example("convergence.py", "--from", json_file, "--out", again, COLUMNS="100")
    assert kept.returncode == 0, kept.stderr
    first_report = printed[printed.index(kept.stdout.splitlines()[0]) :]
    assert kept.stdout.splitlines()[:-1] == first_report.splitlines()[:-1], "the last line is the picture's name"
    assert again.read_bytes() == picture.read_bytes()


def runs_of(example: ModuleType, contestant: str, scores: list[float | None], **more: Any) -> list[Any]:
    more = {"loss": 1.0, "wire_bytes": 4.0} | more
    return [example.Run("digits", contestant, seed, score, **more) for seed, score in enumerate(scores)]


@pytest.mark.parametrize(
    ("scores", "higher", "lower"),
    [
        ([0.90, 0.92, 0.94], "within", "within"),
        ([0.92, 0.94, 0.96], "within", "within"),  # a whole standard deviation
        ([0.94, 0.92, 0.91], "within", "within"),
        ([0.93, 0.95, 0.97], "better", "worse"),
        ([0.87, 0.89, 0.91], "worse", "better"),
        ([None, 0.92, 0.94], "diverged", "diverged"),
    ],
)
def test_outcomes(example: ModuleType, scores: list[float | None], higher: str, lower: str) -> None:
    report = importlib.import_module("convergence_report")
    plain = runs_of(example, "plain", [0.9, 0.92, 0.9400001])
    some = runs_of(example, "int4", scores)
    assert report.compare(some, plain, True).outcome == higher
    assert report.compare(some, plain, False).outcome == lower


def test_a_loss_that_is_not_finite_has_diverged(example: ModuleType) -> None:
    report = importlib.import_module("convergence_report")
    plain = runs_of(example, "plain", [0.9, 0.92, 0.94])
    chance = runs_of(example, "int4", [0.1, 0.1, 0.1], loss=None)
    assert report.compare(chance, plain, True).outcome == "diverged"
    assert report.compare(plain, chance, True).outcome == "unknown"
    assert "diverged: 3 of 3" in report.line(chance, ABOUT)


def test_differences_are_computed_for_each_seed(example: ModuleType) -> None:
    report = importlib.import_module("convergence_report")
    plain = runs_of(example, "plain", [0.90, 0.92, 0.94])
    found = report.compare(runs_of(example, "int4", [0.91, 0.93, 0.95]), plain, True)
    assert found.differences == pytest.approx([0.01, 0.01, 0.01])
    assert found.deviations == pytest.approx(0.5)
    same = runs_of(example, "plain", [0.9, 0.9, 0.9])
    assert report.compare(same, same, True) == report.Comparison("within", (0.0, 0.0, 0.0), None)
    assert report.compare(plain, same, True).outcome == "better"


ABOUT = {"title": "the digits", "metric": "accuracy", "style": "{:.2%}", "higher_is_better": True}


def test_summary_says_where_not_to_compress(example: ModuleType) -> None:
    report = importlib.import_module("convergence_report")
    plain = runs_of(example, "plain", [0.90, 0.92, 0.94])
    int8, sign = runs_of(example, "int8", [0.91, 0.93, 0.95]), runs_of(example, "sign", [0.80, 0.82, 0.84])
    fp16 = runs_of(example, "fp16", [None, None, 0.9])
    powersgd = [example.Run("digits", "powersgd", seed, error="no") for seed in range(3)]
    chance = "Chance alone moves a mean of 3 seeds by 0.58 standard deviations."
    assert report.summary([*plain, *int8, *sign, *fp16, *powersgd], {"digits": ABOUT}) == [
        "When not to use them, according to these runs (in brackets: the difference in standard deviations of plain):",
        "sign: worse on the digits (-5.0)",
        "fp16: diverged on the digits",
        "powersgd: does not run on the digits",
        "Within a standard deviation of plain, or better, everywhere: int8.",
        chance,
    ]
    assert report.summary([*plain, *int8], {"digits": ABOUT}) == [
        "None is worse than plain by more than its standard deviation.",
        "Within a standard deviation of plain, or better, everywhere: int8.",
        chance,
    ]
    lower = report.summary([*plain, *sign], {"digits": ABOUT | {"higher_is_better": False}})
    assert lower[0].startswith("None is worse")


def _trouble(rank: int, world_size: int) -> tuple[Any, str]:
    sys.path.insert(0, str(SCRIPT.parent))
    convergence = importlib.import_module("convergence")
    recipe = convergence.replace(convergence.RECIPES["photographs"], steps=2)
    task = convergence.TASKS[recipe.data]()

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        raise RuntimeError("this hook\ndoes not work")

    convergence.powerSGD_hook = hook
    run = convergence.train("photographs", recipe, task, "powersgd", 0)
    convergence.CODECS["int8"] = ("none", False)
    with pytest.raises(ValueError, match="none"):  # only errors of PowerSGD are recorded
        convergence.train("photographs", recipe, task, "int8", 0)
    apart = torch.nn.Linear(2, 2)
    with torch.no_grad():
        apart.weight.fill_(rank)
        apart.bias.zero_()
    with pytest.raises(AssertionError) as error:
        convergence.check_same(apart, "int8, seed 0")
    apart.weight.data.zero_()
    convergence.check_same(apart, "int8, seed 0")
    return run.error, str(error.value)


def test_errors_and_different_parameters_are_reported() -> None:
    for error, apart in run_ranks(2, _trouble, fresh=True):
        assert "this hook" in error and "\n" not in error
        assert apart.startswith("int8, seed 0: expected the same parameters")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--recipes nonsense", ("--recipes", "nonsense", "digits", "python-source", "photographs", "large-batch")),
        ("--codecs nonsense", ("--codecs", "nonsense", "fp8", "int4+feedback", "powersgd")),
        ("--seeds 1", ("--seeds", "1 is below 2")),
        ("--steps 1", ("--steps", "1 is below 2")),
        ("--from nowhere.json", ("--from", "nowhere.json")),
        ("", ("one rank", "torchrun --standalone --nproc-per-node 4")),
    ],
)
def test_the_error_names_the_wrong_option(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    named: tuple[str, ...],
) -> None:
    monkeypatch.setattr(sys, "argv", ["convergence.py", *arguments.split()])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit) as end:
        example.parse_args()
    assert end.value.code == 2
    answer = capsys.readouterr().err.splitlines()[-1]
    assert all(word in answer for word in named), answer


def test_the_docs_contain_the_saved_results() -> None:
    """With feedback, int8 and int4 have to be within a standard deviation of plain in all recipes."""
    root = SCRIPT.parents[1]
    kept = root / "benchmarks" / "results" / "convergence" / "convergence.json"
    done = commands.example("convergence.py", "--from", kept, "--markdown")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in (root / "docs" / "learning.md").read_text()
    for line in done.stdout.splitlines():
        if line.startswith(("| int8", "| int4")):
            assert "**" not in line
    runs = json.loads(kept.read_text())["runs"]
    assert len(runs) == 4 * 11 * 5 == len({(each["recipe"], each["contestant"], each["seed"]) for each in runs})
    assert all(each["error"] is None for each in runs)
