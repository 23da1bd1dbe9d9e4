"""The elastic example: ranks that are killed, in backward and while they save, and the bits of a run without that."""

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ranks import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
LINES = re.compile(r"^(?:step \d+: loss .*|digest .*)$", re.MULTILINE)


def launch(ranks: int, restarts: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {ranks} --max-restarts {restarts}"
    command = [sys.executable, *torchrun.split(), EXAMPLES / "elastic.py", *arguments]
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=180)


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Its folder, and what it says."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = launch(3, 0, "--folder", folder)
    assert done.returncode == 0, done.stderr
    assert names(folder) == ["step-40", "step-60"]
    return folder, done.stdout


def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path, undisturbed: tuple[Path, str]) -> None:
    (tmp_path / "step-60.tmp").mkdir()  # as a run leaves it that is killed while it saves
    (tmp_path / "step-60.tmp" / "half").touch()
    done = launch(3, 1, "--folder", tmp_path, "--kill", 1, "--at", 50)
    assert done.returncode == 0, done.stderr
    assert LINES.findall(done.stdout) == LINES.findall(undisturbed[1])
    assert len(LINES.findall(done.stdout)) == 4
    assert re.findall("life .*", done.stdout) == ["life 1: goes on from step 40"]

    assert names(tmp_path) == ["rank-0.txt", "rank-2.txt", "step-40", "step-60"]
    assert "half" not in names(tmp_path / "step-60")
    for rank in (0, 2):
        said = (tmp_path / f"rank-{rank}.txt").read_text()
        # Who hears of it from another, before its own wait has failed, was waiting for nobody.
        call = rf"all_reduce( with \S+)? on rank {rank} in a group of 3: (waiting for .*; )?"
        assert re.search(f"{call}the culprit is rank 1: it has left", said), said
        assert f"rank {rank}: the culprit is rank 1: it has left" in done.stdout


def test_fewer_ranks_go_on_and_without_restarts_the_report_names_the_culprit(
    tmp_path: Path, undisturbed: tuple[Path, str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(undisturbed[0], folder)
    done = launch(2, 0, "--folder", folder, "--steps", 80, "--kill", 1, "--at", 70)
    assert done.returncode == 1
    assert "life 0: goes on from step 60" in done.stdout
    assert "rank 0: the culprit is rank 1: it has left" in done.stdout
    _, _, report = done.stderr.partition("ChildFailedError")  # which may take either rank for the first that failed
    assert "the culprit is rank 1: it has left" in report, done.stderr
    assert names(folder) == ["rank-0.txt", "step-40", "step-60"]


def example() -> ModuleType:
    sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module("elastic")


def save_twice(rank: int, world_size: int, folder: Path) -> None:
    """The second time rank 1 is killed before it writes its part. What the others get is torch's own error."""
    elastic = example()
    run = elastic.Run()
    first, second = elastic.batches(2)
    run.step(*first)
    torch.save(run.hook.state_dict(), folder / f"{rank}.pt")
    run.save(folder, 1)
    run.step(*second)
    if rank == 1:
        elastic.dcp.FileSystemWriter.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        run.save(folder, 2)


def load(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    elastic = example()
    run = elastic.Run()
    run.load(elastic.checkpoints(folder)[-1])
    return run.hook.state_dict()


def total(states: list[dict[str, Any]]) -> torch.Tensor:
    """The sum of what the ranks have lost of the largest parameter."""
    return sum(lost["6.weight"].double() for state in states for lost in state["feedback"].values())


def test_a_kill_while_saving_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    run_ranks(3, save_twice, tmp_path, dying=(1,))
    assert names(tmp_path) == ["0.pt", "1.pt", "2.pt", "step-1", "step-2.tmp"]
    assert names(tmp_path / "step-2.tmp"), "nobody had begun to write"
    saved = [torch.load(tmp_path / f"{rank}.pt") for rank in range(3)]
    loaded = run_ranks(2, load, tmp_path)
    assert [state["steps"] for state in loaded] == [1, 1]
    assert total(saved).any()
    torch.testing.assert_close(total(loaded), total(saved), rtol=1e-6, atol=1e-9)
