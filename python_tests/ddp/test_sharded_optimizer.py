"""ddp.register(..., shard=optimizer): the bits of an unsharded run, a part of the state on each rank, and errors."""

import copy
import math
from functools import partial

import numpy
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import amp, ddp, optim

# torch caches meshes of equal shape, whose groups then have other names.
run_ranks = partial(ranks.run_ranks, fresh=True)

SIZES = (50, 71, 64, 3)  # rows that ranks cannot share evenly, and fewer rows than ranks


def new_module(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [layer for i in range(3) for layer in (nn.Linear(*SIZES[i : i + 2]), nn.Tanh())]
    return nn.Sequential(*layers).to(dtype)


def begin(build, codec="raw", dtype=torch.float32, shards=True, options=None, **registering):
    model = DistributedDataParallel(new_module(dtype), bucket_cap_mb=0.01, **(options or {}))
    optimizer = build(model.parameters())
    given = {"shard": optimizer} if shards else {"algorithm": "direct"}
    return model, optimizer, ddp.register(model, codec, **given, **registering)


def batch(step, rank, dtype=torch.float32):
    return torch.randn(8, SIZES[0], generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def loss_of(model, x):
    return (model(x) - x[:, : SIZES[-1]]).square().mean()


def train(model, optimizer, rank, steps, first=0, scaler=None, max_norm=None, spoilt=None):
    scaler = amp.LossScaler("cpu", enabled=False) if scaler is None else scaler
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step, rank, next(model.parameters()).dtype))
        scaler.scale(loss * (math.inf if (step, rank) == spoilt else 1)).backward()
        scaler.step(optimizer, **({} if max_norm is None else {"max_norm": max_norm}))
        scaler.update()


def bits(model):
    return [p.detach().clone() for p in model.parameters()]


def same(a, b):
    return all(map(torch.equal, a, b))


OPTIMIZERS = {
    "ours": lambda params: optim.AdamW(params, lr=1e-2),
    "momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "torch's": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "torch's, fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
}


def check_raw(rank, world_size, name, dtype, views):
    found = []
    for shards in (False, True):
        model, optimizer, state = begin(
            OPTIMIZERS[name], dtype=dtype, shards=shards, options={"gradient_as_bucket_view": views}
        )
        train(model, optimizer, rank, 5)
        found.append(bits(model))
        assert not shards or all(p.grad is None for p in model.parameters())
    if name == "torch's, fused":  # its last bits depend on where an element is in a tensor
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(*found, strict=True))
    else:
        assert same(*found), f"{name}: the bits of an unsharded run"
    first = [p.clone() for p in found[1]]
    for p in first:
        dist.broadcast(p, 0)
    assert same(first, found[1])
    kept = sum(
        value.to_local().numel() if isinstance(value, DTensor) else 0
        for entry in optimizer.state.values()
        for key, value in entry.items()
        if key not in ("step", "master_param")
    )
    moments = 1 if name == "momentum" else 2
    whole = moments * sum(p.numel() for p in model.parameters())
    assert kept < whole / world_size + moments * sum(SIZES[1:]) * max(SIZES), kept
    total = torch.tensor(kept)
    dist.all_reduce(total)
    assert total == whole, "together the ranks have each element once"
    assert state.stats()["gather_bytes"] > 0 or world_size == 1


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_raw_gives_the_bits_of_an_unsharded_run(name, world_size):
    run_ranks(world_size, check_raw, name, torch.float32, world_size == 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_parameters_are_gathered_bit_for_bit(dtype):
    run_ranks(3, check_raw, "ours", dtype, False)


def check_norms(rank, world_size, build):
    """Clipping and norms of whole tensors are over all shards; a step is skipped wherever the overflow is."""
    found = []
    for shards in (False, True):
        scaler = amp.LossScaler("cpu", init_scale=64.0)
        model, optimizer, _ = begin(build, shards=shards, scaler=scaler)
        train(model, optimizer, rank, 6, scaler=scaler, max_norm=0.05, spoilt=(3, world_size - 1))
        assert scaler.skipped_steps == 1
        found.append(bits(model))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("kind", ["AdamW", "LARS", "LAMB"])
def test_clipping_scaling_and_norms(kind):
    run_ranks(3, check_norms, partial(getattr(optim, kind), lr=1e-2))


def check_torchs_scaler(rank, world_size):
    found = []
    for shards in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        model, optimizer, state = begin(OPTIMIZERS["torch's"], "int4", shards=shards, scaler=scaler)
        for step in range(5):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch(step, rank)) * (math.inf if (step, rank) == (2, 0) else 1)).backward()
            scaler.unscale_(optimizer)
            parameters = state.shards.parameters() if shards else model.parameters()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 32
        found.append(bits(model))
    assert all(torch.isfinite(p).all() for p in found[1])
    assert all(torch.allclose(a, b, atol=0.05) for a, b in zip(*found, strict=True))


