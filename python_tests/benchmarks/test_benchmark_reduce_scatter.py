"""The benchmark of reduce_scatter: what it prints, that its check can fail, and the options it refuses."""

import json
from pathlib import Path

import commands
import pytest
import torch
import torch.distributed as dist

from benchmarks.cases import reduce_scatter
from dltrain_ext import comm

pytestmark = pytest.mark.needs("matplotlib", "rich")

SMALL = ["reduce_scatter", "--ranks", "2", "-b", "64K", "-e", "64K", "-n", "2", "-w", "0"]


def test_every_side_is_checked_and_timed(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert commands.benchmarks(*SMALL, "--codecs", "raw,int8,sign", "--json", file).returncode == 0
    rows = json.loads(file.read_text())["cases"]["reduce_scatter"]["rows"]
    *rows, left_out = rows
    assert (left_out["side"], left_out["check"]) == ("nccl", "needs --device cuda")
    assert [row["side"] for row in rows] == ["gloo", "raw", "int8", "sign"]
    assert all(row["correct"] and len(row["samples"]) == 2 for row in rows)
    raw, int8 = (row["figures"]["wire bytes"] for row in rows[1:3])
    assert raw == 32 << 10 and int8 < 0.26 * raw
    assert rows[1]["figures"]["error"] == 0 < rows[2]["figures"]["error"] < 0.02


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    right = comm.Communicator.reduce_scatter

    def wrong(self: comm.Communicator, output: torch.Tensor, *arguments: object, **options: object) -> None:
        right(self, output, *arguments, **options)
        output[3] += 1

    monkeypatch.setattr(comm.Communicator, "reduce_scatter", wrong)
    try:
        job = reduce_scatter.Job([4096], ["gloo", "raw"], 2, 0, "cpu")
        ((gloo, raw),) = reduce_scatter.work(0, 1, lambda text, done: None, job)
    finally:
        dist.destroy_process_group()
    assert gloo.wrong == 0 and len(gloo.samples) == 2
    assert raw.wrong == 1 and not raw.samples


@pytest.mark.parametrize(
    ("bad", "named"),
    [(["-b", "2M", "-e", "1M"], "above"), (["--codecs", "nonsense"], "nonsense"), (["--ranks", "0"], "--ranks")],
)
def test_a_bad_option_is_refused(bad: list[str], named: str) -> None:
    done = commands.benchmarks("reduce_scatter", *bad)
    assert done.returncode != 0
    assert named in done.stdout + done.stderr
