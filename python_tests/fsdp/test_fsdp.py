"""fully_shard with our optimizers, LossScaler and codecs: equal to torch's if nothing is lost, and errors."""

import copy
import io
import math
from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist
from models import SIZES, bits, make, meshes, same, train
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dltrain_ext import amp, fsdp, optim

# torch caches meshes of equal shape, whose groups then have other names.
run_ranks = partial(ranks.run_ranks, fresh=True)


def check_optimizer(rank, world_size, ours, theirs, options):
    for max_norm in (None, 0.05):
        found = []
        for build in (ours, theirs):
            model, scaler = make(), amp.LossScaler("cpu", init_scale=64.0)
            optimizer = build(model.parameters(), **options)
            train(model, optimizer, scaler, rank, 5, max_norm=max_norm, spoilt=(2, world_size - 1))
            assert scaler.skipped_steps == 1 and scaler.get_scale() == 32, "all ranks skip, wherever the overflow is"
            found.append((bits(model), scaler.total_norm))
        (our_bits, our_norm), (their_bits, their_norm) = found
        assert same(our_bits, their_bits, rtol=1e-4, atol=1e-6)
        if max_norm is not None:
            assert our_norm == pytest.approx(their_norm.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "options"), [("AdamW", {}), ("SGD", {"lr": 0.1, "momentum": 0.9}), ("SGD", {"lr": 0.1})]
)
def test_steps_on_shards_equal_torchs(name, options):
    run_ranks(3, check_optimizer, getattr(optim, name), getattr(torch.optim, name), options)


def check_state(rank, world_size):
    model = make()
    optimizer, scaler = optim.AdamW(model.parameters()), amp.LossScaler("cpu", enabled=False)
    train(model, optimizer, scaler, rank, 2)
    saved = get_optimizer_state_dict(model, optimizer)
    kinds = {key: type(value) for key, value in saved["state"]["0.0.weight"].items()}
    assert kinds == {"step": torch.Tensor, "exp_avg": DTensor, "exp_avg_sq": DTensor}
    results = []
    for build in (optim.AdamW, torch.optim.AdamW):
        other = make()
        with torch.no_grad():
            for mine, its in zip(model.parameters(), other.parameters(), strict=True):
                its.to_local().copy_(mine.to_local())
        resumed = build(other.parameters())
        set_optimizer_state_dict(other, resumed, copy.deepcopy(saved))
        train(other, resumed, scaler, rank, 2, first=2)
        assert resumed.state[other[0][0].weight]["step"] == 4
        results.append(bits(other))
    train(model, optimizer, scaler, rank, 2, first=2)
    ours, theirs = results
    assert all(torch.equal(a, b) for a, b in zip(ours, bits(model), strict=True)), "as if the run had never stopped"
    assert same(theirs, ours, rtol=1e-5, atol=1e-7), "torch can load the state"
    assert all(p.grad is not None and p.to_local().grad is None for p in model.parameters()), "gradients are restored"


def test_state_is_sharded_and_saved_like_torchs():
    run_ranks(2, check_state)


def check_halves(rank, world_size):
    model = make()
    model.to(torch.bfloat16)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(8, SIZES[0], dtype=torch.bfloat16, generator=torch.Generator().manual_seed(rank))
    model(x).square().mean().backward()
    optimizer.step()
    weight = model[0][0].weight
    master = optimizer.state[weight]["master_param"]
    assert isinstance(master, DTensor) and master.dtype == torch.float32 and master.shape == weight.shape
    assert torch.equal(master.to_local().bfloat16(), weight.to_local())


def test_half_parameters_have_sharded_masters():
    run_ranks(2, check_halves)


def check_raw(rank, world_size, scaled):
    """With a lossless codec the results equal those of FSDP's own collectives, up to the last few bits."""
    replicas, shard, mesh = meshes(rank, world_size)
    found = []
    for kind in ("native", "replicas", "scatter"):
        scaler = amp.LossScaler("cpu", init_scale=64.0, enabled=scaled)
        model = make({"native": mesh, "replicas": shard, "scatter": mesh}[kind])
        if kind != "native":
            fsdp.register(model, "raw", replicas=replicas if kind == "replicas" else None, scaler=scaler)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, scaler, rank, 6, max_norm=0.5, spoilt=(3, 1) if scaled else None)
        found.append(bits(model))
    native, *ours = found
    assert all(same(bits, native, rtol=1e-4, atol=1e-6) for bits in ours)


@pytest.mark.parametrize("scaled", [False, True])
def test_raw_gives_the_results_of_fsdp(scaled):
    run_ranks(4, check_raw, scaled)


