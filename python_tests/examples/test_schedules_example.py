"""The schedules example: its table, resumed runs, and its errors."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import commands
import pytest
import torch
from ranks import ROOT, run_example

pytestmark = pytest.mark.needs("rich", "sklearn")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(ROOT / "examples")
    threads = torch.get_num_threads()
    yield importlib.import_module("schedules")
    torch.set_num_threads(threads)


def rows(said: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in said.splitlines() if line.startswith("│")]


@pytest.mark.parametrize("ranks", [0, 2, 3])
def test_resumed_runs_have_the_same_rates_and_bits(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    names = ("warmup-cosine", "piecewise", "plateau") if ranks == 2 else ("cosine",)
    said = run_example("schedules.py", tmp_path, "--steps", 8, "--schedules", *names, ranks=ranks)
    found = rows(said)
    assert [row[0] for row in found] == [*names]
    assert f"8 steps, world size {ranks or 1}" in said
    for row in found:
        assert row[-2:] == ["yes", "yes"], said
        assert 0 < float(row[4].rstrip("%")) <= 100
    rates = {row[0]: row[1:4] for row in found}
    if ranks == 2:
        assert rates["piecewise"] == ["2.0e-03", "2.0e-04", "2.0e-04"]
        assert rates["warmup-cosine"] == ["2.0e-04", "1.2e-03", "9.9e-05"]
    else:
        assert rates["cosine"] == ["2.0e-03", "1.0e-03", "7.6e-05"]


def test_all_schedules_by_default(tmp_path: Path, example: ModuleType) -> None:
    said = run_example("schedules.py", tmp_path, "--steps", 4)
    assert [(row[0], *row[-2:]) for row in rows(said)] == [(name, "yes", "yes") for name in example.SCHEDULES]


@pytest.mark.parametrize("forgotten", ["scheduler", "optimizer"])
def test_a_run_that_does_not_load_everything_is_told_apart(
    forgotten: str, tmp_path: Path, example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful(example.Run):
        def load(self, file: Path) -> None:
            lost = getattr(self, forgotten)
            monkeypatch.setattr(lost, "load_state_dict", lambda state: None)
            super().load(file)

    monkeypatch.setattr(example, "Run", Forgetful)
    example.start()
    try:
        same = example.compare("cosine", 8)[-2:]
    finally:
        example.finish()
    assert same == ["NO", "NO"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--schedules nonsense", ("--schedules", "nonsense", "cosine", "warmup-inverse-sqrt", "plateau")),
        ("--steps 1", ("--steps", "1", "2 or more")),
    ],
)
def test_the_error_names_the_wrong_option(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    named: tuple[str, ...],
) -> None:
    monkeypatch.setattr(sys, "argv", ["schedules.py", *arguments.split()])
    with pytest.raises(SystemExit) as end:
        example.main()
    assert end.value.code == 2
    answer = capsys.readouterr().err.splitlines()[-1]
    assert all(word in answer for word in named), answer


def test_the_error_for_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    commands.hide(monkeypatch, "rich")
    done = commands.example("schedules.py")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "rich" in line and "pip install '.[examples]'" in line
