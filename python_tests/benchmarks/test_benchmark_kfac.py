"""The benchmark of K-FAC: its parts, the bytes at the shapes of ResNet-50, and that its checks can fail."""

import json
from pathlib import Path

import commands
import pytest
import torch.distributed as dist

from benchmarks.cases import kfac
from dltrain_ext import codecs, comm
from dltrain_ext.comm.owners import balanced
from dltrain_ext.kfac.cholesky import cost
from dltrain_ext.kfac.triangle import packed_numel

pytestmark = pytest.mark.needs("matplotlib", "rich")


def test_every_part_is_checked_and_timed(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ["--quick", "--largest", "150", "--ranks", "2", "-n", "1", "--json", file]
    assert commands.benchmarks("kfac", *options).returncode == 0
    rows = json.loads(file.read_text())["cases"]["kfac"]["rows"]
    assert list(dict.fromkeys(row["workload"] for row in rows)) == list(kfac.PARTS)
    assert all(row["correct"] and len(row["samples"]) == 1 for row in rows)
    sent = {(row["workload"], row["side"]): row["figures"].get("wire bytes") for row in rows}
    for part in ("factors", "inverses"):
        assert 0 < sent[part, "ours, fp16"] < 0.51 * sent[part, "ours, raw"]


def test_bytes_a_step_at_the_shapes_of_resnet50() -> None:
    """KAISA's scripts send 92 MB a step on four ranks."""
    shapes, ranks = kfac.layers(10**9), 4
    assert len(shapes) == 54 and sum(i for _, i in shapes.values()) > 50_000
    by_rank = balanced({name: sum(map(cost, shape)) for name, shape in shapes.items()}, ranks)
    numel = [sum(packed_numel(size) for name in names for size in shapes[name]) for names in by_rank]
    for own in numel:
        factors = codecs.nbytes("fp16", sum(numel) - own)
        inverses = (ranks - 1) * codecs.nbytes("fp16", own)
        assert (factors + inverses) / kfac.INVERSE_STEPS <= 2.6e6


def test_a_wrong_result_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = comm.Owners.reduce

    def wrong(owners: comm.Owners, tensors: dict, codec: str = "raw") -> dict:
        found = whole(owners, tensors, codec)
        next(iter(found.values()))[3] += 1
        return found

    monkeypatch.setattr(comm.Owners, "reduce", wrong)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        job = kfac.Job({"a": (8, 5)}, ["factors"], ["raw"], 1)
        ((gloo, raw),) = kfac.work(0, 1, lambda text, done: None, job)
    finally:
        dist.destroy_process_group()
    assert gloo.wrong == 0 and len(gloo.samples) == 1
    assert raw.wrong == 1 and not raw.samples


@pytest.mark.parametrize("bad", [["--parts", "everything"], ["--codecs", "zip"], ["--largest", "3"]])
def test_a_bad_option_is_refused(bad: list[str]) -> None:
    done = commands.benchmarks("kfac", *bad)
    assert done.returncode != 0
    assert bad[1] in done.stdout + done.stderr
