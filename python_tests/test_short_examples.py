"""The short examples, run as a reader runs them, in few steps."""

from pathlib import Path

import pytest
from ranks import run_example

pytestmark = pytest.mark.needs("matplotlib", "rich", "sklearn")

FOLDER = Path(__file__).parents[1] / "examples"

# Its arguments, and what it says at its end.
EXAMPLES = {
    "accumulation.py": ("--steps 3", "12 backward passes, 3 of which sent 25.6% of fp32's bytes"),
    "activation_checkpointing.py": ("--steps 4", "bytes sent: 25.6% of fp32's"),
    "autocast.py": ("--steps 4 --dtype fp16", "loss scale: "),
    "clipping.py": ("--steps 4", "largest difference of a parameter: "),
    "compiled.py": ("--steps 4 --backend aot_eager", "bytes sent: 25.6% of fp32's"),
    "fully_sharded.py": ("--steps 4", "times fewer bytes than fp32"),
    "resume.py": ("--steps 6", "the bits of a run that never stopped: yes"),
    "sync_batch_norm.py": ("--steps 4", "SyncBatchNorm"),
    "zero.py": ("--steps 4", "rank 0 keeps the moments of 87% of the parameters"),
}


ELSEWHERE = {"elastic.py", "with_accelerate.py", "with_lightning.py", "with_trainer.py"}  # tested with what they show


@pytest.mark.parametrize("name", EXAMPLES)
def test_runs_on_two_ranks(name: str, tmp_path: Path) -> None:
    arguments, last = EXAMPLES[name]
    said = run_example(name, tmp_path, *arguments.split())
    assert "test accuracy" in said and last in said, said
    assert len(said.splitlines()) <= 3, "of one rank"


def test_sharded_inside_of_hosts(tmp_path: Path) -> None:
    said = run_example("fully_sharded.py", tmp_path, "--steps", "4", "--hosts", "2", ranks=4)
    assert "times fewer bytes than fp32" in said


def test_none_is_forgotten_and_each_says_how_to_run_it() -> None:
    files = {file.name: file.read_text() for file in FOLDER.glob("*.py")}
    assert {name for name, text in files.items() if "from shared import" in text} == EXAMPLES.keys() | ELSEWHERE
    for name in EXAMPLES:
        assert f"torchrun --standalone --nproc-per-node 2 examples/{name}" in files[name]
