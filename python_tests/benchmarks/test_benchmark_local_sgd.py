"""Small runs of the benchmark local_sgd: sides and figures, lost ranks, and that each check can fail."""

import json
import sys
from pathlib import Path
from typing import Any

import commands
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from benchmarks import local_sgd_ranks, local_sgd_sides, local_sgd_work
from benchmarks.cases.local_sgd import delay_for, make_row
from benchmarks.local_sgd_faults import TRAINING, Fault, Outcome, Trainer, judge, listen
from benchmarks.local_sgd_ranks import Calibration, Counter, Job, Result, work
from benchmarks.local_sgd_sides import ALONE, AVERAGER, DDP, HIVEMIND, OURS, TORCHFT, Side

pytestmark = pytest.mark.needs("matplotlib", "rich")

RANKS = 2
TINY = ["--quick", "--elements", "20000", "--milliseconds", "1"]


def rows_of(tmp_path: Path, *options: object) -> list[dict[str, Any]]:
    done = commands.benchmarks("local_sgd", *TINY, "--ranks", RANKS, *options, "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((tmp_path / "out.json").read_text())["cases"]["local_sgd"]["rows"]


def test_every_side_is_verified_and_timed(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "--only", "share,bytes,burst")
    streaming, int4, raw = f"{OURS}, int4, 4 fragments, delay 1", f"{OURS}, int4", f"{OURS}, raw"
    by_side = {row["side"]: row for row in rows}
    assert list(by_side) == [ALONE, streaming, int4, raw, f"{DDP}, fp32", f"{DDP}, int4"]
    assert all(row["correct"] and len(row["samples"]) == 1 and not row["left_out"] for row in rows)
    assert {row["workload"] for row in rows} == {"train, loopback"}
    figures = {side: row["figures"] for side, row in by_side.items()}
    assert figures[ALONE]["computing %"] == 100 and figures[ALONE]["not waiting %"] is None
    assert all(0 < figures[side]["not waiting %"] < 100 and figures[side]["main ms"] > 0 for side in (int4, raw))
    assert figures[f"{DDP}, fp32"]["DDP bytes"] == 1
    assert figures[f"{DDP}, fp32"]["bytes/step"] > 4 * 19360  # with two ranks each sends its gradients once
    assert figures[raw]["burst MB"] >= figures[raw]["peak MB"] > 0
    assert figures[raw]["error"] < 1e-5 < figures[int4]["error"] < 0.2
    compared = [row["side"] for row in rows if row["against"] == streaming]
    assert compared == [ALONE, f"{DDP}, fp32"]


def test_peers_that_are_not_installed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_sgd_sides.importlib.util, "find_spec", lambda name: None)
    rows = {row["side"]: row for row in rows_of(tmp_path, "--only", "peers")}
    absent = {side: row["check"] for side, row in rows.items() if row["left_out"]}
    assert list(absent) == [f"{TORCHFT}", f"{TORCHFT}, 4 fragments, delay 1", HIVEMIND]
    assert all("not installed: pip install" in why for why in absent.values())
    assert rows[AVERAGER]["samples"] and rows[AVERAGER]["ratio"] > 0


def test_the_work_of_an_outer_step_is_verified_and_timed(tmp_path: Path) -> None:
    rows = {row["side"]: row for row in rows_of(tmp_path, "--only", "work")}
    assert [*rows] == [f"{OURS}, int4", "torch and codecs, int4", f"{OURS}, raw", "torch"]
    assert all(row["correct"] and len(row["samples"]) == 3 for row in rows.values())
    assert all((row["ratio"] or 0) > 0 for row in rows.values() if not row["ours"])
    assert rows[f"{OURS}, raw"]["figures"]["resident B"] == pytest.approx(12, rel=0.02)
    assert rows[f"{OURS}, int4"]["figures"]["resident B"] == pytest.approx(12.5, rel=0.02)


def test_a_lost_rank_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, "--only", "faults")
    assert row["workload"] == f"killed {TRAINING}, loopback" and row["correct"], row["check"]
    assert len(row["samples"]) == 1 and row["samples"][0] >= row["figures"]["noticed s"] > 0
    assert row["figures"]["next s"] > row["figures"]["recover s"] > 0


