"""Comparing a run of the benchmarks with an older one: outcomes, rows that one run lacks, files of other formats."""

import io
import json
from pathlib import Path
from typing import Any

import commands
import pytest
from ranks import ROOT
from rich.console import Console

from benchmarks import compare, saved_results
from benchmarks.harness import Failure, Row, Spread, Table

pytestmark = pytest.mark.needs("matplotlib", "rich")

SMALL = ["reduce_scatter", "--ranks", "2", "-b", "64K", "-e", "64K", "-n", "3", "-w", "0", "--codecs", "raw"]
ROW = '{"workload": "", "side": "", "samples": ["x"]}'
ORIGIN = {"CPU": "this one", "torch": "2.13.0", "cores": "2"}


def table_of(**sides: list[float]) -> Table:
    return Table("title", [Row("w", side, True, True, "0", samples) for side, samples in sides.items()])


def run_of(tables: dict[str, Table], origin: dict[str, str] = ORIGIN, interrupted: bool = False) -> saved_results.Run:
    return saved_results.Run(origin, tables, interrupted)


def reread(tmp_path: Path, run: saved_results.Run) -> saved_results.Run:
    saved_results.write(tmp_path / "old.json", run)
    return saved_results.load(tmp_path / "old.json", "--compare")


def shown(old: saved_results.Run, **tables: Table) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    compare.show(console, Path("old.json"), old, run_of(tables))
    return console.export_text()


@pytest.mark.parametrize(
    ("new", "outcome"),
    [
        ((1, 2, 3), "within the spread"),
        ((3, 4, 5), "within the spread"),
        ((4, 5, 6), "slower"),
        ((0, 0.5, 0.9), "faster"),
    ],
)
def test_the_quartiles_determine_the_outcome(new: tuple[float, float, float], outcome: str) -> None:
    assert compare.classify(Spread(1, 2, 3), Spread(*new)) == outcome


def test_rows_are_compared(tmp_path: Path) -> None:
    before = table_of(same=[1.0, 1.0], slower=[1.0, 1.0], gone=[1.0], wrong=[1.0])
    old = reread(tmp_path, run_of({"case": before}))
    table = table_of(same=[1.0, 1.0], slower=[3.0, 3.0], added=[2.0], wrong=[])
    found = {line.side: (line.outcome, line.ratio) for line in compare.compare(before, table)}
    assert found == {
        "same": ("within the spread", 1.0),
        "slower": ("slower", 3.0),
        "added": ("timed only in the new run", None),
        "wrong": ("timed only in the old run", None),
        "gone": ("only in the old run", None),
    }
    text = shown(old, case=table, other=table)
    (line,) = (line.split() for line in text.splitlines() if "slower" in line and "3.00x" in line)
    assert line[-2:] == ["3.00x", "slower"]
    assert "other: not in old.json" in text and "ANOTHER" not in text


def test_a_different_machine_or_run_is_reported(tmp_path: Path) -> None:
    another = ORIGIN | {"CPU": "another", "torch": "2.12.0"}
    old = reread(tmp_path, run_of({"case": table_of(a=[1.0])}, another, interrupted=True))
    table = table_of(a=[1.0])
    table.title = "with more ranks"
    text = shown(old, case=table)
    assert "ANOTHER CPU: another, now this one" in text and "ANOTHER torch: 2.12.0, now 2.13.0" in text
    assert "the old run was interrupted" in text
    assert "case: the old run measured something else: title; now with more ranks" in text
    assert "within the spread" in text


@pytest.mark.parametrize(
    "content",
    [
        "no JSON",
        "[1, 2]",
        "{}",
        '{"provenance": {}, "cases": {"allreduce": {"rows": [{"side": 3}], "title": ""}}}',
        '{"provenance": [], "cases": {}}',
        '{"provenance": {}, "cases": {"allreduce": {"title": "", "rows": [ROW]}}}'.replace("ROW", ROW),
    ],
)
def test_a_file_of_another_format_is_an_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(content)
    with pytest.raises(Failure, match="old.json: expected what --json writes"):
        saved_results.load(tmp_path / "old.json", "--compare")


def test_a_missing_file_is_an_error_before_the_run(tmp_path: Path) -> None:
    done = commands.benchmarks(*SMALL, "--compare", tmp_path / "none.json")
    assert done.returncode == 2 and "--compare" in done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").rglob("*.json")), ids=lambda path: path.stem)
def test_saved_results_can_be_compared_with(path: Path) -> None:
    if "provenance" not in json.loads(path.read_text()):
        pytest.skip("not written by a benchmark")
    saved_results.load(path, "--compare")


def test_two_runs_with_the_same_options_are_comparable(tmp_path: Path) -> None:
    files = [tmp_path / "old.json", tmp_path / "new.json"]
    assert commands.benchmarks(*SMALL, "--json", files[0]).returncode == 0
    done = commands.benchmarks(*SMALL, "--json", files[1], "--compare", files[0])
    assert done.returncode == 0
    output = done.stdout
    assert "only in" not in output.partition("Compared with")[2] and "ANOTHER" not in output

    def rows(path: Path) -> list[tuple[Any, ...]]:
        run = json.loads(path.read_text())
        assert run["interrupted"] is False
        return [(row["workload"], row["side"], len(row["samples"])) for row in run["cases"]["reduce_scatter"]["rows"]]

    assert rows(files[0]) == rows(files[1])
    (table,) = [line for line in output.splitlines() if line.split()[:1] == ["reduce_scatter"] and "KiB" in line][-1:]
    assert any(outcome in table for outcome in (compare.WITHIN, compare.FASTER, compare.SLOWER))
