"""The hook, the loss scaler and the optimizers together with other features of torch: results have equal bits."""

import copy
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contributions import same_everywhere
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from dltrain_ext import ddp, optim
from dltrain_ext.amp import LossScaler


class Net(nn.Module):
    """A model with three buckets of 1 MiB."""

    def __init__(self, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x):
        x = torch.tanh(self.layers[0](x))  # a checkpointed segment needs an input that requires a gradient
        for layer in self.layers[1:]:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
            x = torch.tanh(x)
        return x


def wrap(net, **options):
    return DistributedDataParallel(net, bucket_cap_mb=1, **options)


def batch(rank, step):
    return torch.randn(4, 512, generator=torch.Generator().manual_seed(10 * step + rank))


def gradients(call, model, rank, steps=3):
    """Return the gradients of every step. No step changes the parameters, so only error feedback makes them differ."""
    found = []
    for step in range(steps):
        model.zero_grad()
        call(batch(rank, step)).square().sum().backward()
        found += [p.grad.clone() for p in model.parameters()]
    return found


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def equal(ours, theirs):
    return len(ours) == len(theirs) > 0 and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def check_accumulation(rank, world_size):
    x = torch.randint(-4, 5, (3, 6, 64), generator=torch.Generator().manual_seed(rank))
    x = x.float() * world_size  # sums and averages are exact
    for codec in ("raw", "int8"):
        found = []
        for parts in (1, 3):
            torch.manual_seed(0)
            model, scaler = DistributedDataParallel(nn.Linear(64, 64)), LossScaler("cpu", init_scale=1024.0)
            state = ddp.register(model, codec=codec, scaler=scaler)
            for _ in range(2):
                model.zero_grad()
                *before, last = x.reshape(parts, -1, 64)
                with model.no_sync():
                    for part in before:
                        scaler.scale(model(part).sum()).backward()
                scaler.scale(model(last).sum()).backward()
            feedback = next(iter(state.state_dict()["feedback"].values())).values()
            found.append([*(p.grad for p in model.parameters()), *feedback, state.grad_stats.sum_squares])
            assert state.stats()["steps"] == 2
        assert equal(*found), codec
        plain = DistributedDataParallel(nn.Linear(64, 64))
        (1024 * plain(x.flatten(0, 1)).sum()).backward()
        assert equal(found[0][:2], [p.grad for p in plain.parameters()]) == (codec == "raw")


@pytest.mark.parametrize("world_size", [2, 3])
def test_accumulated_batches_are_one_large_batch(world_size):
    run_ranks(world_size, check_accumulation)


def check_checkpointing(rank, world_size):
    for static_graph in (False, True):
        found = []
        for reentrant in (None, False, True):
            model = wrap(Net(reentrant), static_graph=static_graph)
            state = ddp.register(model, codec="int8")
            found.append(gradients(model, model, rank))
            assert state.steps == 3 and state.stats()["buckets"] > 3
        assert equal(found[0], found[1]) and equal(found[0], found[2]), static_graph


def test_activation_checkpointing_changes_nothing():
    run_ranks(2, check_checkpointing)


def check_compiled(rank, world_size):
    model = wrap(Net())
    ddp.register(model, codec="int8")
    eager = gradients(model, model, rank)
    for order in ("DDP compiled", "compiled in DDP", "DDP compiled in place", "compiled in place in DDP"):
        torch._dynamo.reset()
        graphs = []

        def backend(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        net = Net()
        if order == "compiled in place in DDP":
            net.compile(backend=backend)
        model = wrap(torch.compile(net, backend=backend) if order == "compiled in DDP" else net)
        state = ddp.register(model, codec="int8")
        call = torch.compile(model, backend=backend) if order == "DDP compiled" else model
        if order == "DDP compiled in place":
            model.compile(backend=backend)
        assert equal(gradients(call, model, rank), eager), order
        assert len(graphs) == 3, order  # the graph is split at the borders of the buckets
        assert len(state.stats()["per_bucket"]) >= 3


def test_a_compiled_model_has_the_gradients_of_an_eager_one():
    run_ranks(2, check_compiled)


def check_autocast(rank, world_size):
    for dtype in (torch.float16, torch.bfloat16):
        found, scales, scaled = [], [], dtype == torch.float16
        for ours in (False, True):
            model = wrap(Net())
            optimizer = (optim if ours else torch.optim).SGD(model.parameters(), lr=0.1, momentum=0.9)
            kind = LossScaler if ours else torch.amp.GradScaler
            scaler = kind("cpu", init_scale=2.0**23, enabled=scaled)  # overflows at first
            state = ddp.register(model, codec="raw", scaler=scaler) if ours else None
            for step in range(10):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype):
                    loss = model(batch(rank, step)).float().square().sum()
                scaler.scale(loss).backward()
                if ours:
                    scaler.step(optimizer, max_norm=0.5, grad_stats=state.grad_stats)
                else:
                    scaler.unscale_(optimizer)
                    clip_grad_norm_(model.parameters(), 0.5)
                    scaler.step(optimizer)
                scaler.update()
            scales.append(scaler.get_scale())
            found.append(values(model))
        assert scales[0] == scales[1], dtype
        assert 1 < scales[0] < 2.0**23 if scaled else scales[0] == 1, "no step was skipped"
        moved, apart = (
            math.sqrt(sum((p - q).double().square().sum() for p, q in zip(found[0], others, strict=True)))
            for others in (values(Net()), found[1])
        )
        assert apart < 0.01 * moved, (
            dtype,
            apart,
            moved,
        )  # a difference of one bit may change the rounding to a half type
        assert all(same_everywhere(p) for p in found[1])


