"""Small runs of the benchmark allreduce: its sides, two levels, the count of wrong results, and torchrun's ranks."""

import json
import re
import sys
from pathlib import Path
from statistics import median
from typing import Any

import commands
import pytest
import torch
from ranks import ROOT, run_ranks

from benchmarks import deepspeed_peer
from benchmarks.__main__ import main, parse
from benchmarks.allreduce_ranks import Result, Side
from benchmarks.cases.allreduce import DEFAULT, left_out, make_row, make_sides
from dltrain_ext import codecs, comm
from dltrain_ext.selftest.ranks import nccl_variables
from dltrain_ext.selftest.sums import Data, count_wrong, first_if_unlike, normal, tolerance, whole_numbers

pytestmark = pytest.mark.needs("matplotlib", "rich")

SMALL = ("-b", "4K", "-e", "4K", "-n", "2", "-w", "0")


def run(*arguments: object, **environment: str) -> commands.Done:
    return commands.benchmarks("allreduce", *SMALL, *arguments, **environment)


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows = json.loads(path.read_text())["cases"]["allreduce"]["rows"]
    return [row for row in rows if not row["left_out"]]


def names_of_sides(*arguments: str) -> list[str]:
    options, _ = parse(["allreduce", *arguments])
    return [side.name for side in make_sides(options, options.algorithms or DEFAULT[options.device])]


def test_deepspeed_is_a_peer_where_it_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("several lines\nno compiler")

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(deepspeed_peer, "find_spec", lambda name: None)
    assert left_out("cpu")[-1].check == "not installed: pip install deepspeed"
    monkeypatch.setattr(deepspeed_peer, "find_spec", lambda name: name)
    monkeypatch.setattr(deepspeed_peer, "_load", fails)
    assert left_out("cpu")[-1].check == "cannot be compiled: no compiler"
    assert "deepspeed shm" not in names_of_sides("--algorithms", "ring")
    monkeypatch.setattr(deepspeed_peer, "_load", lambda: None)
    assert names_of_sides("--algorithms", "ring") == ["gloo", "deepspeed shm", "ring", "ring, 2 levels"]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert left_out("cpu")[-1].check == "its ranks have to be on one host"


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_sides_with_a_codec_report_its_error(op: str, tmp_path: Path) -> None:
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
    assert "these algorithms only take the codec raw: recursive_doubling, native" in done.stdout


