"""Small runs of the benchmark codec: its rows for each codec, and its handling of wrong results and options."""

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import commands
import pytest

from benchmarks import harness
from benchmarks.cases import codec
from benchmarks.machine import memory
from dltrain_ext import _ops, codecs

pytestmark = pytest.mark.needs("matplotlib", "rich")

OURS = ["encode", "decode", "hop (k = 1)", "encode + feedback", "encode stochastic"]
PEERS = {
    "raw": ["torch copy_", "torch copy_ back"],
    "fp16": ["torch copy_", "torch copy_ back", "torch to", "torch to back"],
    "bf16": ["torch copy_", "torch copy_ back", "torch to", "torch to back"],
    "fp8": ["torch copy_", "torch copy_ back"],
}
BYTES = {"raw": 4, "fp16": 2, "bf16": 2, "fp8": 1.03125, "int8": 1.015625, "int4": 0.53125, "sign": 0.140625}


@pytest.fixture(autouse=True)
def few_rounds_and_little_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "SAMPLE", 2**17)
    monkeypatch.setattr(
        codec, "interleave", lambda *sides, **how: harness.interleave(*sides, **how | {"seconds": 1e-9})
    )


def run(*arguments: object) -> commands.Done:
    return commands.benchmarks("codec", "--quick", "-n", 5000, *arguments)


def test_every_codec_is_verified_and_timed(tmp_path: Path, device: str) -> None:
    done = run("--device", device, "--json", tmp_path / "out.json", "--plot", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WRONG" not in done.stdout
    assert (tmp_path / "codec.png").stat().st_size > 1000
    table = json.loads((tmp_path / "out.json").read_text())["cases"]["codec"]
    assert all(row["correct"] for row in table["rows"])
    for name in codecs.CODECS:
        rows = [row for row in table["rows"] if row["workload"] == name]
        assert [row["side"] for row in rows] == OURS + PEERS.get(name, [])
        assert [row["ours"] for row in rows] == [row["ratio"] is None for row in rows]
        assert all(len(row["samples"]) >= 3 and row["figures"]["GB/s"] > 0 for row in rows)

    summary = {row["side"]: row["figures"] for row in table["rows"] if row["workload"] == table["summary"]}
    assert tuple(summary) == codecs.CODECS
    assert {name: figures["bytes/element"] for name, figures in summary.items()} == BYTES
    for data in ("normal", "heavy", "real"):
        errors = {name: figures[f"rms error, {data}"] for name, figures in summary.items()}
        assert (
            errors["raw"] == 0 < errors["fp16"] < errors["bf16"] < errors["int8"] < errors["int4"] < errors["sign"] < 1
        )
        assert errors["bf16"] < errors["fp8"] < errors["int4"]
    # The codec sign loses the variance of the magnitude, which is 1 - 2 / pi for a normal distribution.
    assert summary["sign"]["rms error, normal"] == pytest.approx(math.sqrt(1 - 2 / math.pi), rel=0.01)


def scale(decode: Callable) -> Callable:
    return lambda *given: decode(*given).mul_(1.5)


def write_nothing(encode: Callable) -> Callable:
    return lambda *given, **options: None


def ignore_the_received(encode: Callable) -> Callable:
    return lambda own, received, *rest, **options: encode(own, [], *rest, **options)


def drop_the_residual(encode: Callable) -> Callable:
    return lambda *given, residual, **options: encode(
        *given, residual=None if residual is None else residual.clone(), **options
    )


def round_too_far(encode: Callable) -> Callable:
    return lambda own, *rest, stochastic, **options: encode(
        own * (1.01 if stochastic else 1), *rest, stochastic=stochastic, **options
    )


@pytest.mark.parametrize(
    ("module", "name", "damage", "wrong"),
    [
        (codecs, "decode", scale, [*OURS, "bf16"]),
        (_ops, "encode_sum_", write_nothing, [*OURS, "bf16"]),
        (_ops, "encode_sum_", ignore_the_received, ["hop (k = 1)"]),
        (_ops, "encode_sum_", drop_the_residual, ["encode + feedback"]),
        (_ops, "encode_sum_", round_too_far, ["encode stochastic"]),
    ],
    ids=["decodes something else", "writes nothing", "ignores the received", "drops the residual", "rounds too far"],
)
def test_a_wrong_side_is_shown_and_not_timed(
    module: ModuleType,
    name: str,
    damage: Callable[[Callable], Callable],
    wrong: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, name, damage(getattr(module, name)))
    done = run("--codecs", "bf16", "--json", tmp_path / "out.json")
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("WRONG") == len(wrong)
    rows = json.loads((tmp_path / "out.json").read_text())["cases"]["codec"]["rows"]
    assert [row["side"] for row in rows if not row["correct"]] == wrong
    assert [row["side"] for row in rows if not row["samples"]] == [side for side in wrong if side in OURS] + ["bf16"]


def test_without_the_data_set_the_real_gradients_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    commands.hide(monkeypatch, "sklearn")
    monkeypatch.delitem(sys.modules, "examples.tasks", raising=False)
    done = run("--codecs", "int8")
    assert done.returncode == 0, done.stderr
    assert "rms error, heavy" in done.stdout and "rms error, real" not in done.stdout
    assert "real gradients are left out: no module sklearn" in done.stdout


def test_the_error_for_an_unknown_codec_lists_the_valid_ones() -> None:
    done = run("--codecs", "int9")
    assert done.returncode == 2
    assert all(name in done.stderr for name in ("int9", *codecs.CODECS))


def test_the_cache_of_a_host_counts_for_the_cpus_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert 0 < memory.last_level_cache() <= 2**24
