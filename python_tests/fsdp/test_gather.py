"""Parameters that fully_shard gathers in a codec: the same bits on all ranks, exact shards, and errors."""

from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist
from models import SIZES, bits, make, meshes, same, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dltrain_ext import amp, codecs, fsdp, optim

run_ranks = partial(ranks.run_ranks, fresh=True)

OFF = {"enabled": False}


def gathered(model):
    """Return copies of the parameters with which the model computes, by name."""
    for module in model.modules():
        if isinstance(module, fsdp.registration.FSDPModule):
            module.unshard()
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for module in model.modules():
        if isinstance(module, fsdp.registration.FSDPModule):
            module.reshard()
    return found


def check_bits(rank, world_size, codec):
    model = make()
    state = fsdp.register(model, "raw", gather=codec, min_compress_numel=100)
    before = bits(model)
    shards = {name: parameter.to_local().clone() for name, parameter in model.named_parameters()}
    found = gathered(model)
    assert all(torch.equal(a, b) for a, b in zip(before, bits(model), strict=True)), "the shards stay exact"
    for name, whole in found.items():
        first = whole.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, whole), f"{name} has other bits on rank {rank}"
        own, is_small = shards[name], whole.dim() == 1 or whole.numel() < 100
        rows = -(-whole.shape[0] // world_size)
        mine = whole[rank * rows : rank * rows + len(own)]
        padded = torch.cat([own, own.new_zeros((rows - len(own), *own.shape[1:]))])
        expected = padded if is_small else codecs.decode(codecs.encode(padded, codec)).view(padded.shape)
        assert torch.equal(mine, expected[: len(own)]), f"{name} is not what {codec} makes of the shard"
    assert state.stats()["gather_bytes"] > 0 and state.stats()["wire_bytes"] == 0


@pytest.mark.parametrize("codec", ["raw", "bf16", "int8", "int4"])
def test_all_ranks_compute_with_the_decoded_shards(codec):
    run_ranks(3, check_bits, codec)


def check_raw(rank, world_size, options):
    found = []
    for gather in (None, "raw"):
        model, scaler = make(**options), amp.LossScaler("cpu", **OFF)
        fsdp.register(model, "int8", gather=gather)
        train(model, optim.AdamW(model.parameters(), lr=1e-2), scaler, rank, 4)
        found.append(bits(model))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reshard_after_forward": False},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16, output_dtype=torch.float32)},
    ],
    ids=["stage 3", "stage 2", "bf16", "fp16"],
)
def test_raw_trains_like_torchs_all_gather(options):
    run_ranks(2, check_raw, options)


def check_learns(rank, world_size):
    losses, sent = {}, {}
    for gather in ("raw", "bf16", "int8"):
        model = make()
        state = fsdp.register(model, "int8", gather=gather)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        losses[gather] = sum(train(model, optimizer, amp.LossScaler("cpu", **OFF), rank, 60)[-10:]) / 10
        sent[gather] = state.stats()["gather_bytes"]
    assert losses["int8"] == pytest.approx(losses["raw"], rel=0.05)
    assert sent["bf16"] < 0.56 * sent["raw"] and sent["int8"] < 0.32 * sent["raw"]


def test_int8_learns_with_a_quarter_of_the_bytes():
    run_ranks(2, check_learns)


def check_within_a_host(rank, world_size):
    """With a number for reshard_after_forward backward gathers among some ranks, which have decoded parameters."""
    model = make(reshard_after_forward=2)
    fsdp.register(model, "raw", gather="int8")
    losses = train(model, optim.AdamW(model.parameters(), lr=1e-2), amp.LossScaler("cpu", **OFF), rank, 30)
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    plain = make()
    fsdp.register(plain, "raw", gather="int8")
    same_losses = train(plain, optim.AdamW(plain.parameters(), lr=1e-2), amp.LossScaler("cpu", **OFF), rank, 30)
    assert losses == same_losses


def test_backward_may_gather_within_a_host():
    run_ranks(4, check_within_a_host)


def check_asynchronously(rank, world_size):
    model = make()
    fsdp.register(model, "raw", gather="int8")
    expected = gathered(model)
    model[0].set_unshard_in_backward(True)
    handle = model[0].unshard(async_op=True)
    handle.wait()
    assert torch.equal(model[0][0].weight, expected["0.0.weight"])
    model[0].reshard()
    with torch.inference_mode():
        model(torch.ones(2, SIZES[0]))
    with torch.no_grad():
        model(torch.ones(2, SIZES[0]))


def test_gathers_asynchronously_and_without_gradients():
    run_ranks(2, check_asynchronously)


def check_hybrid(rank, world_size):
    replicas, shard, mesh = meshes(rank, world_size)
    found = []
    for over, given in ((mesh, {}), (shard, {"replicas": replicas})):
        model = make(over)
        state = fsdp.register(model, "raw", gather="int8", **given)
        train(model, optim.SGD(model.parameters(), lr=0.1), amp.LossScaler("cpu", **OFF), rank, 4)
        found.append(bits(model))
        assert state.stats()["gather_bytes"] > 0, "not by torch's own all-gather"
    assert same(*found, rtol=1e-4, atol=1e-6)


