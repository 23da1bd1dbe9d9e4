"""The short examples, run with few steps."""

import re
from pathlib import Path

import pytest
import torch
from ranks import run_example

pytestmark = pytest.mark.needs("matplotlib", "rich", "sklearn")

FOLDER = Path(__file__).parents[2] / "examples"

PERCENT = r"\d+\.\d"

# The arguments of each example, and the numbers that it prints, in their order, as regular expressions.
EXAMPLES = {
    "accumulation.py": ("--steps 3", ["12", "3", "25.6", "32", PERCENT]),
    "activation_checkpointing.py": ("--steps 4", [PERCENT, "25.6", "32"]),
    "autocast.py": ("--steps 4 --dtype fp16", [PERCENT, "25.6", "32", "65536", "0"]),
    "clipping.py": ("--steps 4", [PERCENT, PERCENT, r"0|\de-\d+"]),
    "compiled.py": ("--steps 4 --backend aot_eager", [PERCENT, "25.6", "32"]),
    "compiled_step.py": ("--steps 4 --backend aot_eager", [PERCENT, r"\d\.\d{3}", r"\d+\.\d{3}"]),
    "diloco.py": ("--steps 8 --sync-every 4 --delay 1", [PERCENT + r"\d\d", "0", r"\d+", "32", "2178560", PERCENT]),
    "distillation.py": ("--steps 4 --teacher-steps 4", [PERCENT, PERCENT, "151", "306", "17", "258", "29.2", "32"]),
    "fully_sharded.py": ("--steps 4", [PERCENT + r"\d", "4", "3.90", "32"]),
    "low_precision.py": ("--steps 4 --dtype fp16", [PERCENT, "25.6", "32", "2.0", "12.0"]),
    "matrix_optimizers.py": ("--steps 4", ["4", "25.6", "32", PERCENT]),
    "offload.py": ("--steps 4", [PERCENT, "0", "296", "591", "25.6", "32"]),
    "quantized_training.py": ("--steps 4", ["3", PERCENT, "25.6", "32"]),
    "resume.py": ("--steps 6", [PERCENT, "25.6", "32"]),
    "sync_batch_norm.py": ("--steps 4", [PERCENT, "25.7", "32"]),
    "zero.py": ("--steps 4", [PERCENT, "25.6", "32", "0", "50"]),
}


# These have tests of their own.
ELSEWHERE = {"elastic.py", "hogwild.py", "membership.py", "monitoring.py", "pipeline.py", "population.py"} | {
    "schedules.py",
    "tensor_parallel.py",
    "with_accelerate.py",
    "with_fabric.py",
    "with_lightning.py",
    "with_trainer.py",
}


def numbers(said: str) -> list[str]:
    return re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?", said)


@pytest.mark.parametrize("name", EXAMPLES)
def test_runs_on_two_ranks(name: str, tmp_path: Path) -> None:
    arguments, expected = EXAMPLES[name]
    said = run_example(name, tmp_path, *arguments.split())
    found = numbers(said)
    assert len(found) == len(expected) and all(map(re.fullmatch, expected, found)), said
    assert len(said.splitlines()) <= 3, "only one rank prints"
    if name == "resume.py":
        assert said.endswith("the bits of a run that never stopped: yes\n")


def test_hybrid_sharding(tmp_path: Path) -> None:
    said = run_example("fully_sharded.py", tmp_path, "--steps", "4", "--hosts", "2", ranks=4)
    _, steps, ratio, _ = numbers(said)
    assert steps == "4" and float(ratio) > 3.5


def test_both_kinds_of_activation_checkpointing_learn_alike(tmp_path: Path) -> None:
    kinds = ([], ["--reentrant"])
    found = [run_example("activation_checkpointing.py", tmp_path, "--steps", 30, *kind) for kind in kinds]
    assert found[0] == found[1] and float(numbers(found[0])[0]) > 70, found


def test_offloading_does_not_change_what_is_learned(tmp_path: Path) -> None:
    found = [run_example(name, tmp_path, "--steps", 20) for name in ("offload.py", "fully_sharded.py")]
    offloaded, plain = (float(numbers(said)[0]) for said in found)
    assert offloaded == pytest.approx(plain, abs=0.06) and plain > 50, found


def test_a_student_learns_from_its_teacher_alone(tmp_path: Path) -> None:
    said = run_example("distillation.py", tmp_path, "--share", 1)
    assert float(numbers(said)[1]) > 60, said


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_model_of_16_bit_numbers_learns(dtype: str, tmp_path: Path) -> None:
    said = run_example("low_precision.py", tmp_path, "--steps", 30, "--dtype", dtype, "--no-masters")
    accuracy, *_, of_state = numbers(said)
    assert float(accuracy) > 70 and of_state == "8.0", said


@pytest.mark.parametrize(("bits", "levels"), [(2, 3), (3, 7)])
def test_weights_are_rounded_in_training(
    bits: int, levels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = run_example("quantized_training.py", tmp_path, "--steps", 40, "--bits", bits)
    found, accuracy, *_ = numbers(said)
    assert int(found) == levels and float(accuracy) > 70, said
    monkeypatch.syspath_prepend(str(FOLDER))
    import quantized_training

    weight = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).requires_grad_()
    rounded = quantized_training.Rounded(bits)(weight)
    step = weight.detach().abs().amax(1, keepdim=True) / (levels // 2)
    torch.testing.assert_close(rounded.detach(), (weight.detach() / step).round() * step)
    rounded.sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight)), "the gradients pass straight through"


@pytest.mark.needs("pytorch_optimizer")
@pytest.mark.parametrize(("optimizer", "least"), [("shampoo", 30), ("soap", 70), ("schedule-free", 70)])
def test_optimizers_of_another_package_learn_behind_the_hook(optimizer: str, least: float, tmp_path: Path) -> None:
    said = run_example("matrix_optimizers.py", tmp_path, "--optimizer", optimizer, "--steps", 40)
    assert said.startswith(f"{optimizer}: 40 steps sent 25.6% of fp32's bytes")
    assert float(numbers(said)[-1]) > least, said


def test_every_short_example_is_tested_and_says_how_to_run_it() -> None:
    files = {file.name: file.read_text() for file in FOLDER.glob("*.py")}
    assert {name for name, text in files.items() if "from shared import" in text} == EXAMPLES.keys() | ELSEWHERE
    for name in EXAMPLES:
        assert f"torchrun --standalone --nproc-per-node 2 examples/{name}" in files[name]
