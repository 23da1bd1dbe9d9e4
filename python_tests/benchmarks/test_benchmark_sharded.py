"""Small runs of the benchmark sharded: its sides and figures, and that each of its checks can fail."""

import json
from pathlib import Path

import commands
import pytest
import torch
from ranks import run_ranks

from benchmarks.sharded_ranks import (
    BF16,
    FP32,
    FSDP,
    GATHER,
    PLAIN,
    SIDES,
    ZERO,
    ZERO_REDUNDANCY,
    DataParallel,
    FullySharded,
    Job,
    Runner,
    Side,
    work,
)

pytestmark = pytest.mark.needs("matplotlib", "rich")

LAYERS, WIDTH = 2, 64
RANKS = 2


def test_every_side_is_verified_and_timed(tmp_path: Path) -> None:
    options = ["--quick", "--ranks", RANKS, "--layers", LAYERS, "--width", WIDTH, "-n", 2]
    done = commands.benchmarks("sharded", *options, "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["cases"]["sharded"]["rows"]
    by_side = {(row["workload"], row["side"]): row for row in rows}
    assert list(by_side) == [(workload, side.name) for workload, sides in SIDES.items() for side in sides]
    assert all(row["correct"] and len(row["samples"]) == 2 for row in rows)
    assert all((row["figures"]["% of line"] or 0) > 0 for row in rows)

    replaced = {(GATHER, BF16): "int8", (FSDP, BF16): "int8, gather int8", (ZERO, ZERO_REDUNDANCY): "shard, raw"}
    firsts = {GATHER: FP32, FSDP: FP32, ZERO: PLAIN}
    for (workload, side), row in by_side.items():
        against = firsts[workload] if row["ours"] else replaced.get((workload, side), "")
        assert row["against"] == against and (row["ratio"] is None) == (against == "")

    numel = LAYERS * WIDTH * (WIDTH + 1)
    whole = 4 * numel * (RANKS - 1) / RANKS
    sent = {key: row["figures"]["wire bytes"] for key, row in by_side.items()}
    assert sent[GATHER, FP32] == whole == 2 * sent[GATHER, BF16]
    assert sent[GATHER, "raw"] == pytest.approx(whole, rel=0.02)
    assert sent[GATHER, "int8"] < 0.3 * whole and sent[GATHER, "int4"] < 0.2 * whole
    assert sent[FSDP, FP32] == 4 * whole == 2 * sent[FSDP, BF16]
    assert 2 * whole < sent[FSDP, "int8"] < 2.3 * whole
    assert sent[FSDP, "int8, gather int8"] == pytest.approx(3 * sent[GATHER, "int8"])
    assert 2 * sent[ZERO, ZERO_REDUNDANCY] == 3 * sent[ZERO, PLAIN]
    assert sent[ZERO, "shard, raw"] == pytest.approx(sent[ZERO, PLAIN], rel=0.02)
    assert sent[ZERO, "shard, int8"] < 0.65 * sent[ZERO, PLAIN]

    errors = {key: row["figures"]["error"] for key, row in by_side.items()}
    assert errors[GATHER, FP32] == errors[GATHER, "raw"] == 0 < errors[GATHER, "int8"] < errors[GATHER, "int4"] < 0.1
    assert errors[ZERO, "shard, raw"] < 1e-6 < errors[ZERO, "shard, int8"] < 0.02

    both = 8e-6 * (3 * LAYERS * WIDTH * (WIDTH + 1))  # MB of two moments
    of_zero = {side: row["figures"] for (workload, side), row in by_side.items() if workload == ZERO}
    kept = {side: (figures["state MB"], figures["min MB"]) for side, figures in of_zero.items()}
    assert kept[PLAIN] == pytest.approx((both, both), rel=0.01)
    assert kept["shard, raw"] == kept["shard, int8"] == pytest.approx((both / 2, both / 2), rel=0.01)
    largest = 8e-6 * 2 * LAYERS * WIDTH**2
    assert kept[ZERO_REDUNDANCY] == pytest.approx((largest, both - largest), rel=0.01)


def results_of(rank: int, ranks: int, workload: str, *sides: Side) -> list[tuple[int, int]]:
    """Return the number of wrong elements and of samples of each side."""
    job = Job({workload: list(sides)}, layers=1, width=16, batch=4, rounds=2, warmup=1)
    ((*found,),) = work(rank, ranks, lambda *_: None, job)
    return [(result.wrong, len(result.samples)) for result in found]


def gather_wrongly(rank: int, ranks: int) -> list[tuple[int, int]]:
    computed = FullySharded.computed

    def wrong(self: FullySharded) -> list[torch.Tensor]:
        found = computed(self)
        if self.side.gather == "raw":
            found[0][3, 5] += 1e-6  # on all ranks
        if self.side.gather == "int8" and rank == 1:
            found[1][7] *= 1 + 2e-7  # on one rank only, and less than the error of int8
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FullySharded, "computed", wrong)
        return results_of(rank, ranks, GATHER, Side(FP32), Side("raw", "raw", "raw"), Side("int8", "raw", "int8"))


