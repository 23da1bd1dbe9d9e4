"""The large-batch example: a short run, its learning rates, its batch statistics, and its summary."""

import copy
import importlib
import itertools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import commands
import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.needs("matplotlib", "rich", "sklearn")

SCRIPT = Path(__file__).parents[2] / "examples" / "large_batch.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    threads = torch.get_num_threads()
    yield importlib.import_module("large_batch")
    torch.set_num_threads(threads)


def test_a_short_run(tmp_path: Path) -> None:
    picture, json_file = tmp_path / "new" / "errors.png", tmp_path / "runs.json"
    short = "--epochs 2 --warmup 1 --seeds 2 --optimizers lamb adamw --batches 1024 512 --base-batch 512"
    done = commands.example("large_batch.py", *short.split(), "--out", picture, "--json", json_file, COLUMNS="100")
    assert done.returncode == 0, done.stderr
    assert not done.stderr

    lines = done.stdout.splitlines()
    assert any("scaling" in line and "LAMB" in line and "AdamW" in line for line in lines)
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    cells = [("linear", 512), ("linear", 1024), ("sqrt", 512), ("sqrt", 1024)]
    steps = {512: "6", 1024: "4"}
    assert [row[:4] for row in rows] == [["none", rule, str(batch), steps[batch]] for rule, batch in cells]
    assert sum("LAMB (sqrt) against AdamW (sqrt): " in line for line in lines) == 1
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

    runs = json.loads(json_file.read_text())["runs"]
    got = {(run["rule"], run["optimizer"], run["batch"], run["seed"]): run for run in runs}
    assert len(got) == len(runs)
    assert set(got) == {
        (rule, name, batch, seed) for rule, batch in cells for name in ("lamb", "adamw") for seed in (0, 1)
    }
    assert all(0 <= run["accuracy"] <= 1 for run in runs)
    assert len({run["accuracy"] for run in runs}) > 1
    for name in ("lamb", "adamw"):
        lr = {cell: got[cell[0], name, cell[1], 0]["lr"] for cell in cells}
        assert lr["linear", 1024] == 2 * lr["linear", 512]
        assert lr["sqrt", 1024] == pytest.approx(math.sqrt(2) * lr["sqrt", 512])
        assert lr["linear", 512] == lr["sqrt", 512]
    for row in rows:
        for name, cell in zip(("lamb", "adamw"), row[4:], strict=True):
            mean = sum(got[row[1], name, int(row[2]), seed]["accuracy"] for seed in (0, 1)) / 2
            assert float(cell.split()[0]) == pytest.approx(100 * mean, abs=0.006)


def test_statistics_presets_and_one_seed(tmp_path: Path) -> None:
    short = (
        "--optimizers sgd lars --preset larc --lars-lr 0.03 --statistics ghost sync --rules sqrt --batches 512 "
        "--seeds 1 --epochs 2 --warmup 1 --validation"
    )
    said = commands.example("large_batch.py", *short.split(), "--out", tmp_path / "errors.png", COLUMNS="100").stdout
    assert "validation accuracy" in said and "LARS (larc)" in said and "two seeds" in said
    assert "AdamW" not in said and "±" not in said
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in said.splitlines() if line.startswith("│")]
    assert [row[:3] for row in rows] == [["ghost", "sqrt", "512"], ["sync", "sqrt", "512"]]


