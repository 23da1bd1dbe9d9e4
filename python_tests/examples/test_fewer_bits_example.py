"""The example of fewer bits: each form changes the result a little, and the report compares seed by seed."""

import json
import math

import commands
import pytest

pytestmark = pytest.mark.needs("rich", "sklearn", "scipy")


def test_a_short_run(tmp_path):
    file = tmp_path / "scores.json"
    done = commands.example("fewer_bits.py", "--recipes", "photographs", "--seeds", 2, "--steps", 6, "--json", file)
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())
    assert results["recipes"]["photographs"]["steps"] == 6
    scores = results["scores"]["photographs"]
    plain = scores["float32"]
    assert len({*plain}) == 2, "seeds differ"
    for form, found in scores.items():
        assert len(found) == 2 and all(map(math.isfinite, found))
        assert form in done.stdout
        assert form == "float32" or found != plain
        assert found == pytest.approx(plain, rel=0.1)
    lines = {line.split("│")[1].strip(): line for line in done.stdout.splitlines() if line.startswith("│")}
    worse = sum(plain) / 2 - sum(scores["bfloat16, to nearest"]) / 2
    assert float(lines["bfloat16, to nearest"].split("│")[3]) == pytest.approx(worse, abs=0.01)


def test_bad_options():
    done = commands.example("fewer_bits.py", "--recipes", "large-batch")
    assert done.returncode == 2 and "large-batch" in done.stderr