def test_wrong_parameters_are_detected_and_not_timed() -> None:
    for results in run_ranks(RANKS, gather_wrongly, fresh=True):
        assert results == [(0, 2), (RANKS, 0), (1, 0)]


def reduce_wrongly(rank: int, ranks: int, workload: str, codec: str) -> list[tuple[int, int]]:
    runner = DataParallel if workload == ZERO else FullySharded
    gradients = runner.gradients

    def wrong(self: Runner) -> list[torch.Tensor]:
        found = gradients(self)
        if self.side.ours:
            found[0][3, 5] += 0.1 * found[0].abs().max()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "gradients", wrong)
        return results_of(rank, ranks, workload, SIDES[workload][0], Side("ours", codec))


@pytest.mark.parametrize("workload", [FSDP, ZERO])
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_wrong_gradients_are_detected_and_not_timed(workload: str, codec: str) -> None:
    for right, wrong in run_ranks(RANKS, reduce_wrongly, workload, codec, fresh=True):
        assert right == (0, 2)
        assert wrong[0] >= RANKS and wrong[1] == 0


def step_wrongly(rank: int, ranks: int, workload: str) -> list[tuple[int, int]]:
    """One of ours has another learning rate than all others have."""
    adamw = Runner.adamw

    def wrong(self: Runner) -> torch.optim.Optimizer:
        made = adamw(self)
        if self.side.ours:
            made.param_groups[0]["lr"] *= 1.02
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "adamw", wrong)
        return results_of(rank, ranks, workload, SIDES[workload][0], Side("ours", "int8"))


@pytest.mark.parametrize("workload", [FSDP, ZERO])
def test_wrong_steps_are_detected_and_not_timed(workload: str) -> None:
    for right, wrong in run_ranks(RANKS, step_wrongly, workload, fresh=True):
        assert right == (0, 2)
        assert wrong[0] > 0 and wrong[1] == 0


def differ_after_the_step(rank: int, ranks: int) -> list[tuple[int, int]]:
    computed = DataParallel.computed

    def wrong(self: DataParallel) -> list[torch.Tensor]:
        found = computed(self)
        if self.side.ours and rank == 1:
            found[1][7] *= 1 + 2e-7
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataParallel, "computed", wrong)
        return results_of(rank, ranks, ZERO, Side(PLAIN), Side("ours", "int8"))


def test_ranks_that_differ_in_a_bit_are_detected() -> None:
    for results in run_ranks(RANKS, differ_after_the_step, fresh=True):
        assert results == [(0, 2), (1, 0)]


@pytest.mark.parametrize("bad", [["--workloads", "everything"], ["--layers", "0"], ["--warmup", "0"]])
def test_a_bad_option_is_refused(bad: list[str]) -> None:
    done = commands.benchmarks("sharded", *bad)
    assert done.returncode != 0
    assert bad[1] in done.stdout + done.stderr
