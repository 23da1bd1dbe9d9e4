"""The benchmarks of the collectives except all_reduce: their results, that their checks can fail, and wrong options."""

import json
from pathlib import Path

import commands
import pytest
import torch
import torch.distributed as dist

from benchmarks.allreduce_ranks import Side
from benchmarks.cases import collectives
from dltrain_ext import comm

pytestmark = pytest.mark.needs("matplotlib", "rich")

SMALL = ["--ranks", "2", "-b", "64K", "-e", "64K", "-n", "2", "-w", "0"]


@pytest.mark.parametrize("name", collectives.COLLECTIVES)
def test_every_side_is_checked_and_timed(name: str, tmp_path: Path) -> None:
    file, algorithms = tmp_path / "figures.json", ["auto", *comm.COLLECTIVES[name]]
    options = [*SMALL, "--algorithms", ",".join(algorithms), "--codecs", "raw,int8,sign", "--json", file]
    assert commands.benchmarks(name, *options).returncode == 0
    *rows, left_out = json.loads(file.read_text())["cases"][name]["rows"]
    assert (left_out["side"], left_out["check"]) == ("nccl", "needs --device cuda")
    kinds = [f"{algorithm}{codec}" for codec in ("", " int8", " sign") for algorithm in algorithms]
    assert [row["side"] for row in rows] == ["gloo", *kinds]
    assert all(row["workload"] == "64 KiB" and row["correct"] and len(row["samples"]) == 2 for row in rows)
    figures = {row["side"]: row["figures"] for row in rows}
    sent = (64 << 10) // (1 if collectives.COLLECTIVES[name].in_place else 2)  # bytes to the other of two ranks
    for algorithm in algorithms:
        raw, int8 = (figures[algorithm + codec]["wire bytes"] for codec in ("", " int8"))
        assert raw == sent and int8 < 0.26 * raw
        assert figures[algorithm]["error"] == 0 < figures[algorithm + " int8"]["error"] < 0.02


@pytest.mark.parametrize("name", collectives.COLLECTIVES)
def test_a_wrong_result_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    collective = collectives.COLLECTIVES[name]

    def wrong(communicator: comm.Communicator, result: torch.Tensor, *arguments: object, **options: object) -> None:
        collective.ours(communicator, result, *arguments, **options)
        result[3] += 1

    monkeypatch.setitem(collectives.COLLECTIVES, name, collective._replace(ours=wrong))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        job = collectives.Job(name, [4096], [Side("gloo"), Side("auto")], 2, 0, "cpu")
        ((gloo, raw),) = collectives.work(0, 1, lambda text, done: None, job)
    finally:
        dist.destroy_process_group()
    assert gloo.wrong == 0 and len(gloo.samples) == 2
    assert raw.wrong == 1 and not raw.samples


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (["-b", "2M", "-e", "1M"], "above"),
        (["--codecs", "nonsense"], "nonsense"),
        (["--algorithms", "tree"], "tree"),
        (["--ranks", "0"], "--ranks"),
    ],
)
def test_a_bad_option_is_refused(bad: list[str], named: str) -> None:
    done = commands.benchmarks("reduce_scatter", *bad)
    assert done.returncode != 0
    assert named in done.stdout + done.stderr