@pytest.mark.needs("sklearn")
def test_sites_train_beside_a_slow_one(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "--only", "slow_site", "--ranks", 3)
    sides = ["no store", "store, quorum all", "store, quorum 2", "store, quorum 2, grace 10 ms", "store, quorum 1"]
    sides.append("store, quorum 1, outer lr 0.175, momentum 0.6")
    assert [row["side"] for row in rows] == [f"{OURS}, int4, {side}" for side in sides]
    for row in rows:
        assert row["workload"] == "slow site, loopback" and row["correct"] and len(row["samples"]) == 1
        figures = row["figures"]
        assert figures["steps/s"] == pytest.approx(1 / row["samples"][0]) and figures["slow steps/s"] > 0
        assert figures["versions/s"] > 0 < figures["loss"] and 0 <= figures["accuracy %"] <= 100


def test_without_the_data_set_sites_beside_a_slow_one_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands.hide(monkeypatch, "sklearn")
    monkeypatch.delitem(sys.modules, "examples.tasks", raising=False)
    (row,) = rows_of(tmp_path, "--only", "slow_site")
    assert row["left_out"] and "no module sklearn" in row["check"]


@pytest.mark.xdist_group("machine")
def test_ranks_run_on_emulated_hosts(tmp_path: Path) -> None:
    commands.skip_without_hosts()
    rows = rows_of(tmp_path, "--rate", "100mbit", "--only", "bytes,burst")
    assert all(row["correct"] and len(row["samples"]) == 1 for row in rows)
    assert [row["workload"] for row in rows] == ["train, 100mbit"] * 5
    figures = {row["side"]: row["figures"] for row in rows}
    plain, coded = figures[f"{DDP}, fp32"], figures[f"{DDP}, int4"]
    assert 4 * 19360 < plain["bytes/step"] < 5 * 19360
    assert plain["DDP bytes"] == 1 < coded["DDP bytes"]
    assert figures[f"{OURS}, raw"]["DDP bytes"] < figures[f"{OURS}, int4"]["DDP bytes"]


def results_of(rank: int, ranks: int, *sides: Side) -> list[tuple[int, int, str]]:
    """Return the number of wrong elements and of turns of each side, and why it failed."""
    job = Job(list(sides), width=16, sync_every=4, rounds=1, turns=2, seconds=1e-3, faults=[])
    first, *found = work(rank, ranks, lambda *_: None, job)
    assert isinstance(first, Calibration) and all(isinstance(each, Result) for each in found)
    return [(each.wrong, len(each.turns), each.why) for each in found if isinstance(each, Result)]


def average_wrongly(rank: int, ranks: int) -> list[tuple[int, int, str]]:
    """One element is wrong on all ranks, less than by int4."""
    step = local_sgd_sides.Ours.step

    def wrong(self: local_sgd_sides.Ours) -> None:
        step(self)
        if self.side.codec == "raw":
            next(self.model.parameters()).data[3, 5] += 1e-3

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_sgd_sides.Ours, "step", wrong)
        return results_of(
            rank, ranks, Side(OURS, "raw", ours=True), Side(OURS, "raw", 2, 1, True), Side(OURS, "int4", ours=True)
        )


def test_wrong_parameters_are_detected_and_not_timed() -> None:
    for results in run_ranks(RANKS, average_wrongly, fresh=True):
        wrong, streamed, right = results
        assert wrong[0] >= RANKS and wrong[1] == 0
        assert streamed[0] >= RANKS and streamed[1] == 0
        assert right == (0, 2, "")


def differ_in_a_bit(rank: int, ranks: int) -> list[tuple[int, int, str]]:
    same = local_sgd_sides.Ours.same

    def wrong(self: local_sgd_sides.Ours) -> list[torch.Tensor]:
        found = same(self)
        if rank == 1:
            found[2][7, 7] *= 1 + 2e-7
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_sgd_sides.Ours, "same", wrong)
        return results_of(rank, ranks, Side(OURS, "int4", ours=True), Side(AVERAGER))


def test_ranks_that_differ_in_a_bit_are_detected() -> None:
    for results in run_ranks(RANKS, differ_in_a_bit, fresh=True):
        assert results == [(1, 0, ""), (0, 2, "")]