def test_works_with_torchs_scaler_and_clipping():
    run_ranks(2, check_torchs_scaler)


def check_disabled_scalers(rank, world_size):
    """A scaler that scales nothing skips no step, so feedback does not ask it."""
    for scaler in (torch.amp.GradScaler("cpu", enabled=False), amp.LossScaler("cpu", enabled=False)):
        model, optimizer, state = begin(OPTIMIZERS["ours"], "int4", scaler=scaler, min_compress_numel=0)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch(step, rank))).backward()
            scaler.step(optimizer)
            scaler.update()
        assert state.metrics()["ddp/residual_norm"] > 0


def test_works_with_scalers_that_are_disabled():
    run_ranks(2, check_disabled_scalers)


def check_accumulation(rank, world_size):
    """Under no_sync, and without clearing gradients between passes, gradients add up as DDP's do."""
    found = []
    for shards in (False, True):
        model, optimizer, _ = begin(OPTIMIZERS["ours"], shards=shards)
        for step in range(3):
            optimizer.zero_grad()
            with model.no_sync():
                loss_of(model, batch(10 * step, rank)).backward()
            loss_of(model, batch(10 * step + 1, rank)).backward()
            loss_of(model, batch(10 * step + 2, rank)).backward()
            optimizer.step()
            with model.no_sync():
                loss_of(model, batch(10 * step + 3, rank)).backward()  # and is given up
        found.append(bits(model))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(*found, strict=True))


def test_gradients_accumulate():
    run_ranks(2, check_accumulation)


def check_learns(rank, world_size):
    losses = {}
    for codec in ("raw", "int8", "int4"):
        model, optimizer, state = begin(OPTIMIZERS["ours"], codec, min_compress_numel=0)
        train(model, optimizer, rank, 80)
        losses[codec] = sum(loss_of(model, batch(step, rank)).item() for step in range(80, 90))
        stats = state.stats()
        gradients = stats["wire_bytes"] - stats["gather_bytes"]
        whole = 4 * sum(p.numel() for p in model.parameters()) * (world_size - 1) / world_size * 80
        assert stats["gather_bytes"] == pytest.approx(whole, rel=0.05)
        assert gradients == pytest.approx(whole * {"raw": 1, "int8": 0.27, "int4": 0.16}[codec], rel=0.1)
    assert losses["int8"] == pytest.approx(losses["raw"], rel=0.05)
    assert losses["int4"] == pytest.approx(losses["raw"], rel=0.1)


def test_codecs_learn_with_fewer_bytes():
    run_ranks(2, check_learns)


def check_reshard(rank, world_size, folder, first, last):
    """Train from a checkpoint of another number of ranks; full states are torch's own, by the model's names."""
    model, optimizer, state = begin(OPTIMIZERS["ours"])
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    if first:
        saved = torch.load(f"{folder}/{first}.pt")
        model.module.load_state_dict(saved["model"])
        set_optimizer_state_dict(state.shards, optimizer, saved["optimizer"], options=options)
    steps = 2
    for step in range(first, first + steps):  # the same batch on all ranks, so that runs can be compared
        optimizer.zero_grad()
        loss_of(model, batch(step, 0)).backward()
        optimizer.step()
    saved = {
        "model": model.module.state_dict(),
        "optimizer": get_optimizer_state_dict(state.shards, optimizer, options=options),
    }
    if rank == 0:
        names = set(dict(model.module.named_parameters()))
        assert set(saved["optimizer"]["state"]) == names
        torch.save(saved, f"{folder}/{last}.pt")
    dist.barrier()


def unsharded(rank, world_size, steps):
    model = new_module()
    optimizer = OPTIMIZERS["ours"](model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch(step, 0)).backward()
        optimizer.step()
    return model.state_dict(), get_optimizer_state_dict(model, optimizer)


def test_checkpoints_reshard(tmp_path):
    for number, world_size in enumerate((4, 2, 3)):
        run_ranks(world_size, check_reshard, str(tmp_path), 2 * number, 2 * number + 2)
    ((weights, state),) = run_ranks(1, unsharded, 6)
    saved = torch.load(tmp_path / "6.pt")
    for name, weight in weights.items():
        assert torch.allclose(saved["model"][name], weight, rtol=1e-4, atol=1e-6), name
        assert saved["optimizer"]["state"][name]["step"] == 6
        for key in ("exp_avg", "exp_avg_sq"):
            ours, theirs = saved["optimizer"]["state"][name][key], state["state"][name][key]
            assert ours.shape == weight.shape and torch.allclose(ours, theirs, rtol=1e-3, atol=1e-7), (name, key)


