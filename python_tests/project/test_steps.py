"""The scripts of .ci that run steps: a failed step ends no other, each has a time limit, and results are saved."""

import re
import runpy
import subprocess
import tarfile
import time
from pathlib import Path

import commands
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def steps():
    return runpy.run_path(str(ROOT / ".ci" / "steps.py"))


def test_a_failed_step_does_not_end_the_others(steps, tmp_path, capsys):
    Step = steps["Step"]
    given = [
        Step("first", "echo figures >$OUT/figures.txt", 10),
        Step("fails", "echo the cause; false; echo never", 10),
        Step("hangs", f"sleep 60 & echo $! >{tmp_path}/child; wait", 5),
        Step("needs: what is not there", "false", 10, ("no-such-command", "no/such/file")),
        Step("last", "true", 10),
    ]
    assert not steps["run"](given, tmp_path, "ends-nothing")
    said = [" ".join(line.split()[2:]) for line in (tmp_path / "ends-nothing.txt").read_text().splitlines()]
    assert said == [
        "first passed",
        "fails FAILED: exit status 1",
        "hangs FAILED: took longer than 5 s",
        "needs: what is not there skipped: there is no no-such-command, no no/such/file",
        "last passed",
    ]
    shown = capsys.readouterr().out
    assert "the cause" in shown and "never" not in shown.replace("echo never", "")
    with tarfile.open(tmp_path / "ends-nothing.tar.gz") as archive:
        names = archive.getnames()
    assert {"ends-nothing/figures.txt", "ends-nothing/02-fails.log"} <= set(names)
    child, until = Path("/proc", (tmp_path / "child").read_text().strip(), "stat"), time.monotonic() + 20
    while _lives(child):  # the processes that it has started are ended, too
        assert time.monotonic() < until
        time.sleep(0.01)


def _lives(stat: Path) -> bool:
    try:
        return not stat.read_text().rpartition(") ")[2].startswith("Z")
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_portion_ends_in_time(steps, tmp_path):
    given = [steps["Step"](name, "sleep 30", 20) for name in ("one", "two")]
    assert not steps["run"](given, tmp_path, "ends-in-time", seconds=10)
    one, two = (tmp_path / "ends-in-time.txt").read_text().splitlines()
    assert re.search(r"FAILED: took longer than \d+ s", one) and "FAILED: no time was left" in two


def test_the_steps_for_a_gpu_have_valid_syntax_and_limits():
    """No step may take a whole portion. The sum of the limits may exceed it, since few steps need their limits."""
    gpu = runpy.run_path(str(ROOT / ".ci" / "gpu"))
    for portion in gpu["PORTIONS"]:
        for step in portion(False):
            assert step.limit <= 60 * gpu["MINUTES"] / 2
            assert subprocess.run(["bash", "-n", "-c", step.command]).returncode == 0, step.command


@pytest.mark.parametrize(
    ("script", "usage"), [("gpu", "python3 .ci/gpu"), ("full", "python3 .ci/full"), ("commit.py", "bash .ci/run")]
)
def test_a_wrong_argument_shows_the_usage(script, usage):
    done = commands.python(ROOT / ".ci" / script, "nonsense")
    assert done.returncode == 1 and usage in done.stderr


@pytest.mark.parametrize("script", ["commit.py", "full"])
def test_every_step_has_valid_syntax(script, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / ".ci")
    portions = runpy.run_path(str(ROOT / ".ci" / script))["PORTIONS"]
    for step in {step for steps in portions.values() for step in steps}:
        assert subprocess.run(["bash", "-n", "-c", step.command]).returncode == 0, step.command


def test_the_workflow_has_all_portions_of_a_commit():
    yaml = pytest.importorskip("yaml")
    done = subprocess.run(["bash", ROOT / ".ci" / "run", "--list"], capture_output=True, text=True, check=True)
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "commit.yml").read_text())["jobs"]
    run = [*jobs["portion"]["strategy"]["matrix"]["portion"], *(name for name in jobs if name != "portion")]
    assert sorted(run) == sorted(done.stdout.split())