def check_bytes(rank, world_size):
    replicas, shard, mesh = meshes(rank, world_size)
    sent = {}
    for codec in ("raw", "int8", "int4"):
        for kind in ("replicas", "scatter"):
            model = make(shard if kind == "replicas" else mesh)
            state = fsdp.register(model, codec, replicas=replicas if kind == "replicas" else None, min_compress_numel=0)
            train(model, optim.AdamW(model.parameters()), amp.LossScaler("cpu", enabled=False), rank, 2)
            stats = state.stats()
            assert {name: each["calls"] for name, each in stats["per_module"].items()} == {"0": 2, "1": 2, "2": 2}
            sent[codec, kind] = stats["wire_bytes"]
            for p in model.parameters():
                first = p.to_local().clone()
                dist.broadcast(first, dist.get_global_rank(replicas.get_group(), 0), group=replicas.get_group())
                assert torch.equal(first, p.to_local()), "the replicas stay equal"
    for kind in ("replicas", "scatter"):
        assert sent["int8", kind] < 0.27 * sent["raw", kind]
        assert sent["int4", kind] < 0.16 * sent["raw", kind]


def test_codecs_save_bytes():
    run_ranks(4, check_bytes)


def check_feedback(rank, world_size, kind):
    """Over several steps the gradients add up to those in fp32 with error feedback, and not without."""
    replicas, shard, _ = meshes(rank, world_size)
    given = {"replicas": replicas} if kind == "replicas" else {}
    x = torch.randn(8, SIZES[0], generator=torch.Generator().manual_seed(rank))
    totals = {}
    for name, codec, feeds in (("raw", "raw", False), ("with", "int4", True), ("without", "int4", False)):
        model = make(shard if kind == "replicas" else None)
        fsdp.register(model, codec, error_feedback=feeds, min_compress_numel=0, **given)
        for _ in range(20):
            model(x).square().mean().backward()
        totals[name] = torch.cat([p.grad.to_local().flatten() for p in model.parameters()])
    off = {name: (total - totals["raw"]).norm() / totals["raw"].norm() for name, total in totals.items()}
    assert off["with"] < 0.3 * off["without"], off


@pytest.mark.parametrize("kind", ["replicas", "scatter"])
def test_feedback_compensates_what_is_lost(kind):
    run_ranks(4, check_feedback, kind)


SCALERS = {
    "ours": lambda: amp.LossScaler("cpu", init_scale=64.0, backoff_factor=1.0 - 2**-30, min_scale=64.0),
    "torch's": lambda: torch.amp.GradScaler("cpu", init_scale=64.0),
}


def check_skipped(rank, world_size, kind):
    """A skipped step does not change the residuals."""
    replicas, shard, _ = meshes(rank, world_size)
    found = []
    for spoils in (False, True):
        model, scaler = make(shard), SCALERS[kind]()
        state = fsdp.register(model, "int4", replicas=replicas, scaler=scaler, min_compress_numel=0)
        optimizer = optim.AdamW(model.parameters())
        train(model, optimizer, scaler, rank, 3)
        if spoils:
            train(model, optimizer, scaler, rank, 1, first=50, spoilt=(50, 2))
            assert kind == "torch's" or scaler.skipped_steps == 1
            assert scaler.get_scale() == (32 if kind == "torch's" else 64)
        train(model, optimizer, scaler, rank, 3, first=3)
        found.append((bits(model), state.state_dict()["feedback"]))
    (clean, lost), (spoilt, lost_too) = found
    assert all(torch.equal(a, b) for a, b in zip(clean, spoilt, strict=True))
    ((name, residuals),) = lost.items()
    assert residuals["0.0.weight"].any()
    for module, residual in residuals.items():
        assert torch.equal(residual, lost_too[name][module])


@pytest.mark.parametrize("kind", [*SCALERS])
def test_a_skipped_step_changes_nothing(kind):
    run_ranks(4, check_skipped, kind)


