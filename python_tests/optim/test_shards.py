"""Steps on DTensors, with norms and noise: the same as on whole tensors, however the tensors are sharded."""

import copy
import itertools
import math
from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from optimizers import KINDS
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dltrain_ext import amp, optim

# torch caches meshes of equal shape, whose groups then have other names.
run_ranks = partial(ranks.run_ranks, fresh=True)

SHAPES = [
    (7, 5),
    (3, 8),
    (1, 6),
    (9,),
    (2, 3, 4),
    (),
]  # few are divisible by the number of ranks, some shards are empty
LINE = [[Shard(0)], [Shard(1)], [Shard(0)], [Shard(0)], [Replicate()], [Replicate()]]
SQUARE = [
    [Shard(0), Shard(1)],
    [Replicate(), Shard(1)],
    [Shard(0), Replicate()],
    [Shard(0), Shard(0)],
    [Shard(2), Replicate()],
    [Replicate(), Replicate()],
]
# With eps, a trust ratio of LARS changes if both norms are added up too often.
CASES = [
    *((optim.LARS, {"preset": preset, "eps": 0.1}) for preset in ("paper", "tensorflow", "larc")),
    *((optim.LAMB, {"preset": preset}) for preset in ("paper", "apex", "nvlamb")),
    (optim.LAMB, {"preset": "paper", "max_grad_norm": 0.5}),
]


