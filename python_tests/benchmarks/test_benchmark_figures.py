"""The figures of the documents: every saved file has a command, which is valid, and a failure replaces nothing."""

import argparse
import json

import commands
import pytest

from benchmarks import figures, report
from benchmarks.__main__ import parse
from benchmarks.harness import Failure

pytestmark = pytest.mark.needs("matplotlib", "rich")

# What examples, dltrain_ext.advise and runs on a GPU have written.
ELSEWHERE = ("convergence/", "cuda/", "advise/", "population/digits.json")


def test_every_saved_file_has_a_command():
    saved = {str(path.relative_to(figures.RESULTS)) for path in figures.RESULTS.rglob("*.json")}
    assert {name for name in saved if not name.startswith(ELSEWHERE)} == {
        f"{name}.json" for name in figures.commands([])
    }


@pytest.mark.parametrize("name, arguments", figures.commands([]).items())
def test_every_command_is_valid(name, arguments):
    given, _ = parse(arguments)
    if given.case == "hosts":
        assert given.command[1:3] == ["-m", "benchmarks"]
        given, _ = parse(given.command[3:])
    assert given.case


def test_a_figure_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "provenance", lambda: {"commit": "1234567"})
    options = argparse.Namespace(names=["simulate/simulate-p"], to=tmp_path, quick=True, commands=False)
    assert figures.run(options) == 0
    assert list(json.loads((tmp_path / "simulate" / "simulate-published.json").read_text())["cases"]) == ["simulate"]


def test_its_plots_are_drawn_where_the_documents_show_them(tmp_path):
    assert set(figures.DRAWN) <= set(figures.commands([]))
    name = "simulate/simulated-scaling"
    assert figures.measure(name, ["simulate", "--parts", "training"], tmp_path, quick=True) == 0
    written = {path.name for path in (tmp_path / "simulate").iterdir()}
    assert written == {"simulated-scaling.json", "simulated-efficiency.png"}


def test_a_failure_is_reported_and_replaces_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "provenance", lambda: {"commit": "1234567"})
    monkeypatch.setattr(figures, "FIGURES", {"": {"a/broken": "codec -n none"}})
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "broken.json").write_text("before")
    options = argparse.Namespace(names=[], to=tmp_path, quick=True, commands=False)
    assert figures.run(options) == 1
    assert (tmp_path / "a" / "broken.json").read_text() == "before"
    told = capsys.readouterr()
    assert "failed: a/broken" in told.out and "none" in told.err


def test_a_build_of_no_commit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "provenance", lambda: {"commit": "1234567-dirty"})
    options = argparse.Namespace(names=["simulate"], to=tmp_path, quick=True, commands=False)
    with pytest.raises(Failure, match="expected a build of a commit, got 1234567-dirty"):
        figures.run(options)


def test_commands_and_unknown_names():
    listed = commands.benchmarks("figures", "--commands", "ddp/ddp-4")
    assert listed.returncode == 0 and "ddp/ddp-4-hosts-1gbit: hosts --hosts 4 --rate 1gbit -- " in listed.stdout
    unknown = commands.benchmarks("figures", "nothing/")
    assert unknown.returncode == 2 and "got 'nothing/'" in unknown.stderr