def test_percent_of_line_is_computed_from_wire_bytes(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = ("-b", "64K", "-e", "128K", "-f", "2")
    done = run(*sizes, "--ranks", 2, "--algorithms", "ring", "--codecs", "raw,fp16", "--json", out)
    assert done.returncode == 0, done.stdout + done.stderr
    short, long = ([row for row in rows_of(out) if row["x"] == size << 10] for size in (64, 128))
    assert not any("% of line" in row["figures"] for row in short)  # short messages are limited by latency
    (line,) = {row["figures"]["% of line"] * median(row["samples"]) / row["figures"]["wire bytes"] for row in long[2:3]}
    for row in long:
        sent = row["figures"]["wire bytes"]
        share = line * sent / median(row["samples"]) if sent else None
        assert row["figures"]["% of line"] == (share and pytest.approx(share))
    assert [(row["side"], row["against"]) for row in long] == [
        ("gloo", ""),
        ("gloo fp16", "ring fp16"),
        ("ring", "gloo"),
        ("ring fp16", "gloo"),
    ]
    assert "% of line: bytes per second that a rank sends" in done.stdout


def test_a_codec_that_no_algorithm_accepts_is_an_error() -> None:
    done = run("--codecs", "int8", "--algorithms", "native")
    assert done.returncode == 1
    assert "these algorithms only take the codec raw: native" in done.stdout


def test_each_number_of_levels_is_a_side() -> None:
    chosen = ("--algorithms", "ring,native", "--codecs", "raw,int8")
    both = ["ring", "ring, 2 levels", "native", "native, 2 levels", "ring int8", "ring int8, 2 levels"]
    assert names_of_sides(*chosen) == ["gloo", "gloo fp16", *both]
    assert names_of_sides(*chosen, "--levels", "1,2") == ["gloo", "gloo fp16", *both]
    assert names_of_sides(*chosen, "--levels", "2") == ["gloo", "gloo fp16", *both[1::2]]
    assert names_of_sides(*chosen, "--levels", "1") == ["gloo", "gloo fp16", *both[::2]]


def test_on_cuda_the_peer_is_nccl_and_each_transport_is_a_side() -> None:
    chosen = ("--device", "cuda", "--levels", "1")
    assert names_of_sides(*chosen) == ["nccl", *comm.ALGORITHMS, "auto", "native"]
    ring = (*chosen, "--algorithms", "ring", "--codecs", "int8")
    assert names_of_sides(*ring) == ["nccl", "nccl fp16", "nccl bf16", "ring int8"]
    transports = ["ring int8", "ring int8 over nccl", "ring int8 over c10d"]
    assert names_of_sides(*ring, "--transport", "auto,nccl,c10d")[3:] == transports
    two = names_of_sides(*ring[:2], *ring[4:], "--levels", "2", "--transport", "c10d")
    assert two[3:] == ["ring int8 over c10d, 2 levels"]


def test_both_levels_over_loopback(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    chosen = ("--algorithms", "ring,direct", "--codecs", "raw,int8")
    done = run(*chosen, "--ranks", 4, "--ranks-per-host", 2, "--levels", "1,2", "--json", out)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["side"]: row for row in rows_of(out)}
    flat = ["ring", "direct", "ring int8", "direct int8"]
    assert list(rows) == ["gloo", "gloo fp16", *(side for name in flat for side in (name, f"{name}, 2 levels"))]
    assert all(row["check"] == "0" and len(row["samples"]) == 2 for row in rows.values())
    for name in flat:  # one level sends 2 * 3/4 of the message; two levels send 2 * 1/2 of each half between hosts
        sent, between = (rows[side]["figures"]["wire bytes"] for side in (name, f"{name}, 2 levels"))
        assert sent == 3 * between
    assert "wire bytes are those between hosts only" in done.stdout


@pytest.mark.parametrize("arguments", [("--levels", "2"), ("--ranks-per-host", "2")])
def test_two_levels_without_several_hosts_are_an_error(arguments: tuple[str, ...]) -> None:
    done = run(*arguments, "--ranks", 2, "--algorithms", "ring")
    assert done.returncode == 1
    assert "two levels are not possible: they need several hosts" in done.stdout


@pytest.mark.xdist_group("machine")
def test_hosts_are_detected_and_used_for_two_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands.skip_without_hosts()
    out = tmp_path / "out.json"
    monkeypatch.chdir(ROOT)
    hosts = ("hosts", "--hosts", "2", "--per-host", "2", "--rate", "none", "--", sys.executable)
    command = ("-m", "benchmarks", "allreduce", *SMALL, "--algorithms", "ring", "--json", str(out))
    assert main([*hosts, *command]) == 0
    assert [(row["side"], row["check"]) for row in rows_of(out)] == [
        ("gloo", "0"),
        ("ring", "0"),
        ("ring, 2 levels", "0"),
    ]


def test_the_option_transport_depends_on_the_device() -> None:
    done = run("--transport", "nccl")
    assert done.returncode == 1
    assert "--transport: expected names out of auto, shm, gloo, got nccl" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_device_cuda_without_a_gpu_is_an_error() -> None:
    done = run("--device", "cuda")
    assert done.returncode == 2
    assert re.search(
        "--device cuda: (this build of dltrain_ext is without CUDA|torch sees no CUDA device)", done.stderr
    )


def test_nccl_variables_make_ranks_on_one_gpu_separate_hosts() -> None:
    assert nccl_variables(1, ["a", "b", "c"]) == {}
    variables = {"NCCL_HOSTID": "rank1", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
    assert nccl_variables(1, ["a", "b", "a"]) == variables
    assert "NCCL_SOCKET_IFNAME" not in nccl_variables(1, ["a", "b", "a"], one_host=False)


@pytest.mark.parametrize(
    ("side", "nbytes", "device", "ticks"),
    [
        (Side("ring", "int8"), 4096, "cuda", 6),
        (Side("direct"), 4096, "cuda", 2),
        (Side("ring"), 16 << 20, "cuda", None),
        (Side("ring"), 4096, "cpu", None),
        (Side("ring", levels=2), 4096, "cuda", None),
        (Side("auto"), 4096, "cuda", None),
        (Side("nccl"), 4096, "cuda", None),
    ],
)
def test_time_of_a_tick(side: Side, nbytes: int, device: str, ticks: int | None) -> None:
    row = make_row(Result(nbytes, side, 0, None, None, [3e-6]), 4, device)
    assert row.figures.get("us/tick") == (ticks and pytest.approx(3 / ticks))


@pytest.mark.gpu
def test_on_gpus(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    chosen = ("--algorithms", "ring,native", "--codecs", "raw,int8", "--transport", "nccl,c10d", "--levels", "1,2")
    done = run("--device", "cuda", *chosen, "--ranks", 4, "--ranks-per-host", 2, "--json", out)
    if done.returncode and torch.cuda.device_count() < 4:
        pytest.skip(f"NCCL may not connect ranks that share a GPU: {done.stdout}{done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["side"] for row in rows_of(out)][:3] == ["nccl", "nccl fp16", "nccl bf16"]
    assert all(row["check"] == "0" for row in rows_of(out))


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
def test_the_tolerance_of_a_codec(codec: str) -> None:
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
        zero[1] = -0.0  # equal, but with different bits
    first, zeros = first_if_unlike(other), first_if_unlike(zero)
    return [
        first_if_unlike(same) is None,
        torch.equal(first, same),
        count_wrong(other, same, 1e9, first) == (1 if rank == 1 else 0),
        count_wrong(zero, zero, 0.0, zeros) == (1 if rank == 2 else 0),
    ]


def test_ranks_that_differ_in_a_bit_are_detected() -> None:
    assert run_ranks(3, compare_with_the_first) == [[True] * 4] * 3


def test_under_torchrun_one_rank_reports(tmp_path: Path) -> None:
    """This test runs torchrun itself; other tests only set its variables."""
    out = tmp_path / "out.json"
    options = ("allreduce", *SMALL, "--algorithms", "ring", "--json", out, "--plot", tmp_path)
    done = commands.torchrun(2, "-m", "benchmarks", *options, cwd=ROOT, COLUMNS="200")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all_reduce sum, 2 ranks under torchrun") == 1
    assert len(re.findall(r"\b4 KiB", done.stdout)) == 1 and done.stdout.count("#wrong:") == 1
    assert [row["side"] for row in rows_of(out)] == ["gloo", "ring"]
    assert (tmp_path / "allreduce.png").exists()


def test_the_option_ranks_must_not_contradict_torchrun() -> None:
    done = run("--ranks", 3, RANK="1", WORLD_SIZE="2")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "--ranks 3 contradicts WORLD_SIZE=2" in done.stderr
