"""The sweep over link rates: the crossings of given curves, and a small sweep on emulated hosts, also interrupted."""

import json
import math
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import commands
import pytest
from ranks import ROOT
from test_benchmark_hosts import assert_gone

from benchmarks.__main__ import main
from benchmarks.break_even import at, crossings, faster_in, in_words
from benchmarks.ddp_ranks import PEERS
from benchmarks.machine import processes
from benchmarks.sweep import gbits, rates

pytestmark = [pytest.mark.xdist_group("machine"), pytest.mark.needs("matplotlib", "rich")]


@pytest.fixture
def hosts() -> None:
    commands.skip_without_hosts()


needs_hosts = pytest.mark.usefixtures("hosts")

SAVED = ROOT / "benchmarks" / "results" / "ddp" / "ddp-2-ranks.json"
PLAIN = {0.1: 1000.0, 1.0: 100.0, 10.0: 10.0}
FLAT = {0.1: 50.0, 1.0: 50.0, 10.0: 50.0}


def test_curves_cross_on_straight_lines_between_logarithms() -> None:
    ((rate, below),) = crossings(FLAT, PLAIN)
    assert rate == pytest.approx(2.0) and below  # 100 / rate is 50
    assert crossings(PLAIN, FLAT) == [(pytest.approx(2.0), False)]
    assert at(PLAIN, 2.0) == pytest.approx(50.0) and at(PLAIN, 1.0) == 100.0
    assert faster_in(FLAT, PLAIN) == [(0.1, pytest.approx(2.0))]
    assert faster_in(PLAIN, FLAT) == [(pytest.approx(2.0), 10.0)]


def test_curves_may_cross_twice_or_at_a_measured_point() -> None:
    wave = {0.1: 900.0, 1.0: 200.0, 10.0: 9.0}
    (first, below), (second, above) = crossings(wave, PLAIN)
    assert below and not above and 0.1 < first < 1.0 < second < 10.0
    assert faster_in(wave, PLAIN) == [(0.1, first), (second, 10.0)]
    assert crossings({0.1: 900.0, 1.0: 100.0, 10.0: 11.0}, PLAIN) == [(pytest.approx(1.0), True)]
    assert crossings(PLAIN, PLAIN) == [] and faster_in(PLAIN, PLAIN) == []


def test_only_points_that_both_curves_have_are_compared() -> None:
    assert crossings({0.1: 1.0, 5.0: 1e9}, PLAIN) == []
    assert faster_in({0.1: 1.0, 5.0: 1e9}, PLAIN) == [(0.1, 0.1)]
    assert faster_in({5.0: 1.0}, PLAIN) == []


@pytest.mark.parametrize(
    ("ours", "free", "words"),
    [
        (FLAT, (None, None), "up to 2"),
        ({rate: 1.0 for rate in PLAIN}, (1.0, 2.0), "faster everywhere measured"),
        ({rate: 2e3 for rate in PLAIN}, (None, None), "slower everywhere measured"),
        ({rate: 1.0 for rate in PLAIN}, (2.0, 1.0), "up to > 10"),
        ({rate: 2e3 for rate in PLAIN}, (1.0, 2.0), "from > 10"),
        ({0.1: 900.0, 1.0: 200.0, 10.0: 9.0}, (2.0, 1.0), "up to 0.136, from 7.38, up to > 10"),
        ({}, (1.0, 2.0), "faster everywhere measured"),
        ({}, (None, None), ""),
    ],
)
def test_crossings_in_words(ours: dict[float, float], free: tuple[float | None, float | None], words: str) -> None:
    assert in_words(ours, PLAIN, *free) == words


def test_rates_are_parsed() -> None:
    assert rates("100mbit, none,100mbit,2.5gbit") == ["100mbit", "none", "2.5gbit"]
    assert [gbits(rate) for rate in ("100mbit", "2.5gbit", "none", "1tbit", "8kbit")] == [0.1, 2.5, None, 1e3, 8e-6]
    assert math.isclose(gbits("500bit") or 0.0, 5e-7)


