"""The hook's state in checkpoints: a run that continues from one has the bits of a run that never stopped."""

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contributions import assert_same
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import amp, ddp, optim

OPTIONS = {
    "int8": {"codec": "int8"},
    "int8 stochastic": {"codec": "int8", "rounding": "stochastic", "seed": 7},
    "int4 ring": {"codec": "int4", "algorithm": "ring"},
    "sign tree in bf16": {"codec": "sign", "algorithm": "tree", "feedback_dtype": "bf16"},
    "raw halving_doubling": {"codec": "raw", "algorithm": "halving_doubling"},
    "int8 after warm-up": {"codec": "int8", "warmup_steps": 13},
}


class Net(nn.Module):
    """The layers are used in another order than they are defined, so DDP rebuilds its buckets after one step."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(6))

    def forward(self, x):
        for i in (3, 0, 5, 1, 4, 2):
            x = torch.tanh(self.layers[i](x))
        return x


class Run:
    def __init__(self, options):
        torch.manual_seed(0)
        self.model = DistributedDataParallel(Net(), bucket_cap_mb=0.02)
        self.optimizer = optim.AdamW(self.model.parameters(), lr=0.01)
        self.scaler = amp.LossScaler("cpu", init_scale=2.0**10, growth_interval=4)
        self.hook = ddp.register(self.model, scaler=self.scaler, min_compress_numel=64, **options)

    def train(self, rank, steps):
        for step in steps:
            x = torch.randn(6, 40, generator=torch.Generator().manual_seed(1000 * step + rank))
            self.optimizer.zero_grad()
            self.scaler.scale(self.model(x).square().mean()).backward()
            self.scaler.step(self.optimizer, max_norm=0.1, grad_stats=self.hook.grad_stats)
            self.scaler.update()

    def parts(self):
        return {
            "model": self.model.module,
            "optimizer": self.optimizer,
            "scaler": self.scaler,
            "hook": self.hook,
        }

    def state(self):
        return {name: part.state_dict() for name, part in self.parts().items()}


def uninterrupted(rank, world_size, options):
    run = Run(options)
    run.train(rank, range(20))
    return run.state()


def save(rank, world_size, options, folder):
    run = Run(options)
    run.train(rank, range(10))
    torch.save(run.state(), Path(folder, f"{rank}.pt"))


def go_on(rank, world_size, options, folder):
    run = Run(options)
    saved = torch.load(Path(folder, f"{rank}.pt"), weights_only=True)
    for name, part in run.parts().items():
        part.load_state_dict(saved[name])
    run.train(rank, range(10, 20))
    return run.state()


@pytest.mark.parametrize(
    ("world_size", "name"), [*((3, name) for name in OPTIONS), (2, "int8"), (4, "int4 ring"), (4, "int8 stochastic")]
)
def test_a_run_that_goes_on_has_the_bits_of_one_that_never_stopped(tmp_path, world_size, name):
    options = OPTIONS[name]
    whole = run_ranks(world_size, uninterrupted, options)
    run_ranks(world_size, save, options, str(tmp_path))
    parts = run_ranks(world_size, go_on, options, str(tmp_path))
    for one, other in zip(whole, parts, strict=True):
        assert_same(one, other)
    residuals = [next(iter(state["hook"]["feedback"].values())) for state in whole]
    lossy = options["codec"] != "raw"
    assert all(bool(residual["layers.0.weight"].any()) == lossy for residual in residuals)


def save_distributed(rank, world_size, options, folder):
    run = Run(options)
    run.train(rank, range(10))
    dcp.save({"model": run.model.module, "hook": run.hook}, checkpoint_id=folder)
    return run.hook.state_dict()


def load_distributed(rank, world_size, options, folder):
    run = Run(options)
    dcp.load({"model": run.model.module, "hook": run.hook}, checkpoint_id=folder)
    return run.hook.state_dict()


def test_through_distributed_checkpoint(tmp_path):
    saved = run_ranks(3, save_distributed, OPTIONS["int8"], str(tmp_path))
    loaded = run_ranks(3, load_distributed, OPTIONS["int8"], str(tmp_path))
    assert all(state["steps"] == 10 for state in loaded)
    for one, other in zip(saved, loaded, strict=True):
        assert_same(one, other)


def load_of_other_size(rank, world_size, states):
    """Load from a list of the states of all ranks, from which each rank takes its own."""
    run = Run(OPTIONS["int8"])
    run.hook.load_state_dict(states)
    run.train(rank, range(1))  # this also uses the loaded state
    again = Run(OPTIONS["int8"])
    again.hook.load_state_dict(states)
    return again.hook.state_dict()


def load_distributed_of_other_size(rank, world_size, folder, saved_by):
    run = Run(OPTIONS["int8"])
    state = {"hook": run.hook.state_dict(saved_by=saved_by)}
    dcp.load(state, checkpoint_id=folder)
    run.hook.load_state_dict(state["hook"])
    return run.hook.state_dict()


def total(states):
    """Return the sum over the ranks of their residuals, by name."""
    sums = {}
    for state in states:
        for residuals in state["feedback"].values():
            for name, residual in residuals.items():
                sums[name] = sums.get(name, 0) + residual.double()
    return sums


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (3, 2)])
def test_another_world_size_keeps_the_sum_of_the_residuals(tmp_path, before, after):
    saved = run_ranks(before, save_distributed, OPTIONS["int8"], str(tmp_path))
    expected = total(saved)
    assert any(residual.abs().max() > 0 for residual in expected.values())
    for loaded in (
        run_ranks(after, load_of_other_size, saved),
        run_ranks(after, load_distributed_of_other_size, str(tmp_path), before),
    ):
        assert all(state["steps"] == 10 for state in loaded)
        for name, residual in total(loaded).items():
            torch.testing.assert_close(residual, expected[name], rtol=1e-6, atol=1e-9)


def check_refusals(rank, world_size):
    run = Run(OPTIONS["int8"])
    run.train(rank, range(2))
    before = run.hook.state_dict()
    bad = [
        (7, TypeError, "state_dict: expected a state_dict of an AllReduceState"),
        ({**before, "feedback": {}}, ValueError, r"ranks \[\d\] are missing"),
        ({**before, "choice": 7}, ValueError, "expected choice of codec, algorithm and segments, got 7"),
    ]
    for state, error, text in bad:
        with pytest.raises(error, match=text):
            run.hook.load_state_dict(state)
        assert_same(run.hook.state_dict(), before)
    for named, got in ((3, "3"), ([3], "3"), ([(3, torch.ones(1))], "int and Tensor")):
        with pytest.raises(TypeError, match=f"named_parameters: expected pairs of a str and a tensor,.* got {got}"):
            ddp.AllReduceState(named_parameters=named)
    unnamed = ddp.AllReduceState()
    with pytest.raises(ValueError, match="named_parameters: expected model.named_parameters"):
        unnamed.state_dict()
    with pytest.raises(ValueError, match="named_parameters: expected model.named_parameters"):
        unnamed.load_state_dict(before)
    for what in (run.hook, run.model):
        with pytest.raises(TypeError, match="AllReduceState: expected not to be pickled or copied"):
            copy.deepcopy(what)
        with pytest.raises(TypeError, match="AllReduceState: expected not to be pickled or copied"):
            pickle.dumps(what)
    for way in (torch.optim.swa_utils.AveragedModel, lambda model: torch.save(model, io.BytesIO())):
        with pytest.raises(TypeError, match=r"expected not to be pickled or copied,.* copy model\.module"):
            way(run.model)
        way(run.model.module)
    copy.deepcopy(run.model.module)
    dist.barrier()  # no rank may close connections that the other is still making


def test_a_refused_state_changes_nothing():
    run_ranks(2, check_refusals)


def check_incomplete_names(rank, world_size):
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    some = list(model.module.named_parameters())[:3]
    model.register_comm_hook(ddp.AllReduceState(named_parameters=some), ddp.allreduce_hook)
    with pytest.raises(Exception, match="named_parameters: expected all parameters of the model"):
        model(torch.ones(2, 40)).sum().backward()
    dist.barrier()


def test_names_must_be_complete():
    run_ranks(2, check_incomplete_names)
