"""The benchmark of the codecs, small: what it shows of each codec, and its answers to wrong results and mistakes."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dltrain_ext import codecs

pytestmark = pytest.mark.needs("matplotlib", "rich")

ROOT = Path(__file__).parents[1]
OURS = ["encode", "decode", "hop (k = 1)", "encode + feedback", "encode stochastic"]
PEERS = {
    "raw": ["torch copy_", "torch copy_ back"],
    "fp16": ["torch copy_", "torch copy_ back", "torch to", "torch to back"],
    "bf16": ["torch copy_", "torch copy_ back", "torch to", "torch to back"],
    "fp8": ["torch copy_", "torch copy_ back"],
}
BYTES = {"raw": 4, "fp16": 2, "bf16": 2, "fp8": 1.03125, "int8": 1.015625, "int4": 0.53125, "sign": 0.140625}


def run(*arguments: object, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The benchmark in a process of its own, after `before` (a line of Python)."""
    script = f"import sys; {before or 'pass'}; from benchmarks.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "codec", "--quick", "-n", "5000", *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "200"} | environment,
    )


def test_every_codec_is_verified_and_timed(tmp_path: Path, device: str) -> None:
    done = run("--device", device, "--json", tmp_path / "out.json", "--plot", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WRONG" not in done.stdout
    assert (tmp_path / "codec.png").stat().st_size > 1000
    table = json.loads((tmp_path / "out.json").read_text())["cases"]["codec"]
    assert all(row["correct"] for row in table["rows"])
    for codec in codecs.CODECS:
        rows = [row for row in table["rows"] if row["workload"] == codec]
        assert [row["side"] for row in rows] == OURS + PEERS.get(codec, [])
        assert [row["ours"] for row in rows] == [row["ratio"] is None for row in rows]
        assert all(len(row["samples"]) >= 3 and row["figures"]["GB/s"] > 0 for row in rows)

    summary = {row["side"]: row["figures"] for row in table["rows"] if row["workload"] == table["summary"]}
    assert tuple(summary) == codecs.CODECS
    assert {codec: figures["bytes/element"] for codec, figures in summary.items()} == BYTES
    for data in ("normal", "heavy", "real"):
        errors = {codec: figures[f"rms error, {data}"] for codec, figures in summary.items()}
        assert (
            errors["raw"] == 0 < errors["fp16"] < errors["bf16"] < errors["int8"] < errors["int4"] < errors["sign"] < 1
        )
        assert errors["bf16"] < errors["fp8"] < errors["int4"]
    # A sign times the mean magnitude loses the variance of the magnitude: of a normal distribution 1 - 2 / pi.
    assert summary["sign"]["rms error, normal"] == pytest.approx(math.sqrt(1 - 2 / math.pi), rel=0.01)


HOOK = "from dltrain_ext import _ops, codecs; decode, encode_sum_ = codecs.decode, _ops.encode_sum_; "


@pytest.mark.parametrize(
    ("damage", "wrong"),
    [
        ("codecs.decode = lambda *a: decode(*a).mul_(1.5)", [*OURS, "bf16"]),
        ("_ops.encode_sum_ = lambda *a, **k: None", [*OURS, "bf16"]),
        ("_ops.encode_sum_ = lambda own, received, *a, **k: encode_sum_(own, [], *a, **k)", ["hop (k = 1)"]),
        (
            "_ops.encode_sum_ = lambda *a, residual, **k: "
            "encode_sum_(*a, residual=None if residual is None else residual.clone(), **k)",
            ["encode + feedback"],
        ),
        (
            "_ops.encode_sum_ = lambda own, *a, stochastic, **k: "
            "encode_sum_(own * (1.01 if stochastic else 1), *a, stochastic=stochastic, **k)",
            ["encode stochastic"],
        ),
    ],
    ids=["decodes something else", "writes nothing", "forgets the received", "forgets the lost", "rounds too far"],
)
def test_a_wrong_side_is_shown_and_not_timed(damage: str, wrong: list[str], tmp_path: Path) -> None:
    done = run("--codecs", "bf16", "--json", tmp_path / "out.json", before=HOOK + damage)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("WRONG") == len(wrong)
    rows = json.loads((tmp_path / "out.json").read_text())["cases"]["codec"]["rows"]
    assert [row["side"] for row in rows if not row["correct"]] == wrong
    assert [row["side"] for row in rows if not row["samples"]] == [side for side in wrong if side in OURS] + ["bf16"]


def test_without_the_data_set_the_real_gradients_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "sklearn.py").write_text("raise ModuleNotFoundError('gone', name='sklearn')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run("--codecs", "int8", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert "rms error, heavy" in done.stdout and "rms error, real" not in done.stdout
    assert "real gradients are left out: no module sklearn" in done.stdout


def test_an_unknown_codec_is_answered_with_the_valid_ones() -> None:
    done = run("--codecs", "int9")
    assert done.returncode == 2
    assert all(name in done.stderr for name in ("int9", *codecs.CODECS))
