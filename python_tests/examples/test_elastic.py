"""The elastic example: ranks that are killed in backward or while saving, and the same bits as an undisturbed run."""

import contextlib
import importlib
import io
import os
import re
import runpy
import shutil
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import commands
import pytest
import torch
import torch.distributed as dist
from ranks import as_torchrun, run_example, run_ranks
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

pytestmark = pytest.mark.xdist_group("elastic")  # the tests share an undisturbed run

EXAMPLES = Path(__file__).parents[2] / "examples"
LINES = re.compile(r"^(?:step \d+: loss .*|digest .*)$", re.MULTILINE)


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder and the output of an undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    said = run_example("elastic.py", tmp_path_factory.mktemp("here"), "--folder", folder, ranks=3, fresh=True)
    assert names(folder) == ["step-40", "step-60"]
    return folder, said


def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path, undisturbed: tuple[Path, str]) -> None:
    """This test runs torchrun itself, which restarts the ranks."""
    (tmp_path / "step-60.tmp").mkdir()  # as after a kill while saving
    (tmp_path / "step-60.tmp" / "half").touch()
    options = ("--folder", tmp_path, "--kill", "1", "--at", "50")
    done = commands.torchrun(3, "--max-restarts", "1", EXAMPLES / "elastic.py", *options)
    assert done.returncode == 0, done.stderr
    assert LINES.findall(done.stdout) == LINES.findall(undisturbed[1])
    assert len(LINES.findall(done.stdout)) == 4
    assert re.findall("restart .*", done.stdout) == ["restart 1: continues from step 40"]

    assert names(tmp_path) == ["rank-0.txt", "rank-2.txt", "step-40", "step-60"]
    assert "half" not in names(tmp_path / "step-60")
    for rank in (0, 2):
        said = (tmp_path / f"rank-{rank}.txt").read_text()
        # The part "waiting for" is missing if another rank reports the failure before this rank's own wait fails.
        call = rf"all_reduce( with \S+)? on rank {rank} in a group of 3: (waiting for .*; )?"
        assert re.search(f"{call}the culprit is rank 1: it has left", said), said
        assert f"rank {rank}: the culprit is rank 1: it has left" in done.stdout


def die_at_70(folder: Path) -> tuple[str, str]:
    """Return the output of a rank after another has died, and the report that torchrun would print of it."""
    rank, error_file = int(os.environ["RANK"]), f"{folder}.error-of-{os.environ['RANK']}"
    os.environ["TORCHELASTIC_ERROR_FILE"] = error_file
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = ["elastic.py", "--folder", str(folder), *["--steps", "80", "--kill", "1", "--at", "70"]]
    with contextlib.redirect_stdout(io.StringIO()) as said, pytest.raises(dist.DistBackendError):
        runpy.run_path(str(EXAMPLES / "elastic.py"), run_name="__main__")
    failure = ProcessFailure(local_rank=rank, pid=os.getpid(), exitcode=1, error_file=error_file)
    return said.getvalue(), str(ChildFailedError("elastic.py", {rank: failure}))


def test_fewer_ranks_can_continue_and_the_report_names_the_culprit(
    tmp_path: Path, undisturbed: tuple[Path, str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(undisturbed[0], folder)
    said, report = as_torchrun(2, die_at_70, folder, dying=(1,))[0]
    assert "restart 0: continues from step 60" in said
    assert "rank 0: the culprit is rank 1: it has left" in said
    assert "the culprit is rank 1: it has left" in report
    assert names(folder) == ["rank-0.txt", "step-40", "step-60"]


def example() -> ModuleType:
    sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module("elastic")


def save_twice(rank: int, world_size: int, folder: Path) -> None:
    """Save two checkpoints. In the second, rank 1 kills itself before it writes; the others get an error of torch."""
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
    """Return the sum over the ranks of the residuals of the largest parameter."""
    return sum(lost["6.weight"].double() for state in states for lost in state["feedback"].values())


def test_a_kill_while_saving_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    run_ranks(3, save_twice, tmp_path, dying=(1,))
    assert names(tmp_path) == ["0.pt", "1.pt", "2.pt", "step-1", "step-2.tmp"]
    assert names(tmp_path / "step-2.tmp"), "no rank has written"
    saved = [torch.load(tmp_path / f"{rank}.pt") for rank in range(3)]
    loaded = run_ranks(2, load, tmp_path)
    assert [state["steps"] for state in loaded] == [1, 1]
    assert total(saved).any()
    torch.testing.assert_close(total(loaded), total(saved), rtol=1e-6, atol=1e-9)