def make(kind, options, dtype, mesh=None, placements=()):
    """Return whole parameters, or DTensors beside one plain parameter, and an optimizer of them in two groups."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(shape, generator=generator).to(dtype) for shape in (*SHAPES, (4, 4))]
    if mesh is not None:
        whole = [*(distribute_tensor(p, mesh, how) for p, how in zip(whole[:-1], placements, strict=True)), whole[-1]]
    params = [nn.Parameter(p) for p in whole]
    return params, kind([{"params": params[::2], "weight_decay": 0.1}, {"params": params[1::2]}], lr=0.1, **options)


def give_grads(params, seed, scale=1.0, bad=False):
    """Give the gradients of one backward pass, of which one element may not be finite."""
    generator = torch.Generator().manual_seed(seed)
    for index, p in enumerate(params):
        grad = (scale * torch.randn(p.shape, generator=generator)).to(p.dtype)
        if bad and index == 0:
            grad[-1, -1] = math.inf
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value.detach()


def check_steps(rank, world_size, mesh_shape, placements):
    mesh = init_device_mesh("cpu", mesh_shape)
    for kind, options in CASES:
        for adapt in ("auto", True, False):
            for dtype in (torch.float32, torch.bfloat16):
                both = [make(kind, {**options, "adapt": adapt}, dtype, *how) for how in ((), (mesh, placements))]
                for seed in range(4):
                    for params, optimizer in both:
                        give_grads(params, seed)
                        optimizer.step()
                check_equal(*both)


def check_equal(whole, sharded):
    for p, other in zip(whole[0], sharded[0], strict=True):
        entry, its = whole[1].state[p], sharded[1].state[other]
        assert entry.keys() == its.keys()
        for name in entry:
            torch.testing.assert_close(full(its[name]), entry[name], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(full(other), p.detach(), rtol=1e-6 if p.dtype == torch.float32 else 2**-7, atol=1e-7)


def check_others(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    for kind in KINDS:
        both = [make(kind, {}, torch.float32, *how) for how in ((), (mesh, LINE))]
        for seed in range(3):
            for params, optimizer in both:
                give_grads(params, seed)
                optimizer.step()
        check_equal(*both)


def test_steps_of_all_optimizers():
    run_ranks(2, check_others)


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [((2,), LINE), ((4,), LINE), ((2, 2), SQUARE)],
    ids=["two ranks", "four ranks", "two by two ranks"],
)
def test_steps_equal_those_of_whole_tensors(mesh_shape, placements):
    run_ranks(math.prod(mesh_shape), check_steps, mesh_shape, placements)


NOISY = [
    (optim.SGLD, {"seed": 7}),
    (optim.AdamW, {"master_weights": False, "rounding": "stochastic", "seed": 7}),
    (optim.SGD, {"master_weights": "8bit", "momentum": 0.9}),
]


def noisy(kind, options, shape, dtype, mesh=None, how=(), layout=torch.contiguous_format):
    """Return a plain parameter and another one, whole or a DTensor whose part has the layout, and their optimizer."""
    p = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    if mesh is not None:
        part = distribute_tensor(p, mesh, how).to_local().to(memory_format=layout)
        p = DTensor.from_local(part, mesh, how, run_check=False, shape=p.shape, stride=p.stride())
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(p)]
    return params, kind([{"params": params[:1]}, {"params": params[1:]}], lr=0.1, weight_decay=0.1, **options)


def check_noise(rank, world_size, mesh_shape, kind, options):
    """The bits of a step with random numbers do not depend on placements, nor on the layout of a part in memory."""
    mesh = init_device_mesh("cpu", mesh_shape)
    for shape, dtype in (((5, 3, 1, 7), torch.float32), ((1, 40, 6, 9), torch.bfloat16), ((1400,), torch.float32)):
        kinds = [Replicate(), *map(Shard, range(len(shape)))]
        for how in itertools.product(kinds, repeat=len(mesh_shape)):
            layout = torch.channels_last if how[0] == Shard(1) else torch.contiguous_format
            both = [noisy(kind, options, shape, dtype, *rest) for rest in ((), (mesh, how, layout))]
            for seed in range(2):
                for params, optimizer in both:
                    give_grads(params, seed)
                    optimizer.step()
            (whole, its), (sharded, others) = both
            for p, other in zip(whole, sharded, strict=True):
                entry, found = its.state[p], others.state[other]
                assert entry.keys() == found.keys() and found.get("step", 2) == 2
                assert all(torch.equal(full(found[name]), entry[name]) for name in entry), (shape, how)
                assert torch.equal(full(other), p.detach()), (shape, how)


@pytest.mark.parametrize("mesh_shape", [(2,), (4,), (2, 2)], ids=["two ranks", "four ranks", "two by two ranks"])
@pytest.mark.parametrize(("kind", "options"), NOISY, ids=["SGLD", "rounded", "extended"])
def test_noise_does_not_depend_on_the_sharding(mesh_shape, kind, options):
    run_ranks(math.prod(mesh_shape), check_noise, mesh_shape, kind, options)


def check_rounded(rank, world_size):
    """The bits of fully_shard's parts are those of a whole parameter."""
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    whole = nn.Linear(70, 130).bfloat16()
    sharded = copy.deepcopy(whole)
    fully_shard(sharded, mesh=mesh)
    kind, options = NOISY[1]
    optimizers = [kind(model.parameters(), lr=0.1, **options) for model in (whole, sharded)]
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for p, other in zip(whole.parameters(), sharded.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator).bfloat16()
            other.grad = distribute_tensor(p.grad, mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    for p, other in zip(whole.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(other.full_tensor(), p.detach())


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_rounding_with_fully_shard(world_size):
    run_ranks(world_size, check_rounded)


def check_runs(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    p = nn.Parameter(distribute_tensor(torch.zeros(128, 256, dtype=torch.bfloat16), mesh, [Shard(1)]))
    p.grad = torch.zeros_like(p)
    cases = {"codes": optim.AdamW([p], state_codec="int8", **NOISY[1][1]), "norms": optim.LAMB([p], **NOISY[1][1])}
    for what, optimizer in cases.items():
        expected = rf"params\[0\]: expected a part whose elements are adjacent .* with {what}, got one of 128 runs"
        with pytest.raises(ValueError, match=expected):
            optimizer.step()
        assert not p.full_tensor().any()


def test_codes_and_norms_of_parts_that_are_not_adjacent():
    run_ranks(2, check_runs)


def check_own_cut(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    part = torch.zeros((3, 1)[rank], 2)  # torch would give each of two ranks two rows
    p = nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], shape=torch.Size([4, 2]), stride=(2, 1)))
    p.grad = torch.zeros_like(p)
    optimizer = optim.SGLD([p])
    with pytest.raises(ValueError, match=r"params: expected parts as torch cuts a tensor of shape \[4, 2\]"):
        optimizer.step()
    assert not optimizer.state


def test_noise_of_parts_whose_place_is_unknown():
    run_ranks(2, check_own_cut)


def check_scaled(rank, world_size, mesh_shape, placements):
    """All ranks skip the step of an overflow in the shard of one; norms are of unscaled gradients."""
    mesh = init_device_mesh("cpu", mesh_shape)
    for kind, options in CASES:
        both = [make(kind, options, torch.float32, *how) for how in ((), (mesh, placements))]
        norms = []
        for params, optimizer in both:
            scaler = amp.LossScaler("cpu", init_scale=64.0)
            for seed in range(5):
                give_grads(params, seed, scaler.scale(torch.ones(())).item(), bad=seed in (0, 3))
                scaler.step(optimizer, max_norm=2.0)
                scaler.update()
            assert scaler.skipped_steps == 2 and scaler.get_scale() == 16
            norms.append(scaler.total_norm)
        torch.testing.assert_close(*norms)
        check_equal(*both)


@pytest.mark.parametrize(("mesh_shape", "placements"), [((2,), LINE), ((2, 2), SQUARE)], ids=["two", "two by two"])
def test_with_a_loss_scaler(mesh_shape, placements):
    run_ranks(math.prod(mesh_shape), check_scaled, mesh_shape, placements)


def check_all_reduces(rank, world_size):
    """A step has one all-reduce for each process group of each way of sharding, and none for tensors that are whole."""
    mesh = init_device_mesh("cpu", (2, 2))
    params, optimizer = make(optim.LARS, {}, torch.float32, mesh, SQUARE)
    calls, all_reduce = [], dist.all_reduce

    def counted(tensor, **options):
        calls.append((tuple(tensor.shape), dist.get_world_size(options["group"])))
        all_reduce(tensor, **options)

    dist.all_reduce = counted
    try:
        give_grads(params, 0)
        optimizer.step()
    finally:
        dist.all_reduce = all_reduce
    assert sorted(calls) == [((1, 2), 2)] + [((2, 2), 2)] * 3, "two ways over one dimension, and one over both"


def test_number_of_all_reduces():
    run_ranks(4, check_all_reduces)


def model_of(rank=None, mesh=None, width=8, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, width), nn.Tanh(), nn.Linear(width, 3)).to(dtype)
    if mesh is not None:
        if mesh.ndim == 2:
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh["dp"])
    return model


