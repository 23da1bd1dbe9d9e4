"""The benchmarks optim and amp: every side is verified, and packages that are not installed are named."""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import commands
import pytest
import torch

from benchmarks import harness
from benchmarks.cases import optim
from benchmarks.machine import memory
from benchmarks.optim_peers import ThirdParty
from dltrain_ext import optim as ours

pytestmark = pytest.mark.needs("matplotlib", "rich")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[commands.Done, list[dict]]]:
    """Return a function that runs a benchmark with few rounds and small workloads, and returns its rows."""
    monkeypatch.setattr(
        memory, "interleave", lambda *sides, **how: harness.interleave(*sides, **how | {"seconds": 1e-9})
    )
    monkeypatch.setitem(optim.WORKLOADS, "many", lambda options: [(64,)] * 300)
    monkeypatch.setattr(optim, "QUICK", 2**13)

    def benchmark(*arguments: object) -> tuple[commands.Done, list[dict]]:
        file = tmp_path / "out.json"
        done = commands.benchmarks(*arguments, "--quick", "--json", file)
        cases = json.loads(file.read_text())["cases"].values()
        return done, [row for case in cases for row in case["rows"]]

    return benchmark


def test_optimizers(run: Callable, device: str) -> None:
    done, rows = run("optim", "--device", device, "--workloads", "many")
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
    assert missing["torchao 8-bit"] == "compiles a kernel for each shape, so it only runs in workload one"


class Rounded(torch.optim.AdamW):
    """An optimizer whose steps have a small error, like those with a state of few bits."""

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
    ("third_party", "left_out", "correct", "check"),
    [
        (ThirdParty(torch.optim.AdamW), False, True, "0.0e+00"),
        (ThirdParty(partial(torch.optim.AdamW, weight_decay=0.0)), False, False, "e-0"),
        (ThirdParty(Rounded), False, False, "e-05"),
        (ThirdParty(Rounded, lost=0.01), False, True, "0.5 %"),
        (ThirdParty(Rounded, lost=0.001), False, False, "0.5 %"),
        (ThirdParty(Rounded, formula=Rounded), False, True, "0.0e+00"),
        (ThirdParty(fail), True, True, "cannot run here: no kernel"),
        (ThirdParty(import_nothing), True, True, "not installed: pip install package"),
    ],
)
def test_a_package_is_checked_or_left_out(third_party: ThirdParty, left_out: bool, correct: bool, check: str) -> None:
    kind = replace(optim.OPTIMIZERS["adamw"], third_parties={"other": third_party})
    values = optim.make_values([(50, 40), (7,)], "cpu")
    _, row = optim.check_peer("other", kind, values, optim.stepped(kind.sides[kind.reference], values), "")
    assert (row.left_out, row.correct) == (left_out, correct)
    assert check in row.check


def test_loss_scaled_steps(run: Callable, device: str) -> None:
    done, rows = run("amp", "--optimizers", "adamw,rmsprop", "--device", device)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["side"] for row in rows if row["ours"]] == ["ours", "ours, told the norm"] * 4
    for row in rows:
        assert row["correct"] and row["figures"]["GB/s"] > 0
        assert (row["ratio"] is None) == row["ours"]


@pytest.mark.parametrize(
    ("arguments", "kind", "wrong"),
    [
        (["optim", "--optimizers", "sgd", "--workloads", "many"], ours.SGD, {"momentum": 0.5}),
        (["amp", "--workloads", "fp16"], ours.AdamW, {"eps": 0.1}),
    ],
)
def test_a_wrong_result_is_marked_and_not_timed(
    arguments: list[str], kind: type, wrong: dict[str, float], run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = kind._hyper
    monkeypatch.setattr(kind, "_hyper", lambda self, group: right(self, group) | wrong)
    done, rows = run(*arguments)
    assert done.returncode == 1 and "WRONG" in done.stdout, done.stdout + done.stderr
    for row in (row for row in rows if not row["left_out"]):
        assert row["correct"] != row["ours"]
        assert bool(row["samples"]) == row["correct"]