def check_ghost_statistics(rank: int, world_size: int) -> None:
    """Compare DDP's outputs, gradients and buffers with those of one process that has the batch of all ranks."""
    sys.path.insert(0, str(SCRIPT.parent))
    example = importlib.import_module("large_batch")
    torch.manual_seed(0)
    images = 3 + 2 * torch.randn(2 * world_size * 5, 1, 8, 8)  # two steps of five images on each rank
    images.unflatten(0, (2, world_size, 5))[:, 0] *= 4  # so that the ranks' statistics differ
    labels = torch.arange(len(images)) % 10
    model = example.TASKS["digits"]().model()
    ghost = example.with_statistics(copy.deepcopy(model), "ghost", 5)
    layers = [
        [layer, nn.BatchNorm2d(layer.out_channels)] if isinstance(layer, nn.Conv2d) else [layer] for layer in model
    ]
    replica = DistributedDataParallel(nn.Sequential(*itertools.chain.from_iterable(layers)))
    for step in range(2):
        batch = slice(10 * step, 10 * (step + 1))
        mine = slice(10 * step + 5 * rank, 10 * step + 5 * (rank + 1))
        outputs = ghost(images[batch])
        own = replica(images[mine])
        torch.testing.assert_close(own, outputs[5 * rank : 5 * (rank + 1)], rtol=1e-4, atol=1e-5)
        example.loss(outputs, labels[batch]).backward()
        example.loss(own, labels[mine]).backward()
    for ours, theirs in zip(ghost.parameters(), replica.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    ghost.eval()
    replica.eval()
    with torch.inference_mode():
        torch.testing.assert_close(ghost(images), replica(images), rtol=1e-4, atol=1e-5)
    if rank == 0:
        for ours, theirs in zip(ghost.buffers(), replica.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_ghost_statistics_are_those_of_ddp() -> None:
    run_ranks(2, check_ghost_statistics)


def test_synchronized_statistics_are_those_of_the_batch(example: ModuleType) -> None:
    images = torch.randn(12, 3, 4, 4)
    images[:6] += 2.0  # so that the halves differ
    (ghost,), (sync,) = (
        [layer for layer in example.with_statistics([nn.Conv2d(3, 3, 1)], kind, 6) if not isinstance(layer, nn.Conv2d)]
        for kind in ("ghost", "sync")
    )
    torch.testing.assert_close(sync(images), nn.BatchNorm2d(3)(images))
    halves = torch.cat([nn.BatchNorm2d(3)(half) for half in images.split(6)])
    torch.testing.assert_close(ghost(images), halves)
    assert (ghost(images) - sync(images)).abs().max() > 0.1
    assert len(example.with_statistics([nn.Conv2d(3, 3, 1)], "none", 6)) == 1


def test_a_batch_that_does_not_divide_has_even_replicas(example: ModuleType) -> None:
    images = torch.randn(10, 2, 3, 3)
    parts = images.tensor_split([4, 7])  # 10 images, at most 4 each: 4, 3, 3
    expected = torch.cat([nn.BatchNorm2d(2)(part) for part in parts])
    torch.testing.assert_close(example.GhostBatchNorm2d(2, 4)(images), expected)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 32), ("sqrt", math.sqrt(32)), ("none", 1)])
def test_scaling_rule(example: ModuleType, rule: str, factor: float) -> None:
    assert example.scaled_lr(0.03, 512, 16, rule) == pytest.approx(0.03 * factor)
    assert example.scaled_lr(0.03, 16, 16, rule) == 0.03


@pytest.mark.parametrize(("base_lr", "lr", "start"), [(0.1, 0.8, 0.1), (0.1, 0.1, 0.1), (0.1, 0.05, 0.05)])
def test_warm_up_then_polynomial_decay(example: ModuleType, base_lr: float, lr: float, start: float) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr)
    warmup, steps = 4, 12
    schedule = example.schedule(optimizer, base_lr, warmup, steps)
    got = []
    for _ in range(steps + 1):
        got.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    climb = [start + (lr - start) * step / warmup for step in range(warmup)]
    decay = [lr * (1 - step / (steps - warmup)) ** 2 for step in range(steps - warmup + 1)]
    assert got == pytest.approx(climb + decay)


def around(mean: float) -> list[float]:
    """Return scores with a standard deviation of 0.01."""
    return [mean - 0.01, mean, mean + 0.01]