def run(*arguments: object) -> int:
    """Run a sweep in this process, which has already imported torch; return the exit status."""
    try:
        return main(["sweep", *map(str, arguments)])
    except SystemExit as exit:
        return int(exit.code or 0)


QUICK = ("--quick", "--hosts", 2, "--codecs", "int8", "--layers", 1, "--width", 64, "-n", 2)


@needs_hosts
def test_every_rate_is_measured_shown_saved_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    out = tmp_path / "out.json"
    rates = ("--rates", "200mbit,none")
    assert run(*QUICK, *rates, "--json", out, "--plot", tmp_path, "--logs", tmp_path / "logs") == 0
    shown = capfd.readouterr().out
    kept = json.loads(out.read_text())
    assert "commit" in kept["provenance"]
    found = [(row["workload"], row["side"], row["x"], len(row["samples"])) for row in kept["cases"]["sweep"]["rows"]]
    sides = (*PEERS["cpu"], "int8")
    assert found == [(rate, side, x, 2) for rate, x in (("200mbit", 0.2), ("none", None)) for side in sides]
    for text in (
        "200mbit, 1 of 2: forward and backward, 2 ranks",
        "none, 2 of 2",
        "faster than plain DDP",
        "2 emulated",
    ):
        assert text in shown
    assert (tmp_path / "logs" / "200mbit" / "host1-rank1.log").exists()
    pictures = {name: (tmp_path / name).read_bytes() for name in ("sweep.png", "sweep.svg")}

    assert run("--from", out, "--plot", tmp_path / "again") == 0
    assert shown[shown.index("DDP, 2 ranks") : shown.index("wrote")] in capfd.readouterr().out
    assert {name: (tmp_path / "again" / name).read_bytes() for name in pictures} == pictures


def as_rank(folder: Path, script: str) -> str:
    """Make a program that each rank runs in place of Python; `$out` is the file for the results of this rate."""
    program = folder / "rank"
    program.write_text(f"#!/bin/sh\nfor out; do :; done\n{script}\n")
    program.chmod(0o755)
    return str(program)


@needs_hosts
def test_an_interrupted_sweep_reports_its_results_so_far(tmp_path: Path) -> None:
    out, begun = tmp_path / "out.json", tmp_path / "begun"
    measured = f'[ $RANK != 0 ] || cp {SAVED} "$out"'
    rank = as_rank(tmp_path, f"case $out in *none.json) {measured};; *) touch {begun}; sleep 300;; esac")
    sweep = partial(commands.interruptible, "sweep", *QUICK, "--rates", "none,8kbit", "--json", out, executable=rank)
    with processes.calling([sweep], fresh=True) as team:
        deadline = time.monotonic() + 300
        while not begun.exists():
            assert team.next(timeout=0.02) is None and time.monotonic() < deadline
        os.kill(team.pids[0], signal.SIGINT)
        event = team.next(timeout=300)
    assert event and event.kind == "returned", event
    done = event.value
    assert done.returncode == 130, done
    assert "ended at 8kbit" in done.stderr
    assert "faster than plain DDP" in done.stdout and "Traceback" not in done.stderr
    assert {row["workload"] for row in json.loads(out.read_text())["cases"]["sweep"]["rows"]} == {"none"}
    assert_gone(team.pids[0], [])


@needs_hosts
def test_a_rate_that_fails_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", as_rank(tmp_path, "echo no memory; exit 7"))
    assert run(*QUICK, "--rates", "none,1gbit", "--json", tmp_path / "out.json") == 7
    errors = capfd.readouterr().err  # the sweep reports a failure of rank 0, and `hosts` that of rank 1
    assert "ended at none, with status 7" in errors and "\n  no memory" in errors
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--rates", "1gbit,fast"), "'fast' is not a rate"),
        (("--hosts", 1), "not a whole number >= 2"),
        (("--from", SAVED), "expected a sweep, got ddp"),
        (("--from", SAVED, "--json", "out.json"), "expected --from or --json, got both"),
        (("--hosts", 2), "apt install iproute2"),
    ],
)
def test_wrong_options_are_errors(
    arguments: tuple[object, ...], text: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")  # so that there is no tc
    assert run(*arguments) == 2
    assert text in " ".join(capfd.readouterr().err.split())