def backward(model, seed):
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)
    model.zero_grad()
    model(x).square().mean().backward()


def check_fsdp(rank, world_size, mesh_shape, kind, options):
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp")[: len(mesh_shape)])
    whole, sharded = model_of(), model_of(rank, mesh)
    optimizers = [kind(model.parameters(), lr=0.1, weight_decay=0.1, **options) for model in (whole, sharded)]
    for seed in range(4):
        backward(sharded, 10 * seed + mesh["dp"].get_local_rank())
        for p, other in zip(whole.parameters(), sharded.parameters(), strict=True):
            p.grad = other.grad.full_tensor()
        for optimizer in optimizers:
            optimizer.step()
    for p, other in zip(whole.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(other.full_tensor(), p.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)], ids=["fully_shard", "with tensor parallelism"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(optim.LARS, {"eps": 0.1}), (optim.LAMB, {"preset": "nvlamb"}), (optim.SGLD, {})],
    ids=["LARS", "LAMB", "SGLD"],
)
def test_models_of_fully_shard(mesh_shape, kind, options):
    run_ranks(math.prod(mesh_shape), check_fsdp, mesh_shape, kind, options)


def check_saved(rank, world_size, kind, options, folder):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    width = 1000 if options else 8  # codes are for large parts
    dtype = torch.bfloat16 if "master_weights" in options else torch.float32
    model = model_of(rank, mesh, width, dtype)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    for seed in range(2):
        backward(model, seed)
        optimizer.step()
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    other = model_of(rank, mesh, width, dtype)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed = kind(other.parameters(), lr=0.5, **options)
    loaded = {"optimizer": get_optimizer_state_dict(other, resumed)}
    dcp.load(loaded, checkpoint_id=folder)
    set_optimizer_state_dict(other, resumed, loaded["optimizer"])
    for trained, its in ((model, optimizer), (other, resumed)):
        for seed in (2, 3):
            backward(trained, seed)
            its.step()
    for p, its in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.to_local(), its.to_local()), "as if the run had never stopped"
    entry = resumed.state[next(other.parameters())]
    if "state_codec" in options:
        assert entry["exp_avg"].dtype == torch.uint8
    if options.get("master_weights") == "8bit":
        assert entry["master_param"].dtype == torch.uint8


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (optim.LARS, {}),
        (optim.LAMB, {}),
        (optim.SGLD, {}),
        (optim.AdamW, {"state_codec": "int8"}),
        (optim.AdamW, NOISY[1][1]),
        (optim.LAMB, {"state_codec": "int8", "master_weights": "8bit"}),
    ],
    ids=["LARS", "LAMB", "SGLD", "AdamW in 8 bits", "AdamW rounded", "LAMB in 8 bits"],
)
def test_state_through_a_distributed_checkpoint(kind, options, tmp_path):
    run_ranks(2, check_saved, kind, options, str(tmp_path))
