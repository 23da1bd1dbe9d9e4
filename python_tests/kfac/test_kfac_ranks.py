"""kfac.KFAC on several ranks: accuracy against fp64, the same bits, bytes, DDP, checkpoints."""

import re

import exact
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import ROOT, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import codecs, comm, ddp, kfac

DAMPING, BATCH = 1e-2, 16
EPS = torch.finfo(torch.float32).eps
GRIDS = [(1, 1.0), (2, 0.0), (2, 1.0), (4, 0.0), (4, 0.5), (4, 1.0)]  # ranks, fraction of workers


def make():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(150, 20), nn.Tanh(), nn.Linear(20, 5)
    )


def data_of(rank, step=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(BATCH, 2, 5, 5, generator=generator), torch.randint(0, 5, (BATCH,), generator=generator)


def backward(model, rank, step=0):
    model.zero_grad()
    inputs, targets = data_of(rank, step)
    F.cross_entropy(model(inputs), targets).backward()


def same_on_all(tensor):
    flat = torch.cat([some.flatten() for some in tensor]) if isinstance(tensor, list) else tensor.flatten()
    found = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(found, flat)
    return all(torch.equal(some, flat) for some in found)


def check_step(rank, world_size, fraction, codec):
    module = make()
    model = DistributedDataParallel(module)
    preconditioner = kfac.KFAC(model, DAMPING, kl_clip=None, grad_worker_fraction=fraction, codec=codec)
    backward(model, rank)
    before = exact.gradients(module)
    preconditioner.step()
    after = exact.gradients(module)
    factors = []
    for each in range(world_size):
        inputs, targets = data_of(each)
        factors.append(
            exact.factors(module, inputs, lambda out, t=targets: F.cross_entropy(out, t, reduction="none"), "expand")
        )
    saved = preconditioner.state_dict()["layers"]
    errors = []
    for name, (a, g) in exact.means(factors).items():
        for key, factor in (("A", a), ("G", g)):
            assert torch.linalg.norm(saved[name][key] - factor) <= 20 * EPS * torch.linalg.norm(factor), (name, key)
        condition = sum(torch.linalg.cond(some) for some in exact.damped(a, g, DAMPING))
        wanted = exact.preconditioned(a, g, before[name], DAMPING)
        error = torch.linalg.norm(after[name] - wanted) / torch.linalg.norm(wanted)
        if codec == "raw":
            assert error <= 10 * condition * EPS, (name, error, condition)
        errors.append(float(error))
    assert same_on_all(list(after.values()))
    assert preconditioner.retries == 0
    return max(errors)


@pytest.mark.parametrize("ranks, fraction", GRIDS)
def test_inverses_have_the_accuracy_of_their_condition_and_the_same_bits(ranks, fraction):
    run_ranks(ranks, check_step, fraction, "raw")


@pytest.mark.parametrize("ranks, fraction", GRIDS[1:])
def test_fp16_loses_less_than_a_hundredth(ranks, fraction):
    errors = run_ranks(ranks, check_step, fraction, "fp16")
    assert 1e-5 < max(errors) < 1e-2, "it is used, and good enough for a direction"


def check_dominant(rank, world_size, size, scale, codec):
    torch.manual_seed(0)
    module = nn.Linear(size, 10)
    nn.init.zeros_(module.weight)
    model = DistributedDataParallel(nn.Sequential(module))
    preconditioner = kfac.KFAC(model, kl_clip=None, codec=codec)
    generator = torch.Generator().manual_seed(rank + 1)
    inputs = (1 + 0.1 * torch.randn(256, size, generator=generator)) * scale
    F.cross_entropy(model(inputs), torch.randint(0, 7, (256,), generator=generator)).backward()
    before = exact.gradients(model.module)["0"].clone()
    preconditioner.step()
    factors = preconditioner.state_dict()["layers"]["0"]
    a, g = factors["A"].double(), factors["G"].double()
    wanted = exact.preconditioned(a, g, before, 1e-3)
    error = torch.linalg.norm(exact.gradients(model.module)["0"] - wanted) / torch.linalg.norm(wanted)
    return float(error), float(torch.linalg.cond(exact.damped(a, g, 1e-3)[0]))


def documented():
    """Return the rows of the table of errors: inputs, scale, condition, and the errors in raw and fp16."""
    page = (ROOT / "docs" / "kfac.md").read_text()
    rows = re.findall(r"^\| ([\d,]+) +\| (\d+) +\| ([\d.e]+) +\| ([\d.]+)% +\| ([\d.]+)% *\|$", page, re.M)
    assert len(rows) == 4
    return [tuple(float(cell.replace(",", "")) for cell in row) for row in rows]


@pytest.mark.parametrize("row", documented(), ids=lambda row: f"{row[0]:.0f}-{row[1]:.0f}")
def test_a_dominant_direction_costs_what_the_page_says(row):
    size, scale, condition, *percents = row
    for codec, percent in zip(("raw", "fp16"), percents, strict=True):
        (error, found), _ = run_ranks(2, check_dominant, int(size), scale, codec)
        assert 0.5 < 100 * error / percent < 2, (codec, error)
        assert 0.9 < found / condition < 1.1
        assert error < found * (10 * EPS if codec == "raw" else 2**-11)


def check_bytes(rank, world_size, fraction):
    model = make()
    preconditioner = kfac.KFAC(model, grad_worker_fraction=fraction, factor_update_steps=1, inv_update_steps=2)
    workers = max(1, round(fraction * world_size))
    sizes = {"0": (6, 19), "3": (20, 151), "5": (5, 21)}
    packed = {name: sum(size * (size + 1) // 2 for size in both) for name, both in sizes.items()}
    owners = preconditioner.owners
    assert set(owners.owner) == set(sizes)
    own = sum(packed[name] for name in owners.owned)
    worked_on = sum(sizes[name][0] * sizes[name][1] for name in owners.worked_on)
    fp16 = codecs.nbytes("fp16", 1)
    with_inverses = fp16 * (sum(packed.values()) - own + (workers - 1) * own)
    gradients = 4 * (world_size // workers - 1) * worked_on
    for step in range(4):
        backward(model, rank, step)
        before = owners.stats()["wire_bytes"]
        preconditioner.step()
        sent = owners.stats()["wire_bytes"] - before
        few = 4 * 2 * world_size * 3 * 8 if step % 2 == 0 else 0  # a few numbers for each layer
        assert gradients + (with_inverses if few else 0) <= sent <= gradients + (with_inverses if few else 0) + few, (
            step
        )


@pytest.mark.parametrize("ranks, fraction", GRIDS)
def test_bytes_are_those_of_triangles_and_only_travel_with_inverses(ranks, fraction):
    run_ranks(ranks, check_bytes, fraction)


def check_with_hook(rank, world_size):
    found = {}
    for hook in (False, True):
        module = make()
        model = DistributedDataParallel(module)
        if hook:
            ddp.register(model, codec="int8")
        preconditioner = kfac.KFAC(model, DAMPING)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for step in range(12):
            backward(model, rank, step)
            preconditioner.step()
            optimizer.step()
        found[hook] = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
        assert same_on_all(found[hook])
    assert 0 < torch.linalg.norm(found[True] - found[False]) < 0.05 * torch.linalg.norm(found[False])


def test_it_works_with_the_hook_and_without():
    run_ranks(2, check_with_hook)


def check_resumed(rank, world_size, states):
    model = make()
    preconditioner = kfac.KFAC(model, DAMPING, codec="raw")
    if states is None:
        for step in range(3):
            backward(model, rank, step)
            preconditioner.step()
        state = preconditioner.state_dict()
    else:
        preconditioner.load_state_dict(states)
        state = preconditioner.state_dict()
        assert state["steps"] == states["steps"] == 3
        for name, entries in state["layers"].items():
            for key, value in entries.items():
                torch.testing.assert_close(value, states["layers"][name][key], rtol=1e-5, atol=1e-7)
    backward(model, 0, 7)
    before = {name: gradient.clone() for name, gradient in exact.gradients(model).items()}
    preconditioner.step()
    after = exact.gradients(model)
    if states is not None:
        for name, entries in state["layers"].items():
            wanted = exact.preconditioned(entries["A"].double(), entries["G"].double(), before[name], DAMPING)
            along = torch.nn.functional.cosine_similarity(wanted.flatten(), after[name].double().flatten(), dim=0)
            assert along > 1 - 1e-5
    return state


def test_another_world_size_loads_a_checkpoint():
    states = run_ranks(2, check_resumed, None)
    for name, entries in states[0]["layers"].items():
        for key, value in entries.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[1]["layers"][name][key])), (name, key)
    run_ranks(1, check_resumed, states[0])
    run_ranks(3, check_resumed, states[0])


def check_owners(rank, world_size, workers):
    costs = {f"m{index}": float(7 * index % 5) for index in range(7)}
    shapes = {name: (3, index) for index, name in enumerate(costs)}
    owners = comm.Owners(costs, workers=workers)
    tensors = {name: torch.full(shape, float(rank + shape[1])) for name, shape in shapes.items()}
    mine = owners.reduce(tensors)
    assert list(mine) == owners.owned and all(owners.owner[name] == rank for name in mine)
    shared = owners.share(mine, shapes)
    assert list(shared) == owners.worked_on
    gathered = owners.gather(shared, shapes)
    assert gathered.keys() == costs.keys()
    for name, shape in shapes.items():
        assert torch.equal(gathered[name], torch.full(shape, (world_size - 1) / 2 + shape[1])), name
    total = sum(tensor.numel() for tensor in tensors.values())
    sent = torch.tensor(float(owners.stats()["wire_bytes"]))
    dist.all_reduce(sent)
    if workers in (1, world_size):
        assert sent == 2 * (world_size - 1) * 4 * total, "no more than an all-reduce"
    few = owners.gather(owners.share(owners.reduce({"m3": tensors["m3"]}), {"m3": (3, 3)}), {"m3": (3, 3)})
    assert list(few) == ["m3"] and torch.equal(few["m3"], gathered["m3"])
    assert torch.equal(owners.sum(torch.tensor([float(rank)])), torch.tensor([world_size * (world_size - 1) / 2]))
    assert max(owners.loads()) <= 4 / 3 * max(max(costs.values()), sum(costs.values()) / world_size) + 1e-9
    return str(owners)


@pytest.mark.parametrize("ranks, workers", [(1, 1), (2, 1), (3, 3), (4, 1), (4, 2), (4, 4)])
def test_owners_reduce_share_and_gather(ranks, workers):
    texts = run_ranks(ranks, check_owners, workers)
    assert len(set(texts)) == 1 and f"rank {ranks - 1}" in texts[0] and "m4" in texts[0]


def check_unlike(rank, world_size):
    with pytest.raises(ValueError, match=r"workers: expected a divisor of the number of ranks, 2, got 3"):
        comm.Owners({"a": 1}, workers=3)
    with pytest.raises(ValueError, match=r"costs: .* got nan for 'a'"):
        comm.Owners({"a": float("nan")})
    owners = comm.Owners({"a": 2, "b": 1})
    with pytest.raises(ValueError, match="tensors: expected names out of a, b, got 'c'"):
        owners.reduce({"c": torch.zeros(1)})
    with pytest.raises(ValueError, match="tensors: expected one of shape"):
        owners.gather({}, {"a": (1,), "b": (1,)})


def check_failure(rank, world_size):
    model = make()
    preconditioner = kfac.KFAC(model, 1e-200)
    backward(model, rank)
    with pytest.raises(ArithmeticError, match="cannot be inverted"):
        preconditioner.step()
    preconditioner.damping = DAMPING
    preconditioner.step()
    order = ["a", "b"] if rank == 0 else ["b", "a"]
    owners = comm.Owners(dict.fromkeys(order, 1.0))
    assert owners.owner == {"a": 0, "b": 1}, "the order in which costs are given does not matter"


def test_all_ranks_see_a_failed_inversion():
    run_ranks(2, check_failure)


def check_sharded(rank, world_size):
    from torch.distributed.fsdp import fully_shard

    model = make()
    fully_shard(model)
    with pytest.raises(ValueError, match="model: expected parameters that are not sharded, got layer '0'"):
        kfac.KFAC(model)


def test_sharded_layers_are_refused():
    run_ranks(2, check_sharded)


def check_fraction(rank, world_size):
    with pytest.raises(ValueError, match=r"grad_worker_fraction: expected one of 1/3, 3/3 on 3 ranks, got 0.7"):
        kfac.KFAC(make(), grad_worker_fraction=0.7)


def test_a_fraction_must_divide_the_ranks():
    run_ranks(3, check_fraction)


def test_owners_refuse_what_they_do_not_know():
    run_ranks(2, check_unlike)
