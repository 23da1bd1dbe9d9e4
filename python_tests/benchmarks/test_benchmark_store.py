"""Small runs of the benchmark store: its sides, what it counts as wrong, and wrong options."""

import json
from pathlib import Path

import commands
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from benchmarks import store_ranks
from benchmarks.store_ranks import ALONE, RPC, STALENESS, SYNCHRONOUS, TORCHFT, Job, Workload, work

pytestmark = pytest.mark.needs("matplotlib", "rich")

SIDES = {
    "step": ["all-reduce and AdamW, raw", "ps.Optimizer, raw", "all-reduce and AdamW, int8", "ps.Optimizer, int8"],
    "exchange": [RPC, "ps.Store, raw", "ps.Store, int8"],
    "update": [ALONE, "push and AdamW, raw", "push and AdamW, int8"],
    "stragglers": [*STALENESS],
}


@pytest.mark.parametrize("kind", SIDES)
def test_every_side_is_checked_and_timed(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = commands.benchmarks("store", "--quick", "--workloads", kind, "--ranks", "2", "-b", "64K", "--json", file)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in json.loads(file.read_text())["cases"]["store"]["rows"] if row["side"] != TORCHFT]
    assert [row["side"] for row in rows] == SIDES[kind]
    assert all(row["correct"] and len(row["samples"]) == 3 and not row["left_out"] for row in rows)
    against = {row["side"]: row["against"] for row in rows}
    peers = {"step": SIDES["step"][::2], "exchange": [RPC], "update": [ALONE], "stragglers": [SYNCHRONOUS]}[kind]
    assert all((side in peers) == (other == "") and other in (*peers, "") for side, other in against.items())


JOB = Job([Workload("step", [(64, 3), (5,)]), Workload("exchange", [(640,)])], ["raw", "int8"], 2, 1, 4, 1e-3)


def are_wrong(rank: int, world_size: int) -> list[dict[str, tuple[int, int]]]:
    def imprecise(self: store_ranks.ReducedStep) -> None:
        call(self)
        with torch.no_grad():
            parameter = self.parameters[0]
            parameter[0, 0] = torch.nextafter(parameter[0, 0], torch.tensor(torch.inf))

    def added(self: store_ranks.BatchServer, gradients: list[torch.Tensor]) -> object:
        gradients[0][7] += 1
        return add(self, gradients)

    call, add = store_ranks.ReducedStep.call, store_ranks.BatchServer.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_ranks.ReducedStep, "call", imprecise)
        patch.setattr(store_ranks.BatchServer, "add", added)
        found = list(work(rank, world_size, lambda *_: None, JOB))
    return [{result.side: (result.wrong, len(result.samples)) for result in results} for results in found]


def test_wrong_values_are_detected_and_not_timed() -> None:
    for step, exchange in run_ranks(2, are_wrong):
        assert step["ps.Optimizer, raw"] == (2, 0)  # on each rank one bit unlike the all-reduce
        assert step["all-reduce and AdamW, raw"] == step["ps.Optimizer, int8"] == (0, 2)
        assert exchange[RPC] == (1, 0) and exchange["ps.Store, raw"] == (0, 2)


def gradients_that_are_not_averaged(rank: int, world_size: int) -> dict[str, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_ranks.comm.Communicator, "all_reduce", lambda *_, **__: None)
        ((*results,),) = work(rank, world_size, lambda *_: None, JOB._replace(workloads=JOB.workloads[:1]))
    return {result.side: result.wrong for result in results}


def test_gradients_that_are_not_averaged_are_wrong() -> None:
    for wrong in run_ranks(2, gradients_that_are_not_averaged):
        assert wrong["all-reduce and AdamW, raw"] > 100 and wrong["ps.Optimizer, int8"] == 0


def test_the_mean_step_is_of_the_time_in_which_all_ranks_make_steps() -> None:
    steady = torch.arange(1.0, 9).double()
    assert store_ranks.mean_step(torch.stack([steady, steady])) == 1.0
    three_steps_from_6_to_8 = torch.stack([steady, 2 * steady])
    assert store_ranks.mean_step(three_steps_from_6_to_8) == pytest.approx(4 / 3)
    eight_steps_by_one_of_two = torch.stack([steady, 10 + steady])
    assert store_ranks.mean_step(eight_steps_by_one_of_two) == 2.0


def test_lost_updates_of_stragglers_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    push = store_ranks.ps.Store.push

    def lossy(self: store_ranks.ps.Store, values: dict[str, torch.Tensor], **options: float) -> object:
        return push(self, values, **options | {"weight": 0.5 if self._clocks["values"] == 1 else 1.0})

    monkeypatch.setattr(store_ranks.ps.Store, "push", lossy)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        (results,) = work(0, 1, lambda *_: None, JOB._replace(workloads=[Workload("stragglers")]))
    finally:
        dist.destroy_process_group()
    assert all(result.wrong == 1000 and not result.samples for result in results)


@pytest.mark.parametrize(
    ("bad", "named"),
    [(["--workloads", "push"], "push"), (["--codecs", "int3"], "int3"), (["--steps", "3"], "--steps")],
)
def test_a_bad_option_is_refused(bad: list[str], named: str) -> None:
    done = commands.benchmarks("store", *bad)
    assert done.returncode != 0
    assert named in done.stdout + done.stderr
