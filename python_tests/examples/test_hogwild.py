"""The example of Hogwild: shared weights learn as those of one process do, and are updated by several."""

import re
import subprocess
import sys

import pytest
from ranks import ROOT

pytestmark = pytest.mark.needs("sklearn")

LINE = re.compile(r"(.+) (\S+)%: processes (\d), updates (\d+), (\S+) by others between two of a process")


@pytest.mark.parametrize(
    ("task", "metric", "steps", "least"),
    [
        ("digits", "test accuracy", 200, 80),
        pytest.param("catch", "games won", 600, 40, marks=pytest.mark.exhaustive),
    ],
)
def test_hogwild_learns(task: str, metric: str, steps: int, least: float) -> None:
    """Without training, one digit in ten is recognized, and one game in five is won."""
    command = [sys.executable, ROOT / "examples" / "hogwild.py", "--task", task, "--steps", str(steps)]
    done = subprocess.run([*command, "--processes", "2"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    alone, shared = (LINE.fullmatch(line).groups() for line in done.stdout.splitlines())
    assert (alone[0], alone[2:]) == (metric, ("1", str(steps), "0.0"))
    assert (shared[0], shared[2:4]) == (metric, ("2", str(steps)))
    assert float(alone[1]) > least and float(shared[1]) > least
    assert float(shared[4]) > 0, "the processes trained one after another"