def check_resume(rank, world_size, kind):
    replicas, shard, _ = meshes(rank, world_size)
    given = {"replicas": replicas} if kind == "replicas" else {"error_feedback": True}
    off = amp.LossScaler("cpu", enabled=False)

    def begin():
        model = make(shard if kind == "replicas" else None)
        state = fsdp.register(model, "int4", min_compress_numel=0, rounding="stochastic", **given)
        return model, state, optim.SGD(model.parameters(), lr=0.1)

    model, state, optimizer = begin()
    train(model, optimizer, off, rank, 3)
    saved, weights = state.state_dict(), bits(model)
    train(model, optimizer, off, rank, 3, first=3)
    resumed, its_state, its_optimizer = begin()
    shapes = {name: t.shape for name, t in next(iter(its_state.state_dict()["feedback"].values())).items()}
    assert shapes == {name: t.shape for name, t in next(iter(saved["feedback"].values())).items()}, "loaded in place"
    with torch.no_grad():
        for p, local in zip(resumed.parameters(), weights, strict=True):
            p.to_local().copy_(local)
    its_state.load_state_dict(saved)
    train(resumed, its_optimizer, off, rank, 3, first=3)
    assert all(torch.equal(a, b) for a, b in zip(bits(model), bits(resumed), strict=True))
    (key,) = saved["feedback"]
    for broken, text in (
        ({}, "one of a ShardedState"),
        ([], "got \\[\\]"),
        (saved | {"feedback": {"rank 9 of 16": saved["feedback"][key]}}, r"ranks \[\d\] are missing"),
        (saved | {"feedback": {key: {"0.0.weight": torch.zeros(3)}}}, "expected feedback of shape"),
        (saved | {"feedback": {key: {"0.0.weight": [1.0]}}}, "as a dense tensor"),
        (saved | {"feedback": {key: {"unknown": torch.zeros(3)}}}, "got unknown"),
        (saved | {"reductions": dict.fromkeys(saved["reductions"], "x")}, "reductions of at least 0"),
        (saved | {"reductions": {"elsewhere": 1}}, "the modules of this model"),
        (saved | {"shard": 3}, "shard as two numbers"),
        (saved | {"world_size": torch.ones(2).to_sparse()}, "world_size as a number"),
        (saved | {"steps": -1}, "steps of at least 0"),
    ):
        with pytest.raises(ValueError, match=text):
            its_state.load_state_dict(broken)


@pytest.mark.parametrize("kind", ["replicas", "scatter"])
def test_a_run_continues_from_a_checkpoint_bit_by_bit(kind):
    run_ranks(4, check_resume, kind)


def check_mixed_precision(rank, world_size):
    replicas, shard, mesh = meshes(rank, world_size)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, output_dtype=torch.float32)
    off = amp.LossScaler("cpu", enabled=False)
    for kind in ("replicas", "scatter"):
        found = []
        for codec in (None, "int8"):
            model = make(shard if kind == "replicas" else mesh, mp_policy=policy)
            if codec or kind == "replicas":
                fsdp.register(model, codec or "raw", replicas=replicas if kind == "replicas" else None)
            found.append(sum(train(model, optim.AdamW(model.parameters(), lr=1e-2), off, rank, 40)[-5:]))
        assert found[1] == pytest.approx(found[0], rel=0.1), kind


def test_gradients_may_be_reduced_in_bf16():
    run_ranks(4, check_mixed_precision)


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(40, 40), nn.Linear(40, 40)

    def forward(self, x, both):
        return self.b(self.a(x)) if both else self.a(x)


def check_refusals(rank, world_size):
    replicas, shard, mesh = meshes(rank, world_size)
    for error, text, model, options in (
        (TypeError, "fully_shard was applied to, got Linear; ddp.register", nn.Linear(2, 2), {}),
        (ValueError, r"mesh\['shard'\], got a mesh of \(2, 2\)", make(mesh), {"replicas": replicas}),
        (ValueError, "codec", make(), {"codec": "auto"}),
        (TypeError, "scaler: expected a LossScaler or torch.amp.GradScaler, got str", make(), {"scaler": "dynamic"}),
        (
            ValueError,
            "error_feedback: expected False",
            make(),
            {"codec": "sign", "rounding": "stochastic", "error_feedback": True},
        ),
        (ValueError, "feedback_dtype", make(), {"feedback_dtype": "int8"}),
        (ValueError, "algorithm", make(shard), {"replicas": replicas, "algorithm": "recursive_doubling"}),
        (ValueError, "replicas: expected ranks that have the same shard", make(shard), {"replicas": shard}),
        (ValueError, "replicas: expected ranks that have the same shard", make(shard), {"replicas": dist.group.WORLD}),
        (TypeError, "replicas: expected a ProcessGroup", make(shard), {"replicas": mesh}),
        (TypeError, "replicas: expected a ProcessGroup", make(shard), {"replicas": "x"}),
        (TypeError, "timeout: expected", make(), {"timeout": 5}),
        (TypeError, "codec: expected a str", make(), {"codec": None}),
    ):
        with pytest.raises(error, match=text):
            fsdp.register(model, **options)
    model = Halves()
    fully_shard(model, mesh=shard)
    fsdp.register(model, "int8", replicas=replicas)
    with pytest.raises(RuntimeError, match="whose replicas has not been registered"):
        fsdp.register(model, "int8", replicas=replicas)
    model(torch.ones(2, 40), True).sum().backward()
    with pytest.raises(RuntimeError, match="error_feedback: expected gradients of all parameters of the model"):
        model(torch.ones(2, 40), False).sum().backward()