def test_gathers_within_the_hosts_of_hybrid_sharding():
    run_ranks(4, check_hybrid)


def check_tensor_parallel(rank, world_size):
    """The ranks that have the same part of each layer gather its shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for gather in (None, "raw", "int8"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        state = fsdp.register(model, "raw", gather=gather, min_compress_numel=0)
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(rank // 2))
        model(x).square().mean().backward()
        found.append([p.grad.to_local().clone() for p in model.parameters()])
        assert (state.stats()["gather_bytes"] > 0) == (gather is not None)
    theirs, raw, coded = found
    assert same(raw, theirs, rtol=1e-5, atol=1e-8)
    for mine, its in zip(coded, theirs, strict=True):
        assert 0 < (mine - its).norm() < 0.05 * its.norm()


def test_together_with_tensor_parallelism():
    run_ranks(4, check_tensor_parallel)


class Mixed(nn.Module):
    """FSDP accepts frozen parameters of another dtype."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(40, 40), nn.Linear(40, 40, dtype=torch.bfloat16)
        self.b.requires_grad_(False)

    def forward(self, x):
        return self.b(self.a(x).bfloat16())


def check_frozen(rank, world_size):
    """Frozen parameters are gathered, and not reduced."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40))
    model[0].requires_grad_(False)
    fully_shard(model)
    state = fsdp.register(model, "int8", gather="int8", error_feedback=True)
    model(torch.ones(2, 40)).sum().backward()
    model(torch.ones(2, 40)).sum().backward()
    assert model[0].weight.grad is None and model[2].weight.grad is not None
    assert state.stats()["per_module"][""]["numel"] == 40 * 41
    assert set(state.state_dict()["feedback"][f"rank {rank} of {world_size}"]) == {"2.weight", "2.bias"}


def test_frozen_parameters():
    run_ranks(2, check_frozen)


def check_refusals(rank, world_size):
    for gather in ("auto", 8, "int3"):
        with pytest.raises(ValueError, match="gather: expected one of raw"):
            fsdp.register(make(), gather=gather)
    model = Mixed()
    fully_shard(model)
    fsdp.register(model, gather="int8")
    with pytest.raises(TypeError, match="gather: expected parameters of the model that are all float32"):
        model(torch.ones(2, 40))
    model = make()
    fsdp.register(model, "int8", gather="int8")
    with pytest.raises(RuntimeError, match="has not been registered"):
        fsdp.register(model, "int8", gather="int8", replicas=None)


def test_errors_name_the_wrong_argument():
    run_ranks(2, check_refusals)


class Nested(nn.Module):
    """A parameter before a submodule's, one shared by two modules, and a matrix that is sharded by columns."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24))
        self.scale = nn.Parameter(torch.ones(24, 24))
        self.outer = nn.Linear(24, 24)
        self.outer.weight = self.inner[0].weight

    def forward(self, x):
        return self.outer(self.inner(x) @ self.scale)


def check_order(rank, world_size):
    """The regions are in FSDP's own order."""
    torch.manual_seed(0)
    model = Nested()
    fully_shard(model, shard_placement_fn=lambda p: torch.distributed.tensor.Shard(p.dim() - 1))
    state = model._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    ((_, parameters),) = fsdp.registration._groups(model).values()
    by_name = dict(model.named_parameters())
    torchs = [p.sharded_param for p in groups[0].fsdp_params]
    assert all(by_name[parameter.name] is p for parameter, p in zip(parameters, torchs, strict=True))
    for parameter, p in zip(parameters, torchs, strict=True):
        assert parameter.dim == p.dim() - 1 and parameter.shape == tuple(p.shape)
    state = fsdp.register(model, "int8", gather="int8", error_feedback=True, min_compress_numel=0)
    before = {name: p.to_local().clone() for name, p in model.named_parameters()}
    whole = gathered(model)["scale"]
    mine = whole[:, rank * 12 : rank * 12 + 12]
    assert torch.equal(mine.contiguous(), codecs.decode(codecs.encode(before["scale"], "int8")).view(24, 12))
    model(torch.randn(3, 24, generator=torch.Generator().manual_seed(rank))).sum().backward()
    residuals = state.state_dict()["feedback"][f"rank {rank} of {world_size}"]
    assert {name: lost.shape for name, lost in residuals.items()} == {
        name: p.shape for name, p in model.named_parameters()
    }

    listed = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 12))
    fully_shard([listed[1], listed[0]])
    fully_shard(listed)
    by_group = {
        name: [p.name for p in parameters] for name, (_, parameters) in fsdp.registration._groups(listed).items()
    }
    assert by_group == {"": [], "0": ["1.weight", "1.bias", "0.weight", "0.bias"]}


def test_parameters_are_in_the_order_of_fsdp():
    run_ranks(2, check_order)
