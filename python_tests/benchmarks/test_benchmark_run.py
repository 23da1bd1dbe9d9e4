"""A run of the benchmarks: its options, the summary, and what remains after Ctrl-C."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import active_children
from pathlib import Path

import commands
import pytest
from ranks import ROOT
from rich.console import Console

from benchmarks import report, summary
from benchmarks.__main__ import parse
from benchmarks.cases import CASES
from benchmarks.harness import Row, Table
from benchmarks.simulation import Simulation

pytestmark = pytest.mark.needs("matplotlib", "rich")


def shown(tables: dict[str, Table | Simulation]) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    summary.show(console, tables)
    return console.export_text()


def timed(side: str, seconds: float, ours: bool = False, workload: str = "w", **figures: float) -> Row:
    return Row(workload, side, ours, True, "0", [seconds] * 3, figures=figures)


def make_table() -> Table:
    ours = timed("ours", 2e-3, ours=True, **{"% of limit": 81.4})
    slow, fast = timed("slow peer", 5e-3), timed("fast peer", 1e-3)
    slow.compare_with(ours)
    fast.compare_with(ours)
    wrong = Row("w", "wrong peer", False, False, "7")
    missing = [Row.missing("absent", "not installed: pip install absent", workload) for workload in ("w", "v: 3")]
    alone = timed("alone", 4e-6, ours=True, workload="v: 3", **{"% of line": 50.0})
    return Table("title", [ours, slow, fast, wrong, missing[0], alone, missing[1]])


def test_the_summary_marks_where_ours_is_slower() -> None:
    text = shown({"some case": make_table()})
    lines = [" ".join(line.split()) for line in text.splitlines()]
    begin = lines.index("some case")
    assert lines[begin + 1 : begin + 6] == [
        "w",
        "ours 2.00 ms slow peer 5.00 ms 2.50x 81 % memory",
        "fast peer 1.00 ms 0.500x SLOWER",
        "wrong peer - WRONG",
        "v: 3",
    ]
    assert lines[begin + 6] == "alone 4.00 us 50 % line"


def test_the_summary_shows_wrong_results_and_missing_peers() -> None:
    text = shown({"some case": make_table(), "model": Simulation("SIMULATED: not timed", {}, [])})
    (wrong,) = (line for line in text.splitlines() if "wrong peer" in line)
    assert "WRONG" in wrong
    (missing,) = (line.strip() for line in text.splitlines() if "absent" in line)
    assert missing == "some case left out absent, in 2 workloads: not installed: pip install absent"
    assert "model: SIMULATED" in text


def test_a_missing_peer_is_in_the_table_of_its_case() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    table = make_table()
    report.show(console, table)
    (first, _) = (line for line in console.export_text().splitlines() if "absent" in line)
    assert "not installed: pip install absent" in first and "WRONG" not in first
    assert all(row.correct for row in table.rows if row.left_out)


@pytest.mark.parametrize("arguments", [["--ranks", "3", "ddp"], ["ddp", "--ranks", "3"], ["--ranks", "3"]])
def test_the_option_ranks_may_be_anywhere(arguments: list[str]) -> None:
    _, chosen = parse(arguments)
    assert chosen["ddp"].ranks == 3
    assert list(chosen) == (["ddp"] if "ddp" in arguments else list(CASES))


def test_a_run_of_all_cases_uses_smaller_options() -> None:
    _, overview = parse([])
    _, quick = parse(["--quick"])
    _, own = parse(["allreduce"])
    assert overview["allreduce"].algorithms == ["auto"] and overview["allreduce"].iters == 10
    assert own["allreduce"].algorithms is quick["allreduce"].algorithms is None
    assert all(options.quick for options in quick.values())


def descendants(pid: int) -> set[int]:
    listed = subprocess.run(["ps", "-e", "-o", "pid=", "-o", "ppid="], capture_output=True, text=True, check=True)
    parents = dict(map(int, line.split()) for line in listed.stdout.splitlines())
    found, size = {pid}, 0
    while len(found) > size:
        size = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found - {pid}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


OPTIONS = ["-b", "4K", "-e", "256K", "-f", "64", "-w", "0", "--algorithms", "ring", "--ranks", "2"]


def test_after_ctrl_c_the_results_so_far_are_written_and_no_rank_remains(tmp_path: Path) -> None:
    """The whole process group receives SIGINT twice, after the first of two sizes."""
    file = tmp_path / "out.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "allreduce", *OPTIONS, "-n", "400", "--json", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        # Background jobs of a shell ignore SIGINT, and their children inherit this.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert any("262144 bytes" in line for line in process.stdout), "it ended early"
        started = descendants(process.pid)
        assert len(started) >= 3, "two ranks and the server that they are forked from"
        for _ in range(2):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.05)
        output, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, output
    assert "interrupted" in output and "Traceback" not in output
    deadline = time.monotonic() + 60
    while any(map(is_running, started)):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.05)
    assert rows_of(file) == [("4 KiB", "gloo"), ("4 KiB", "ring")]


def test_ctrl_c_before_the_first_result_leaves_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "out.json"
    before = set(active_children())
    show = report.live

    @contextlib.contextmanager
    def interrupting(*arguments: object) -> Iterator[Callable]:
        def progress(text: str, done: float) -> None:
            if "4096 bytes" in text:
                signal.raise_signal(signal.SIGINT)

        with show(*arguments):
            yield lambda case: progress

    monkeypatch.setattr(report, "live", interrupting)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = commands.benchmarks("allreduce", *OPTIONS, "-n", 2_000_000, "--json", file)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN, "a second SIGINT is ignored"
    finally:
        signal.signal(signal.SIGINT, handler)
    assert done.returncode == 130 and "interrupted" in done.stdout
    assert rows_of(file) == []
    assert set(active_children()) <= before


def rows_of(file: Path) -> list[tuple[str, str]]:
    """Return the rows with samples of an interrupted run."""
    run = json.loads(file.read_text())
    assert run["interrupted"] is True
    return [(row["workload"], row["side"]) for row in run["cases"]["allreduce"]["rows"] if row["samples"]]