def test_autocast_and_clipping_give_the_results_of_plain_ddp():
    run_ranks(2, check_autocast)


def check_batch_norm(rank, world_size):
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(512, 64), nn.BatchNorm1d(64), nn.Linear(64, 8))

    found = []
    for ours in (False, True):
        model = DistributedDataParallel(net())
        if ours:
            ddp.register(model, codec="raw")
        found.append([*gradients(model, model, rank), *model.buffers()])
    assert equal(*found)
    with pytest.raises(ValueError, match="^SyncBatchNorm layers only work with GPU modules$"):
        DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(net()))


def test_batch_norm():
    """torch's SyncBatchNorm works only on GPUs, which DDP says."""
    run_ranks(2, check_batch_norm)


def check_zero(rank, world_size):
    found = []
    for sharded in (False, True):
        model, scaler = wrap(Net()), LossScaler("cpu", init_scale=1024.0)
        state = ddp.register(model, codec="int8", scaler=scaler)
        make = ZeroRedundancyOptimizer if sharded else lambda params, kind, **options: kind(params, **options)
        optimizer = make(model.parameters(), optim.AdamW, lr=0.01)
        norms = []
        for step in range(5):
            optimizer.zero_grad()
            spoilt = torch.inf if step == 2 and rank == 1 else 1.0
            scaler.scale((spoilt * model(batch(rank, step))).square().sum()).backward()
            stats = state.grad_stats
            if sharded:
                scaler.step(optimizer, max_norm=0.5, grad_stats=stats)
                norms.append(scaler.total_norm)
            else:
                scaler.unscale_(optimizer)
                norms.append(clip_grad_norm_(model.parameters(), 0.5))
                scaler.step(optimizer)
            scaler.update()
        assert scaler.skipped_steps == 1
        assert not norms[2].isfinite() and all(norm > 0.5 for norm in norms[:2])
        found.append([*values(model), *norms[:2], *norms[3:]])
    assert equal(*found)
    assert all(same_everywhere(p) for p in values(model))
    assert 0 < len(optimizer.optim.state) < len(values(model))


def test_ranks_with_a_part_of_the_optimizer_clip_and_skip_consistently():
    run_ranks(2, check_zero)


def check_zero_state(rank, world_size):
    for dtype in (torch.float32, torch.float16):

        def start(dtype=dtype):
            model = wrap(Net().to(dtype))
            ddp.register(model, codec="raw")
            return model, ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=1e-4)

        def train(model, optimizer, steps, dtype=dtype):
            for step in steps:
                optimizer.zero_grad()
                model(batch(rank, step).to(dtype)).float().square().mean().backward()
                optimizer.step()

        model, optimizer = start()
        train(model, optimizer, range(3))
        optimizer.consolidate_state_dict()
        saved = [copy.deepcopy(optimizer.state_dict()) if rank == 0 else None]
        dist.broadcast_object_list(saved)
        assert ("master_param" in saved[0]["state"][0]) == (dtype == torch.float16)
        again, other = start()
        again.module.load_state_dict(model.module.state_dict())
        other.load_state_dict(saved[0])
        for run in ((model, optimizer), (again, other)):
            train(*run, range(3, 6))
        assert equal(values(model), values(again)), dtype
        for p, twin in zip(model.parameters(), again.parameters(), strict=True):
            if state := optimizer.optim.state.get(p):
                assert equal([*state.values()], [*other.optim.state[twin].values()]), dtype


def test_the_state_of_a_sharded_optimizer_is_saved_and_loaded():
    run_ranks(2, check_zero_state)


def check_resumed(rank, world_size, folder):
    class Run:
        def __init__(self):
            self.model = wrap(Net().to(torch.bfloat16))
            self.optimizer = optim.AdamW(self.model.parameters(), lr=1e-4)
            self.hook = ddp.register(self.model, codec="int4")

        def train(self, steps):
            for step in steps:
                self.optimizer.zero_grad()
                self.model(batch(rank, step).bfloat16()).float().square().mean().backward()
                self.optimizer.step()

        def state_dict(self):
            model, optimizer = get_state_dict(self.model, self.optimizer)
            return {"model": model, "optimizer": optimizer, "hook": self.hook.state_dict()}

        def load_state_dict(self, state):
            ours = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
            set_state_dict(self.model, self.optimizer, **ours)
            self.hook.load_state_dict(state["hook"])

        def all(self):
            masters = [self.optimizer.state[p]["master_param"] for p in self.model.parameters()]
            return [*values(self.model), *masters, *next(iter(self.hook.state_dict()["feedback"].values())).values()]

    run, again = Run(), Run()
    run.train(range(3))
    dcp.save({"run": run}, checkpoint_id=folder)
    dcp.load({"run": again}, checkpoint_id=folder)
    for one in (run, again):
        one.train(range(3, 6))
    assert equal(run.all(), again.all())


def test_half_parameters_and_their_masters_through_distributed_checkpoint(tmp_path: Path):
    run_ranks(2, check_resumed, str(tmp_path))


def check_copies(rank, world_size):
    """Copy a DDP model, or the model without the hook, as the error of AllReduceState suggests."""
    model = wrap(Net())
    ddp.register(model, codec="raw")
    other = wrap(copy.deepcopy(model.module))
    ddp.register(other, codec="raw")
    assert equal(gradients(other, other, rank), gradients(model, model, rank))


def test_a_copy_of_the_model_can_have_its_own_hook():
    run_ranks(2, check_copies)