def check_in_place(rank, world_size, folder):
    import torch.distributed.checkpoint as dcp

    model, optimizer, state = begin(OPTIMIZERS["ours"], "int4", min_compress_numel=0)
    steps = 2 if world_size == 4 else 0
    train(model, optimizer, rank, steps)
    held = {
        "model": model.module.state_dict(),
        "optimizer": get_optimizer_state_dict(state.shards, optimizer),
        "hook": state.state_dict(saved_by=4),
    }
    if steps:
        dcp.save(held, checkpoint_id=folder)
        return
    dcp.load(held, checkpoint_id=folder)
    model.module.load_state_dict(held["model"])
    set_optimizer_state_dict(state.shards, optimizer, held["optimizer"])
    state.load_state_dict(held["hook"])
    assert all(entry["step"] == 2 for entry in optimizer.state.values())
    train(model, optimizer, rank, 1)


def test_distributed_checkpoints_reshard_in_place(tmp_path):
    for world_size in (4, 2, 3):
        run_ranks(world_size, check_in_place, str(tmp_path))


def check_resume(rank, world_size):
    """A run that continues has the bits of one that never stopped, with feedback."""
    model, optimizer, state = begin(OPTIMIZERS["ours"], "int4", min_compress_numel=0, rounding="stochastic")
    train(model, optimizer, rank, 3)
    saved = copy.deepcopy((model.module.state_dict(), optimizer.state_dict(), state.state_dict()))
    train(model, optimizer, rank, 3, first=3)
    resumed, its_optimizer, its_state = begin(OPTIMIZERS["ours"], "int4", min_compress_numel=0, rounding="stochastic")
    resumed.module.load_state_dict(saved[0])
    its_optimizer.load_state_dict(saved[1])
    its_state.load_state_dict(saved[2])
    train(resumed, its_optimizer, rank, 3, first=3)
    assert same(bits(model), bits(resumed))


def test_a_run_continues_bit_by_bit():
    run_ranks(3, check_resume)


def check_stepped(rank, world_size, build):
    """An optimizer may have state before it is sharded, as Adagrad always has, also masters of half parameters."""
    for dtype in (torch.float32, torch.bfloat16):
        found = []
        for shards in (False, True):
            module = new_module(dtype)
            optimizer = build(module.parameters())
            for step in range(2):
                optimizer.zero_grad()
                loss_of(module, batch(step, 0, dtype)).backward()
                optimizer.step()
            model = DistributedDataParallel(module)
            ddp.register(model, "raw", **({"shard": optimizer} if shards else {"algorithm": "direct"}))
            train(model, optimizer, rank, 3, first=2)
            found.append(bits(model))
        assert same(*found), dtype
        assert len(optimizer.state) == 6


@pytest.mark.parametrize("kind", ["Adagrad", "AdamW", "FTRL"])
def test_an_optimizer_may_have_state(kind):
    run_ranks(3, check_stepped, partial(getattr(optim, kind), lr=0.05))


def check_static_graph(rank, world_size):
    """DDP then reduces the buckets of the first pass in a callback, behind the pass."""
    found = []
    for shards in (False, True):
        model, optimizer, _ = begin(OPTIMIZERS["ours"], shards=shards, options={"static_graph": True})
        train(model, optimizer, rank, 4)
        found.append(bits(model))
    assert same(*found)


def test_static_graphs():
    run_ranks(2, check_static_graph)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(40, 40), nn.Linear(40, 40)

    def forward(self, x, both):
        return self.b(self.a(x)) if both else self.a(x)


def check_unused(rank, world_size):
    found = []
    for shards in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(Unused(), find_unused_parameters=True)
        optimizer = optim.AdamW(model.parameters())
        given = {"shard": optimizer} if shards else {"algorithm": "direct"}
        ddp.register(model, "raw", **given)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 40) * (rank + 1), step % 2 == 0).square().sum().backward()
            optimizer.step()
        found.append(bits(model))
        key = next(p for name, p in dict(model.module.named_parameters()).items() if name == "b.weight")
        steps = {int(entry["step"]) for entry in optimizer.state.values()}
        assert steps == {2, 4}, "a parameter without a gradient is not stepped"
        assert key is not None
    assert same(*found)


def test_unused_parameters():
    run_ranks(2, check_unused)


