"""The benchmark of all-reduce, small: the sides of codecs, how wrong results are counted, and torchrun's ranks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from dltrain_ext import codecs

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # behind what is installed

from benchmarks.allreduce_ranks import Data, count_wrong, first_if_unlike, normal, tolerance, whole_numbers  # noqa: E402

SMALL = ("-b", "4K", "-e", "4K", "-n", "2", "-w", "0")


def run(*arguments: object, launcher: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, "-m", "benchmarks", "allreduce", *SMALL, *map(str, arguments)]
    variables = os.environ | {"COLUMNS": "200"} | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=variables)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["cases"]["allreduce"]["rows"]


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_codecs_are_sides_with_an_error(op: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    chosen = ("--codecs", "raw,int8,int4,sign", "--algorithms", "ring,recursive_doubling,native,auto")
    done = run(*chosen, "--ranks", 3, "--op", op, "--segments", 2, "--json", out)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["side"]: row for row in rows_of(out)}
    lossy = [f"{algorithm} {codec}" for codec in ("int8", "int4", "sign") for algorithm in ("ring", "auto")]
    assert list(rows) == ["gloo", "gloo fp16", "ring", "recursive_doubling", "native", "auto", *lossy]
    assert all(row["check"] == "0" and len(row["samples"]) == 2 for row in rows.values())
    assert [side for side, row in rows.items() if "codec error" in row["figures"]] == ["gloo fp16", *lossy]
    errors = {side: rows[side]["figures"]["codec error"] for side in ("gloo fp16", *lossy)}
    for algorithm in ("ring", "auto"):
        int8, int4, sign = (errors[f"{algorithm} {codec}"] for codec in ("int8", "int4", "sign"))
        assert 0 < errors["gloo fp16"] < int8 < int4 < sign < 1
    wire_bytes = {side: row["figures"]["wire bytes"] for side, row in rows.items()}
    assert wire_bytes["ring sign"] < wire_bytes["ring int4"] < wire_bytes["ring int8"] < wire_bytes["ring"]
    assert wire_bytes["gloo"] is wire_bytes["native"] is None
    assert [side for side, row in rows.items() if row["ratio"] is None] == ["gloo", "gloo fp16"]
    assert "no codec but raw: recursive_doubling, native" in done.stdout


def test_a_codec_that_no_algorithm_takes_is_answered() -> None:
    done = run("--codecs", "int8", "--algorithms", "native")
    assert done.returncode == 1
    assert "no codec but raw: native" in done.stdout


def test_wrong_elements_are_counted() -> None:
    exact = torch.arange(1000).float()
    result = exact.clone()
    assert count_wrong(result, exact, 0.0) == 0
    result[3] += 1
    result[500] = float("nan")
    assert count_wrong(result, exact, 0.0) == 2
    assert count_wrong(result, exact, 1.0) == 1

    first = result.clone()
    first[7] = first[7].nextafter(torch.tensor(0.0))
    assert count_wrong(result, exact, 1.0, first) == 2


@pytest.mark.parametrize("codec", codecs.CODECS)
def test_what_a_codec_may_be_off(codec: str) -> None:
    ranks, n = 3, 1024
    data = Data.of(whole_numbers(n) if codec == "raw" else normal(n), 1, ranks)
    bound = tolerance(codec, ranks, data.magnitudes)
    result = sum(codecs.decode(codecs.encode(normal(n)(rank), codec)) for rank in range(ranks))
    if codec == "raw":
        result = data.total.clone()
    assert count_wrong(result, data.total, bound) == 0
    result[10] += 2 * bound + 0.5
    assert count_wrong(result, data.total, bound) == 1


def compare_with_the_first(rank: int, world_size: int) -> list[bool]:
    same = torch.arange(100).float()
    other = same.clone()
    if rank == 1:
        other[5] = -other[5]
    zero = torch.zeros(4)
    if rank == 2:
        zero[1] = -0.0  # equal, yet of other bits
    first, zeros = first_if_unlike(other), first_if_unlike(zero)
    return [
        first_if_unlike(same) is None,
        torch.equal(first, same),
        count_wrong(other, same, 1e9, first) == (1 if rank == 1 else 0),
        count_wrong(zero, zero, 0.0, zeros) == (1 if rank == 2 else 0),
    ]


def test_ranks_that_differ_in_a_bit_are_seen() -> None:
    assert run_ranks(3, compare_with_the_first) == [[True] * 4] * 3


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_under_torchrun_one_rank_reports(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run("--algorithms", "ring", "--json", out, "--plot", tmp_path, launcher=TORCHRUN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all_reduce sum, 2 ranks under torchrun") == 1
    assert len(re.findall(r"\b4 KiB", done.stdout)) == 1 and done.stdout.count("#wrong:") == 1
    assert [row["side"] for row in rows_of(out)] == ["gloo", "ring"]
    assert (tmp_path / "allreduce.png").exists()


def test_under_torchrun_ranks_must_not_contradict() -> None:
    done = run("--ranks", 3, RANK="1", WORLD_SIZE="2")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "--ranks 3 contradicts WORLD_SIZE=2" in done.stderr