def test_summary_says_where_lars_and_lamb_help(example: ModuleType) -> None:
    linear = {
        "sgd": {16: around(0.95), 64: around(0.95), 256: around(0.5), 512: around(0.1)},
        "lars": {batch: around(0.9) for batch in (16, 64, 256, 512)},
        "adamw": {batch: around(0.99) for batch in (16, 64, 256, 512)},  # not its published rule
        "lamb": {batch: around(0.0) for batch in (16, 64, 256, 512)},
    }
    sqrt = {
        "sgd": {batch: around(0.99) for batch in (16, 64, 256, 512)},
        "lars": {batch: around(0.99) for batch in (16, 64, 256, 512)},
        "adamw": {16: around(0.905), 64: around(0.92), 256: around(0.895), 512: around(0.88)},
        "lamb": {16: around(0.955), 64: around(0.9), 256: around(0.9), 512: around(0.95)},
    }
    cells = {("none", "linear"): linear, ("none", "sqrt"): sqrt}
    rivals = "the better of SGD (linear) and AdamW (sqrt)"
    assert example.summary(cells) == [
        f"No normalization: LARS (linear) against {rivals}: ahead by more than a standard deviation at batch 512; "
        "behind by more than a standard deviation at batch 16, 64; within a standard deviation at batch 256.",
        f"No normalization: LAMB (sqrt) against {rivals}: ahead by more than a standard deviation at batch 512; "
        "behind by more than a standard deviation at batch 64; within a standard deviation at batch 16, 256.",
    ]
    (lars, lamb) = example.summary({("none", "linear"): linear})
    assert "LARS (linear) against the better of SGD (linear) and AdamW (linear): behind" in lars
    assert "LAMB (linear) against" in lamb

    def only(*names: str) -> dict[tuple[str, str], dict[str, dict[int, list[float]]]]:
        return {("none", "linear"): {name: linear[name] for name in names}}

    assert example.summary(only("sgd", "lars"))[0].startswith("No normalization: LARS (linear) against SGD (linear): ")
    for names in (["lars", "lamb"], ["sgd", "adamw"], ["lars"]):
        assert example.summary(only(*names)) == ["To say where LARS or LAMB helps, run one of them and SGD or AdamW."]
    assert "two seeds" in example.summary({("none", "linear"): {"sgd": {16: [0.9]}, "lars": {16: [0.8]}}})[0]


def test_summary_compares_ghost_and_synchronized_statistics(example: ModuleType) -> None:
    cells = {
        ("ghost", "linear"): {"sgd": {64: around(0.9), 512: around(0.8)}},
        ("sync", "linear"): {"sgd": {64: around(0.9), 512: around(0.9)}},
    }
    assert example.summary(cells) == [
        "Ghost against synchronized statistics, SGD (linear): behind by more than a standard deviation at batch 512; "
        "within a standard deviation at batch 64."
    ]


def test_standard_deviations_are_pooled(example: ModuleType) -> None:
    wide, narrow = [0.8, 0.9, 1.0], [0.84, 0.84, 0.84]  # standard deviations 0.1 and 0; pooled 0.0707
    assert example.compare(wide, narrow) == "within"
    assert example.compare(wide, [0.82] * 3) == "ahead"
    assert example.compare([0.82] * 3, wide) == "behind"
    assert example.compare(narrow, narrow) == "within"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--batches 0", ("--batches", "0 is below 1")),
        ("--batches 16 5000", ("--batches", "5000", "1437")),
        ("--seeds 0", ("--seeds", "0 is below 1")),
        ("--epochs 3 --warmup 3", ("--warmup", "3")),
        ("--lars-lr 0", ("--lars-lr", "0")),
        ("--optimizers sgd nonsense", ("--optimizers", "nonsense", "sgd", "lars", "adamw", "lamb")),
        ("--preset nonsense", ("--preset", "nonsense", "paper", "tensorflow", "larc")),
        ("--rules nonsense", ("--rules", "nonsense", "linear", "sqrt", "none")),
        ("--statistics nonsense", ("--statistics", "nonsense", "none", "ghost", "sync")),
        ("--statistics ghost --preset larc", ("--preset larc", "--lars-lr", "batch normalization")),
        ("--replica-batch 0", ("--replica-batch", "0 is below 1")),
    ],
)
def test_the_error_names_the_wrong_option(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    named: tuple[str, ...],
) -> None:
    monkeypatch.setattr(sys, "argv", ["large_batch.py", *arguments.split()])
    with pytest.raises(SystemExit) as end:
        example.main()
    printed = capsys.readouterr().err.splitlines()
    answer = printed[-1] if printed else end.value.code  # the interpreter would print a text code
    assert end.value.code
    assert all(word in answer for word in named), answer
