"""The hook and the scaler in Accelerate and in the Trainer of Transformers, as in the examples.

Only the ranks import the frameworks, which takes longer than most other tests.
"""

import re
import sys
from functools import cache, partial

import pytest
import torch
from contributions import assert_same
from ranks import ROOT, look_like_torchrun, run_example, run_ranks
from torch import nn

from dltrain_ext import amp, optim

sys.path.insert(0, str(ROOT / "examples"))
pytestmark = [
    pytest.mark.needs("accelerate", "matplotlib", "rich", "sklearn", "transformers"),
    pytest.mark.xdist_group("accelerate"),  # the tests share runs
]

STEPS = 4


def parameters_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def accelerate(codec=None, *, clip="framework", steps=range(STEPS), overflow_at=None, load=None, save=None, **options):
    """Train, and return the results to compare. `clip` says which library clips."""
    import with_accelerate
    from accelerate import Accelerator, GradScalerKwargs

    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[GradScalerKwargs(enabled=False)]
    )
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8))
    scaler = amp.LossScaler("cpu", init_scale=2.0**10, enabled=clip != "framework")
    if clip == "nobody":
        accelerator.scaler = scaler  # before prepare(), as its optimizer steps with this scaler
    model, optimizer = accelerator.prepare(net, optim.SGD(net.parameters(), lr=0.5))
    accelerator.register_for_checkpointing(scaler)
    hook = with_accelerate.register(accelerator, model, codec=codec, scaler=scaler, **options) if codec else None
    if load:
        accelerator.load_state(load)
    losses = []
    for batch in range(2 * steps.start, 2 * steps.stop):
        generator = torch.Generator().manual_seed(10 * batch + accelerator.process_index)
        inputs, targets = torch.randn(6, 32, generator=generator), torch.randint(8, (6,), generator=generator)
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            losses.append(loss.item())
            if batch == overflow_at and accelerator.process_index == 1:
                loss = loss * torch.inf
            accelerator.backward(scaler.scale(loss) if clip == "step" else loss)
            if clip == "step" and accelerator.sync_gradients:
                scaler.step(optimizer.optimizer, max_norm=0.1, grad_stats=hook.grad_stats)
                scaler.update()
            elif clip != "step":
                if clip == "framework" and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            optimizer.zero_grad()
    if save:
        accelerator.save_state(save)
    found = {"losses": losses, "parameters": parameters_of(net), "scaler": scaler.state_dict()}
    return found | ({"hook": hook.state_dict(), "stats": hook.stats()} if hook else {})


def train(folder, codec=None, *, steps=STEPS, resume=None, **options):
    """Do the same with the Trainer."""
    import with_trainer

    trainer = with_trainer.trainer_of(folder, steps, gradient_accumulation_steps=2, **options)
    hook = with_trainer.Hook(trainer, codec=codec)
    if codec:
        trainer.add_callback(hook)
    trainer.train(resume_from_checkpoint=resume)
    found = {"parameters": parameters_of(trainer.model), "losses": trainer.evaluate()["eval_loss"]}
    return found | ({"hook": hook.state.state_dict(), "stats": hook.state.stats()} if codec else {})


def run_all(rank, world_size, folder):
    look_like_torchrun(rank, world_size)
    import tasks
    import with_trainer

    with_trainer.python_source = cache(tasks.python_source)
    fused, half = partial(accelerate, clip="step"), f"{folder}/half"
    saved = {"save_strategy": "steps", "save_steps": STEPS, "steps": 2 * STEPS}
    return {
        "accelerate": {
            "plain": accelerate(),
            "raw": accelerate("raw"),
            "int8": accelerate("int8"),
            "fused": fused("raw"),
            "unclipped": accelerate("raw", clip="nobody"),
            "overflow": fused("int8", overflow_at=2),
            "whole": fused("int8", steps=range(2 * STEPS)),
            "half": fused("int8", save=half),
            "resumed": fused("int8", steps=range(STEPS, 2 * STEPS), load=half),
        },
        "trainer": {
            "plain": train(folder),
            "raw": train(folder, "raw"),
            "int8": train(folder, "int8"),
            "whole": train(f"{folder}/trainer", "int8", **saved),
            "resumed": train(f"{folder}/trainer", "int8", resume=f"{folder}/trainer/checkpoint-{STEPS}", **saved),
        },
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return the results of each of two ranks, by run."""
    return run_ranks(2, run_all, str(tmp_path_factory.mktemp("checkpoints")), timeout=600, fresh=True)


@pytest.fixture(params=["accelerate", "trainer"])
def runs(ranks, request):
    return [found[request.param] for found in ranks]


@pytest.mark.exhaustive
def test_raw_gives_the_results_without_the_hook(runs):
    for run in runs:
        for name in ("losses", "parameters"):
            torch.testing.assert_close(run["raw"][name], run["plain"][name], rtol=1e-5, atol=1e-6)
        assert run["raw"]["stats"]["steps"] == STEPS, "accumulated batches are not reduced"


@pytest.mark.exhaustive
def test_gradients_are_sent_as_int8(runs):
    for run in runs:
        assert 0 < run["int8"]["stats"]["wire_bytes"] < 0.3 * run["raw"]["stats"]["wire_bytes"]
    assert_same(runs[0]["int8"]["parameters"], runs[1]["int8"]["parameters"])
    with pytest.raises(AssertionError):
        assert_same(runs[0]["int8"]["parameters"], runs[0]["raw"]["parameters"])


@pytest.mark.exhaustive
def test_a_run_that_continues_has_the_bits_of_one_that_never_stopped(runs):
    for run in runs:
        assert_same(run["resumed"]["parameters"], run["whole"]["parameters"])
        assert_same(run["resumed"]["hook"], run["whole"]["hook"])
        (feedback,) = run["whole"]["hook"]["feedback"].values()
        assert any(residual.any() for residual in feedback.values())


@pytest.mark.exhaustive
def test_the_step_clips_like_accelerate(ranks):
    for rank in ranks:
        run = rank["accelerate"]
        for name in ("losses", "parameters"):
            torch.testing.assert_close(run["fused"][name], run["raw"][name], rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
def test_accelerates_optimizer_steps_with_our_scaler(ranks):
    for rank in ranks:
        run = rank["accelerate"]["unclipped"]
        assert run["scaler"]["_growth_tracker"] == STEPS and run["scaler"]["skipped_steps"] == 0
        assert run["losses"][2:] != pytest.approx(rank["accelerate"]["raw"]["losses"][2:], rel=1e-2), "clipping matters"


@pytest.mark.exhaustive
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks):
    for rank in ranks:
        run = rank["accelerate"]["overflow"]
        assert run["scaler"]["skipped_steps"] == 1 and run["scaler"]["scale"] == 2.0**9
        (feedback,) = run["hook"]["feedback"].values()
        assert all(t.isfinite().all() for t in [*run["parameters"].values(), *feedback.values()])
    assert_same(*(rank["accelerate"]["overflow"]["parameters"] for rank in ranks))


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("with_accelerate.py", r"test accuracy [\d.]+% after 4 steps, with 3.90 times fewer bytes than fp32\n"),
        ("with_trainer.py", r"test bits per byte [\d.]+ after 4 steps, with 3.78 times fewer bytes than fp32\n"),
    ],
)
def test_the_examples(tmp_path, name, answer):
    assert re.fullmatch(answer, run_example(name, tmp_path, "--steps", "4", fresh=True))
    alone = re.sub(r" 3\.\d+ times", " 1.00 times", answer)
    assert re.fullmatch(alone, run_example(name, tmp_path, "--steps", "4", ranks=0))
