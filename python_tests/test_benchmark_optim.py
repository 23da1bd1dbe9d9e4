"""The benchmarks of the optimizers and of loss-scaled steps: every side is verified, who is missing is named."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # behind what is installed

from benchmarks.cases import optim  # noqa: E402
from benchmarks.optim_peers import Stranger  # noqa: E402

pytestmark = pytest.mark.needs("matplotlib", "rich")


def run(
    tmp_path: Path, *arguments: object, before: str = "pass"
) -> tuple[subprocess.CompletedProcess[str], list[dict]]:
    """The benchmark in a process of its own, after `before` (a line of Python), and its rows."""
    script = f"import sys; {before}; from benchmarks.__main__ import main; sys.exit(main(sys.argv[1:]))"
    file = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments), "--quick", "--seconds", "1", "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "200"},
    )
    cases = json.loads(file.read_text())["cases"].values() if file.exists() else []
    return done, [row for case in cases for row in case["rows"]]


def test_optimizers(tmp_path: Path, device: str) -> None:
    done, rows = run(tmp_path, "optim", "--device", device, "--workloads", "many")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(row["correct"] for row in rows)
    assert all(row["left_out"] != bool(row["samples"]) for row in rows)
    timed = [(row["workload"].split()[0], row["side"]) for row in rows if row["samples"]]
    torchs = ["torch fused", "torch foreach", "torch for-loop"]
    for name, peers in (("AdamW", torchs), ("SGD", torchs), ("LARS", ["torch by hand"])):
        assert {(name, side) for side in ["ours", *peers]} <= set(timed)
    missing = {row["side"]: row["check"] for row in rows if not row["samples"]}
    for side in ("timm", "pytorch_optimizer", "bitsandbytes", "deepspeed"):
        if not importlib.util.find_spec(side) and (device == "cpu" or side != "deepspeed"):
            assert missing[side] == f"not installed: pip install {side}"
    assert missing["torchao 8-bit"] == "compiles a kernel for each shape: in workload one alone"


class Rounded(torch.optim.AdamW):
    """Whose steps are a little off, like those of a state in few bits."""

    @torch.no_grad()
    def step(self) -> None:
        before = [p.clone() for p in self.param_groups[0]["params"]]
        super().step()
        for p, start in zip(self.param_groups[0]["params"], before, strict=True):
            p.copy_(start + 1.005 * (p - start))


def fail(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    raise RuntimeError("no kernel\nfor this processor")


def import_nothing(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    raise ModuleNotFoundError(name="package.part")


@pytest.mark.parametrize(
    ("stranger", "left_out", "correct", "check"),
    [
        (Stranger(torch.optim.AdamW), False, True, "0.0e+00"),
        (Stranger(partial(torch.optim.AdamW, weight_decay=0.0)), False, False, "e-0"),
        (Stranger(Rounded), False, False, "e-05"),
        (Stranger(Rounded, lost=0.01), False, True, "0.5 %"),
        (Stranger(Rounded, lost=0.001), False, False, "0.5 %"),
        (Stranger(Rounded, formula=Rounded), False, True, "0.0e+00"),
        (Stranger(fail), True, True, "cannot run here: no kernel"),
        (Stranger(import_nothing), True, True, "not installed: pip install package"),
    ],
)
def test_a_package_is_checked_or_left_out(stranger: Stranger, left_out: bool, correct: bool, check: str) -> None:
    kind = replace(optim.OPTIMIZERS["adamw"], strangers={"other": stranger})
    values = optim.make_values([(50, 40), (7,)], "cpu")
    _, row = optim.meet("other", kind, values, optim.stepped(kind.sides[kind.reference], values), "")
    assert (row.left_out, row.correct) == (left_out, correct)
    assert check in row.check


def test_loss_scaled_steps(tmp_path: Path, device: str) -> None:
    done, rows = run(tmp_path, "amp", "--device", device)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["side"] for row in rows if row["ours"]] == ["ours", "ours, told the norm"] * 2
    for row in rows:
        assert row["correct"] and row["figures"]["GB/s"] > 0
        assert (row["ratio"] is None) == row["ours"]


SPOIL = "from dltrain_ext.optim import {0} as O; h = O._hyper; O._hyper = lambda self, group: h(self, group) | {1}"


@pytest.mark.parametrize(
    ("arguments", "spoil"),
    [
        (["optim", "--optimizers", "sgd", "--workloads", "many"], SPOIL.format("SGD", {"momentum": 0.5})),
        (["amp", "--workloads", "fp16"], SPOIL.format("AdamW", {"eps": 0.1})),
    ],
)
def test_a_wrong_result_is_marked_and_not_timed(arguments: list[str], spoil: str, tmp_path: Path) -> None:
    done, rows = run(tmp_path, *arguments, before=spoil)
    assert done.returncode == 1 and "WRONG" in done.stdout, done.stdout + done.stderr
    for row in (row for row in rows if not row["left_out"]):
        assert row["correct"] != row["ours"]
        assert bool(row["samples"]) == row["correct"]