def average_nothing(rank: int, ranks: int) -> list[tuple[int, int, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_sgd_sides.averagers.PeriodicModelAverager, "average_parameters", lambda *_: None)
        patch.setattr(local_sgd_sides.ddp, "register", lambda model, codec: model.register_comm_hook(None, keep))
        return results_of(rank, ranks, Side(AVERAGER), Side(DDP, "int8", ours=True), Side(DDP))


def keep(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def test_peers_that_do_not_average_are_wrong() -> None:
    for results in run_ranks(RANKS, average_nothing, fresh=True):
        assert [wrong > 1000 for wrong, _, _ in results] == [True, True, False]
        assert [turns for _, turns, _ in results] == [0, 0, 2]


def test_wrong_outer_steps_are_detected_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    call = local_sgd_work.Ours.call

    def wrong(self: local_sgd_work.Ours) -> None:
        call(self)
        self.parameters[1][2, 3] += 1e-3

    monkeypatch.setattr(local_sgd_work.Ours, "call", wrong)
    ours, torchs = local_sgd_work.measure(10_000, 1, ["raw"], 2, lambda done: None)
    assert ours.wrong == 1 and not ours.samples
    assert torchs.wrong == 0 and len(torchs.samples) == 2


def test_bursts_end_where_little_is_sent() -> None:
    counter = Counter(1, samples=False)
    sent = [0, 0, 1e6, 2e6, 3e6, *[3e6 + 100] * 9, 4e6, 4e6]
    counter.samples = [(0.1 * number, nbytes) for number, nbytes in enumerate(sent)]
    assert counter.burst() == pytest.approx(3e6 + 100)
    assert counter.peak() == pytest.approx(3e6, rel=0.01)


def test_survivors_that_accuse_another_or_differ_are_wrong() -> None:
    good = {"lost": 2, "text": "the culprit is rank 2", "digest": 1, "raised": 5.0, "departed": 4.0}
    good |= {"recovered": 5.5, "completed": 7.0}
    lost = {"killed": 3.0}

    def judged(*every: dict[str, Any]) -> Outcome:
        outcome = Outcome(Fault(TRAINING, 4, 0, 1), [], [], [], [], [])
        judge(outcome, list(every))
        return outcome

    right = judged(good, good | {"raised": 5.25}, lost)
    assert right[1:] == ([2.25], [1.25], [0.5], [2.0], [])
    accused = good | {"lost": 0, "text": "the culprit is rank 0"}
    for wrong in (
        judged(good, accused, lost),
        judged(good, good | {"digest": 2}, lost),
        judged(good, {"wrong": "it has ended"}, lost),
    ):
        assert len(wrong.wrong) == 1 and not wrong.raised


def test_a_process_that_ends_is_wrong() -> None:
    trainer = Trainer("benchmarks.local_sgd_nothing", {})
    told = listen(trainer, is_victim=False, fault=Fault(TRAINING, 4, 0, 1), step=1.0)
    assert "No module named benchmarks.local_sgd_nothing" in told["wrong"]
    trainer.end()


class Options:
    sync_every, fragments, width, codecs, milliseconds, delay = 100, 4, 1000, ["int4"], 100, None


def test_the_delay_is_longer_than_a_fragment_takes() -> None:
    options: Any = Options()
    assert delay_for(options, 4, "10mbit") == 24  # of 3 million parameters; 1.9 s, and half as much again, is 29 steps
    assert delay_for(options, 4, "100mbit") == 3
    assert delay_for(options, 4, None) == 2


def test_the_time_of_a_turn_that_has_failed_is_not_reported() -> None:
    failed = Result(Side(HIVEMIND), 0, 0.0, [local_sgd_ranks.Measured(1, 0, 0, 0, 0, 0, 2)], "2 averages in turn 1")
    row = make_row(failed, "train", ["share"])
    assert row.left_out and not row.samples and "2 averages" in row.check
    ours = make_row(failed._replace(side=Side(OURS, ours=True)), "train", ["share"])
    assert not ours.correct and not ours.left_out and row.correct


@pytest.mark.parametrize(
    "bad",
    [
        ["--only", "everything"],
        ["--fragments", "3"],
        ["--delay", "8"],
        ["--codecs", "int3"],
        ["--rate", "fast"],
    ],
)
def test_a_bad_option_is_refused(bad: list[str]) -> None:
    done = commands.benchmarks("local_sgd", "--quick", *bad)
    assert done.returncode != 0
    assert bad[0] in done.stdout + done.stderr
