"""The example of population based training: both methods, the picture, and the numbers of a short run."""

import json
import re

import pytest
from ranks import run_example

pytestmark = pytest.mark.needs("matplotlib", "sklearn")


def test_a_short_run(tmp_path):
    folder, picture, file = tmp_path / "folder", tmp_path / "lineages.png", tmp_path / "errors.json"
    folder.mkdir()
    options = ("--steps", 2, "--rounds", 3, "--seeds", 2, "--plot", picture, "--json", file)
    said = run_example("population.py", folder, *options)
    found = json.loads(file.read_text())
    assert list(found) == ["population based training", "random search"]
    for name, errors in found.items():
        assert len(errors) == 2 and all(0 <= error <= 100 for error in errors)
        assert f"{name}: {sum(errors) / 2:.2f} % wrong, {min(errors):.2f} to {max(errors):.2f}" in said
    assert re.search(r"is better than random search in [0-2] of 2 runs, as good in [0-2]", said)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.needs("optuna")
def test_optuna_chooses(tmp_path):
    said = run_example("population.py", tmp_path, "--steps", 2, "--rounds", 4, "--seeds", 1, "--optuna", fresh=True)
    assert re.search(r"copies, and settings by Optuna: \d+\.\d\d % wrong", said)