def check_layouts(rank, world_size):
    """Channels-last weights, groups with other options, and schedules."""
    found = []
    for shards in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(3, 10, 3), nn.Flatten(), nn.Linear(10 * 36, 5)).to(
            memory_format=torch.channels_last
        )
        model = DistributedDataParallel(module)
        groups = [{"params": [*module[0].parameters()], "lr": 0.1}, {"params": [*module[2].parameters()]}]
        optimizer = optim.SGD(groups, lr=0.01, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        ddp.register(model, "raw", **({"shard": optimizer} if shards else {"algorithm": "direct"}))
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(rank))
        for _ in range(4):
            optimizer.zero_grad()
            model(x.to(memory_format=torch.channels_last)).square().mean().backward()
            optimizer.step()
            schedule.step()
        found.append(bits(model))
        assert module[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert same(*found)


def test_channels_last_groups_and_schedules():
    run_ranks(3, check_layouts)


def check_refusals(rank, world_size):
    def registering(build=OPTIMIZERS["ours"], module=None, **options):
        model = DistributedDataParallel(new_module() if module is None else module)
        optimizer = build(model.parameters())
        before = [p for group in optimizer.param_groups for p in group["params"]]
        try:
            return ddp.register(model, options.pop("codec", "int8"), shard=optimizer, **options)
        except BaseException:
            after = [p for group in optimizer.param_groups for p in group["params"]]
            assert all(a is b for a, b in zip(before, after, strict=True)), "nothing has changed"
            raise

    def stepped(params):
        optimizer = optim.AdamW([*params], state_codec="int8")
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        return optimizer

    transposed = nn.Linear(4, 4)
    transposed.weight = nn.Parameter(torch.zeros(4, 4).t())
    scalar = nn.Linear(4, 4)
    scalar.factor = nn.Parameter(torch.tensor(1.0))
    for error, text, options in (
        (TypeError, "shard: expected a torch.optim.Optimizer, got str", {"build": lambda params: "adam"}),
        (ValueError, "one without 0.weight", {"build": lambda params: optim.SGD([*params][1:], lr=0.1)}),
        (
            ValueError,
            "trained parameters only, got 7",
            {"build": lambda params: optim.SGD([*params, nn.Parameter(torch.ones(2))], lr=0.1)},
        ),
        (ValueError, "rows are adjacent in memory, got weight", {"module": transposed}),
        (ValueError, "at least one element and dimension, got factor", {"module": scalar}),
        (ValueError, "shard: expected an optimizer whose state is float32", {"build": stepped}),
        (ValueError, "codec", {"codec": "auto"}),
        (ValueError, "algorithm", {"algorithm": "tree"}),
        (TypeError, "algorithm: expected a str", {"algorithm": numpy.ones(2)}),
        (ValueError, "ranks_per_host: expected none with shard", {"ranks_per_host": 2}),
    ):
        with pytest.raises(error, match=text):
            if text.startswith("shard: expected a torch"):
                ddp.register(DistributedDataParallel(new_module()), "int8", shard="adam")
            else:
                registering(**options)
    module = new_module()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["2.weight"])
    with pytest.raises(ValueError, match=r"shard: expected parameters that DDP reduces, got 2\.weight"):
        registering(module=module)
    model, *_ = begin(OPTIMIZERS["ours"])
    with model.join(), pytest.raises(ValueError, match=r"shard: expected the group .* and no model\.join"):
        loss_of(model, batch(0, rank)).backward()
    model, *_ = begin(OPTIMIZERS["ours"])
    model._update_process_group(dist.new_group([0, 1]))
    with pytest.raises(ValueError, match="shard: expected the group that the model was registered with"):
        loss_of(model, batch(0, rank)).backward()
    model, optimizer, state = begin(OPTIMIZERS["ours"], scaler=amp.LossScaler("cpu", enabled=False))
    with pytest.raises(RuntimeError, match="grad_stats: expected a state without shard"):
        _ = state.grad_stats
    loss_of(model, batch(0, rank)).backward()
    model.module[0].weight.data = model.module[0].weight.data.clone()
    with pytest.raises(RuntimeError, match=r"shard: expected 0\.weight to stay where register has put it"):
        optimizer.step()


def test_errors_name_the_wrong_argument():
    run_ranks(2, check_refusals)


def test_without_peers_the_model_is_its_shard():
    module = new_module()
    optimizer = OPTIMIZERS["ours"](module.parameters())
    state = ddp.register(module, "int8", shard=optimizer)
    assert state.shards is module
    with pytest.raises(ValueError, match=r"one without 0\.weight"):
        ddp.register(module, "int8", shard=optim.SGD([*module.parameters()][1:], lr=0.1))
