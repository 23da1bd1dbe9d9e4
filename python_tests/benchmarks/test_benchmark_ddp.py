"""Small runs of the benchmark ddp: its sides, what it counts as wrong, and torchrun's ranks."""

import json
from pathlib import Path

import commands
import pytest
import torch
from ranks import as_torchrun, run_ranks

from benchmarks.ddp_ranks import BACKWARD, PLAIN, POWER_SGD, Job, Runner, Side, are_identical, work
from dltrain_ext import codecs

pytestmark = pytest.mark.needs("matplotlib", "rich")

OPTIONS = ("ddp", "--quick", "--width", 64, "-n", 3)


def run(*arguments: object) -> commands.Done:
    return commands.benchmarks(*OPTIONS, *arguments)


def rows_of(path: Path) -> list[dict]:
    rows = json.loads(path.read_text())["cases"]["ddp"]["rows"]
    (bf16,) = [row for row in rows if row["left_out"]]
    assert (bf16["side"], bf16["check"]) == ("torch bf16_compress_hook", "DDP accepts it only with NCCL")
    return [row for row in rows if not row["left_out"]]


def test_every_side_is_verified_and_timed(tmp_path: Path) -> None:
    done = run("--codecs", "raw,fp16,int8", "--algorithms", "ring,direct", "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path / "out.json")
    ours = [f"{codec} {algorithm}" for codec in ("raw", "fp16", "int8") for algorithm in ("ring", "direct")]
    steps = ["plain DDP torch", "fp16 direct reads it", "fp16 direct told the norm"]
    assert [row["side"] for row in rows] == ["plain DDP", "torch fp16_compress_hook", POWER_SGD, *ours, *steps]
    assert all(row["correct"] and len(row["samples"]) == 3 for row in rows)
    against = {row["side"]: row["against"] for row in rows}
    assert against["torch fp16_compress_hook"].startswith("fp16") and against[POWER_SGD].startswith("int8")
    assert {against[side] for side in ours} == {"plain DDP"} and against["plain DDP"] == ""
    assert [row["ratio"] is None for row in rows] == [row["side"].startswith("plain") for row in rows]
    sent = {row["side"]: row["figures"]["wire bytes"] for row in rows}
    assert sent["plain DDP"] is None and sent["int8 ring"] < 0.35 * sent["raw ring"]
    errors = {row["side"]: row["figures"]["error"] for row in rows}
    assert errors["raw ring"] < 1e-6 < errors["int8 ring"] < codecs.error_bound("int8").max * 3
    assert 0 < errors[POWER_SGD] < 1
    assert 0 <= rows[3]["figures"]["hidden %"] <= 100
    assert all((row["figures"]["% of line"] or 0) > 0 for row in rows if row["ours"])


def test_codecs_that_are_selected_are_named(tmp_path: Path) -> None:
    budgets = ("--max-error", "0.5,0.000001")
    done = run("--codecs", "auto", "--workloads", "backward", *budgets, "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    *_, auto, coarse, exact = rows_of(tmp_path / "out.json")
    assert auto["side"].startswith("auto: ") and coarse["side"].startswith("auto, error <= 0.5: ")
    assert "int" not in exact["side"] and exact["figures"]["error"] < 1e-6
    assert all(row["correct"] and len(row["samples"]) == 3 for row in (auto, coarse, exact))
    done = run("--max-error", "1.5")
    assert done.returncode != 0 and "--max-error" in done.stderr


def test_under_torchrun_one_rank_reports(tmp_path: Path) -> None:
    first, second = as_torchrun(2, commands.benchmarks, *OPTIONS, "--codecs", "int4", "--json", tmp_path / "out.json")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stdout.count("DDP, 2 ranks, 2 x Linear(64, 64)") == 1 and not second.stdout
    assert "int4" in {row["side"] for row in rows_of(tmp_path / "out.json")}


def corrupt(rank: int, world_size: int) -> list[tuple[int, int]]:
    gradients = Runner.gradients

    def corrupted(self: Runner) -> torch.Tensor:
        found = gradients(self)
        if self.side.way == "int8":
            found[7] += 1.0  # the same on all ranks
        if self.side.way == "raw" and rank == 1:
            found[7] *= 1 + 2e-7  # on one rank only
        return found

    job = Job({BACKWARD: [Side(PLAIN), Side("raw"), Side("int8")]}, 1, 16, 4, rounds=2, warmup=2, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "gradients", corrupted)
        found = list(work(rank, world_size, lambda *_: None, job))
    return [(result.wrong, len(result.samples)) for results in found for result in results]


def test_wrong_gradients_are_detected_and_not_timed() -> None:
    numel = 16 * 17
    for results in run_ranks(2, corrupt):
        assert results == [(0, 2), (2 * numel, 0), (2, 0)]


def differ_in_a_bit(rank: int, world_size: int) -> list[bool]:
    same = torch.arange(5.0)
    other = same.clone()
    if rank == 1:
        other.view(torch.int32)[3] ^= 1
    return [are_identical(same), are_identical(other)]


def test_ranks_that_differ_in_a_bit_are_detected() -> None:
    assert run_ranks(3, differ_in_a_bit) == [[True, False]] * 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--codecs", "int3"), "unknown 'int3'"),
        (("--codecs", "int8", "--algorithms", "recursive_doubling"), "only take the codec raw: recursive_doubling"),
        (("--warmup", 1), "'1' is not a whole number >= 2"),
    ],
)
def test_wrong_options_are_errors(arguments: tuple, text: str) -> None:
    done = run(*arguments)
    assert done.returncode != 0
    assert text in done.stdout + done.stderr
