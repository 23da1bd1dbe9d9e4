"""The strategy and the precision plugin in Lightning's Trainer, compared with Lightning's own."""

import importlib
import re
import sys

import commands
import pytest
import torch
from contributions import assert_same
from ranks import run_example, run_ranks

pytestmark = [pytest.mark.needs("lightning"), pytest.mark.xdist_group("lightning")]  # the tests share runs

STEPS = 4  # an epoch


def train(*arguments):
    import lightning_runs

    return lightning_runs.train(*arguments)


def go_on(*arguments):
    import lightning_runs

    return lightning_runs.go_on(*arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def runs(folder):
    """Return the results of each of two ranks, by run."""
    return run_ranks(2, train, str(folder), timeout=600)


def assert_close(one, other, **tolerance):
    for name in ("losses", "parameters"):
        torch.testing.assert_close(one[name], other[name], **tolerance)


def test_raw_gives_the_results_of_lightnings_own_strategy(runs):
    for run in runs:
        assert_close(run["raw"], run["plain"], rtol=1e-6, atol=1e-7)
        assert run["raw"]["stats"]["steps"] == STEPS, "accumulated batches are not reduced"
        assert len(run["raw"]["losses"]) == 2 * STEPS


def test_gradients_are_sent_as_int8(runs):
    for run in runs:
        assert 0 < run["int8"]["stats"]["wire_bytes"] < 0.3 * run["raw"]["stats"]["wire_bytes"]
        assert run["int8"]["seed"] == 7
        assert run["int8"]["losses"] == pytest.approx(run["plain"]["losses"], rel=1e-2)
        assert run["int8"]["losses"] != run["plain"]["losses"]
    assert_same(runs[0]["int8"]["parameters"], runs[1]["int8"]["parameters"])


@pytest.mark.parametrize(
    ("fused", "plain"),
    [
        ("raw, fp16, norm", "plain, fp16, norm"),
        ("torch's, fp16, norm", "plain, fp16, norm"),
        ("raw, fp16, value", "plain, fp16, value"),
        ("torch's, fp16, value", "plain, fp16, value"),
        ("raw, bf16, norm", "plain, bf16, norm"),
        ("manual", "automatic"),
    ],
)
def test_clipping_equals_lightnings_own(runs, fused, plain):
    for run in runs:
        assert_close(run[fused], run[plain], rtol=1e-4, atol=1e-5)


def test_clipping_makes_a_difference(runs):
    first, second, *_ = runs[0]["unclipped"]["losses"]
    assert first == runs[0]["automatic"]["losses"][0]
    assert second != pytest.approx(runs[0]["automatic"]["losses"][1], rel=1e-2)


def test_the_scale_equals_that_of_lightnings_own_plugin(runs):
    for run in runs:
        found = run["raw, fp16, norm"]["scaler"]
        assert found["scale"] == 2.0**11 == run["plain, fp16, norm"]["scaler"]["scale"]
        assert run["raw, bf16, norm"]["scaler"] == {}


def test_an_overflow_on_one_rank_skips_the_step_on_all(runs):
    for run in runs:
        found = run["overflow"]
        assert found["scaler"]["skipped_steps"] == 1 and found["scaler"]["scale"] == 2.0**9
        assert all(p.isfinite().all() for p in found["parameters"].values())
        (feedback,) = found["hook"]["feedback"].values()
        assert all(residual.isfinite().all() for residual in feedback.values())
        assert feedback["net.2.weight"].any()
    assert_same(runs[0]["overflow"]["parameters"], runs[1]["overflow"]["parameters"])


def test_a_run_that_continues_has_the_bits_of_one_that_never_stopped(runs):
    for run in runs:
        whole, resumed = run["whole"], run["resumed"]
        assert resumed["feedback at start"]["net.2.weight"].any()
        assert resumed["losses"] == whole["losses"][STEPS:]
        for name in ("parameters", "scaler", "hook"):
            assert_same(resumed[name], whole[name])


def test_a_checkpoint_contains_the_residuals_and_nothing_else_of_ours(runs, folder):
    of_int8, of_raw = (torch.load(folder / name)["dltrain_ext.hook"] for name in ("epoch=0.ckpt", "raw/epoch=0.ckpt"))
    assert of_int8["steps"] == of_raw["steps"] == STEPS
    assert of_int8["feedback"].keys() == {"rank 0 of 2", "rank 1 of 2"}
    assert all(saved.keys() == {f"net.{i}.weight" for i in (0, 2, 4)} for saved in of_int8["feedback"].values())
    assert of_raw["feedback"] == {"rank 0 of 2": {}, "rank 1 of 2": {}}


def test_another_world_size_keeps_the_sum_of_the_residuals(runs, folder):
    saved = torch.load(folder / "epoch=0.ckpt")["dltrain_ext.hook"]["feedback"].values()
    found = run_ranks(3, go_on, str(folder / "epoch=0.ckpt"), timeout=600)
    for name in ("net.0.weight", "net.2.weight", "net.4.weight"):
        expected = sum(residuals[name].double() for residuals in saved)
        total = sum(run["feedback at start"][name].double() for run in found)
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-9)
    assert all(run["hook"]["steps"] == 2 * STEPS for run in found)


@pytest.mark.parametrize("name", ["ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper"])
def test_a_users_own_hook_is_refused(name):
    from dltrain_ext.lightning import DDPStrategy

    with pytest.raises(ValueError, match=f"{name}: expected None.*; lightning.pytorch.strategies.DDPStrategy takes"):
        DDPStrategy(**{name: object()})


def test_options_without_effect_are_refused():
    from dltrain_ext.lightning import MixedPrecision

    with pytest.raises(ValueError, match="hysteresis: expected none with 'bf16-mixed', whose loss is not scaled"):
        MixedPrecision("bf16-mixed", "cpu", hysteresis=2)


def test_the_error_without_lightning_says_what_to_install(monkeypatch):
    commands.hide(monkeypatch, "lightning")
    monkeypatch.delitem(sys.modules, "dltrain_ext.lightning", raising=False)
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module("dltrain_ext.lightning")
    assert str(error.value) == "dltrain_ext.lightning: expected PyTorch Lightning; pip install lightning"


def test_the_example(tmp_path):
    (tmp_path / "run").mkdir()
    options = ["--steps", "4", "--csv", tmp_path / "logs"]
    answer = run_example("with_lightning.py", tmp_path / "run", *options, fresh=True)
    (file,) = tmp_path.rglob("metrics.csv")
    names, *lines = file.read_text().splitlines()
    assert {"ddp/codec_error", "comm/busbw", "ddp/hidden"} <= set(names.split(",")) and len(lines) == 4
    assert re.fullmatch(r"test accuracy [\d.]+% after 4 steps, with 3.90 times fewer bytes than fp32\n", answer)