def test_errors_name_the_wrong_argument():
    run_ranks(4, check_refusals)


def check_unused(rank, world_size):
    model = Halves()
    fully_shard(model)
    state = fsdp.register(model, "int8")
    for step in range(4):
        model(torch.ones(2, 40), step % 2 == 0).sum().backward()
    (stats,) = state.stats()["per_module"].values()
    assert stats["calls"] == 4 and stats["wire_bytes"] == state.stats()["wire_bytes"] > 0


def test_parameters_may_be_unused_without_feedback():
    run_ranks(2, check_unused)


def check_lists(rank, world_size):
    """The gradients of modules that are sharded together are reduced together."""
    replicas, shard, _ = meshes(rank, world_size)
    for given in ({"replicas": replicas}, {"error_feedback": True}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 41), nn.Linear(41, 43))
        mesh = shard if "replicas" in given else None
        fully_shard([model[0], model[1]], mesh=mesh)
        fully_shard(model, mesh=mesh)
        state = fsdp.register(model, "int8", **given)
        model(torch.ones(2, 40)).sum().backward()
        assert set(state.stats()["per_module"]) <= {"", "0"} and "0" in state.stats()["per_module"]


def test_modules_may_be_sharded_together():
    run_ranks(4, check_lists)


def parallel(rank, mesh):
    """FSDP is over the first dimension of the mesh, and tensor parallelism over the second."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    return model


def check_tensor_parallel(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for build, codec in ((torch.optim.AdamW, None), (optim.AdamW, None), (optim.AdamW, "raw")):
        model, scaler = parallel(rank, mesh), amp.LossScaler("cpu", init_scale=64.0)
        if codec:
            fsdp.register(model, codec, error_feedback=True, scaler=scaler)
        optimizer = build(model.parameters())
        for step in range(4):
            x = torch.randn(8, 24, generator=torch.Generator().manual_seed(10 * step + rank // 2))
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean() * (math.inf if step == 2 and rank < 2 else 1)).backward()
            scaler.step(optimizer, max_norm=0.1)
            scaler.update()
        assert scaler.skipped_steps == 1
        found.append((bits(model), scaler.total_norm.item()))
    (theirs, norm), *ours = found
    for mine, my_norm in ours:
        assert same(mine, theirs, rtol=1e-4, atol=1e-6) and my_norm == pytest.approx(norm, rel=1e-4)


def test_together_with_tensor_parallelism():
    run_ranks(4, check_tensor_parallel)


def check_partial(rank, world_size):
    """DTensor leaves gradients of replicated parameters as partial sums. torch 2.11 does not clip these."""
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    plain = nn.Linear(4, 2)
    model = distribute_module(copy.deepcopy(plain), mesh)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    model(distribute_tensor(x, mesh, [Shard(0)])).sum().backward()
    assert model.weight.grad.placements[0].is_partial()
    plain(x).sum().backward()
    found = []
    for build, one in ((torch.optim.SGD, plain), (optim.SGD, model)):
        scaler = amp.LossScaler("cpu", enabled=False)
        scaler.step(build(one.parameters(), lr=0.1), max_norm=1.0)
        found.append(scaler.total_norm.item())
    norm, our_norm = found
    assert same(bits(model), plain.parameters(), rtol=1e-5, atol=1e-7) and our_norm == pytest.approx(norm, rel=1e-5)


def test_gradients_that_are_partial_sums():
    run_ranks(2, check_partial)


def check_memory(rank, world_size):
    model = make()
    optimizer = optim.AdamW(model.parameters())
    train(model, optimizer, amp.LossScaler("cpu", enabled=False), rank, 1)
    moments = [value.to_local() for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    storages = {moment.untyped_storage().data_ptr(): moment.untyped_storage().nbytes() for moment in moments}
    assert sum(storages.values()) == sum(moment.nbytes for moment in moments)
    file = io.BytesIO()
    torch.save(moments[-1], file)
    assert len(file.getvalue()) < moments[-1].nbytes + 4096


def test_state_has_no_unused_memory():
    run_ranks(2, check_memory)
