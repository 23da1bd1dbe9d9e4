"""The short examples, run as a reader runs them, in few steps."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_examples import TORCHRUN

FOLDER = Path(__file__).parents[1] / "examples"

# Its arguments, and what it says at its end.
EXAMPLES = {
    "accumulation.py": ("--steps 3", "12 backward passes, 3 of which sent 25.6% of fp32's bytes"),
    "activation_checkpointing.py": ("--steps 4", "bytes sent: 25.6% of fp32's"),
    "autocast.py": ("--steps 4 --dtype fp16", "loss scale: "),
    "clipping.py": ("--steps 4", "largest difference of a parameter: "),
    "compiled.py": ("--steps 4 --backend aot_eager", "bytes sent: 25.6% of fp32's"),
    "resume.py": ("--steps 6", "the bits of a run that never stopped: yes"),
    "sync_batch_norm.py": ("--steps 4", "SyncBatchNorm"),
    "zero.py": ("--steps 4", "rank 0 keeps the moments of 87% of the parameters"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_runs_on_two_ranks(name: str) -> None:
    arguments, last = EXAMPLES[name]
    done = subprocess.run(
        [sys.executable, *TORCHRUN, str(FOLDER / name), *arguments.split()], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "test accuracy: " in done.stdout and last in done.stdout, done.stdout
    assert len(done.stdout.splitlines()) <= 3, "of one rank"


def test_none_is_forgotten_and_each_says_how_to_run_it() -> None:
    files = {file.name: file.read_text() for file in FOLDER.glob("*.py")}
    assert {name for name, text in files.items() if "import shared\n" in text} == EXAMPLES.keys()
    for name in EXAMPLES:
        assert f"torchrun --standalone --nproc-per-node 2 examples/{name}" in files[name]
