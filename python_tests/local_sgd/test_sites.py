"""Sites of several ranks by DDP and FSDP2, and what sites must have in common."""

import pytest
import torch
import torch.distributed as dist
from local_training import backups, flat, give_grads, network, train
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import local_sgd, optim

STEPS = range(1, 13)
SCHEDULES = [dict(), dict(fragments=4), dict(fragments=2, delay=1)]


def mesh_of(world_size):
    return init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("sites", "ranks"))


def in_ddp(rank, world_size, dtype, options):
    """Train with the data of one rank per site; return the parameters and the bytes sent by this rank."""
    mesh = mesh_of(world_size)
    model = network(dtype, seed=mesh.get_local_rank("sites"))
    model = DistributedDataParallel(model, process_group=mesh.get_group("ranks"))
    inner = optim.AdamW(model.parameters(), lr=1e-3)
    outer = local_sgd.DiLoCo(model, inner, sync_every=4, group=mesh.get_group("sites"), **options)
    train(model, inner, mesh.get_local_rank("sites"), STEPS)
    outer.finish()
    assert outer.outer_steps == 3 * options.get("fragments", 1)
    for parameter in model.parameters():
        master = inner.state[parameter].get("master_param", parameter)
        assert torch.equal(parameter, master.to(dtype))
    return flat(model), outer.metrics()["outer/wire_bytes"]


def one_per_site(rank, world_size, dtype, options):
    model = network(dtype, seed=rank)
    inner = optim.AdamW(model.parameters(), lr=1e-3)
    outer = local_sgd.DiLoCo(model, inner, sync_every=4, **options)
    train(model, inner, rank, STEPS)
    outer.finish()
    return flat(model), outer.metrics()["outer/wire_bytes"]


@pytest.mark.parametrize("codec", ["raw", "int4"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_of_ddp_share_the_work_of_one(codec, schedule, dtype):
    """The ranks of a site have the same data, so that it moves like one rank, to the bit."""
    options = dict(codec=codec, **schedule)
    *found, (last, _) = run_ranks(4, in_ddp, dtype, options)
    alone = run_ranks(2, one_per_site, dtype, options)
    if "delay" not in schedule and "fragments" not in schedule:
        assert torch.equal(found[0][0], last)
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[2][0], last)
    assert torch.equal(found[0][0], alone[0][0]) and torch.equal(last, alone[1][0])
    sent = found[0][1] + found[1][1]
    assert 0.95 * alone[0][1] < sent < 1.2 * alone[0][1]
    assert 0.3 < found[0][1] / sent < 0.7


def in_channels_last(rank, world_size, memory_format):
    mesh = mesh_of(world_size)
    torch.manual_seed(mesh.get_local_rank("sites"))
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 40, 3)).to(memory_format=memory_format)
    model = DistributedDataParallel(model, process_group=mesh.get_group("ranks"))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    local_sgd.DiLoCo(model, inner, sync_every=2, codec="raw", group=mesh.get_group("sites"))
    for step in range(4):
        give_grads(model, mesh.get_local_rank("sites"), step)
        inner.step()
    return flat(model)


def test_ranks_share_parameters_in_channels_last():
    expected, *_ = run_ranks(4, in_channels_last, torch.contiguous_format)
    for found in run_ranks(4, in_channels_last, torch.channels_last):
        assert torch.equal(found, expected)


def resume_in_ddp(rank, world_size):
    """Each rank saves and loads what it averages."""
    mesh = mesh_of(world_size)
    site = mesh.get_local_rank("sites")

    def make():
        model = DistributedDataParallel(network(), process_group=mesh.get_group("ranks"))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        options = dict(sync_every=4, fragments=2, min_compress_numel=64, group=mesh.get_group("sites"))
        return model, inner, local_sgd.DiLoCo(model, inner, **options)

    model, inner, outer = make()
    train(model, inner, site, range(1, 6))
    saved, parameters = outer.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
    train(model, inner, site, range(6, 13))
    expected = flat(model)
    model, inner, outer = make()
    model.load_state_dict(parameters)
    outer.load_state_dict(saved)
    train(model, inner, site, range(6, 13))
    assert torch.equal(flat(model), expected)
    return sorted(saved["backup"])


def test_a_run_of_ddp_resumes():
    first, second, third, fourth = run_ranks(4, resume_in_ddp)
    assert first == third and second == fourth and not set(first) & set(second) and len(first + second) == 6


def in_fsdp(rank, world_size, options, dtype=torch.float32):
    mesh = mesh_of(world_size)
    model = network(dtype, seed=mesh.get_local_rank("sites"))
    for part in (*model, model):
        fully_shard(part, mesh=mesh["ranks"])
    kind = torch.optim.AdamW if dtype == torch.float32 else optim.AdamW
    inner = kind(model.parameters(), lr=1e-3)
    outer = local_sgd.DiLoCo(model, inner, sync_every=4, group=mesh.get_group("sites"), **options)
    train(model, inner, rank, STEPS)
    outer.finish()
    assert outer.outer_steps == 3 * options.get("fragments", 1)
    whole = torch.cat([parameter.full_tensor().detach().flatten() for parameter in model.parameters()])
    return backups(outer), whole, outer.metrics()["outer/wire_bytes"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_of_fsdp_average_their_shards(schedule):
    found = run_ranks(4, in_fsdp, schedule, fresh=True)
    backup, whole, _ = zip(*found, strict=True)
    for here, there in ((0, 2), (1, 3)):
        assert backup[here].keys() == backup[there].keys()
        assert all(torch.equal(value, backup[there][name]) for name, value in backup[here].items())
    assert not torch.equal(backup[0]["0.weight"], backup[1]["0.weight"])
    assert torch.equal(whole[0], whole[1]) and torch.equal(whole[2], whole[3])
    assert torch.equal(whole[0], whole[2]) == (not schedule)
    assert not torch.equal(whole[0], flat(network()))


def test_half_shards_with_masters():
    found = run_ranks(4, in_fsdp, dict(), torch.bfloat16, fresh=True)
    assert all(torch.equal(whole, found[0][1]) for _, whole, _ in found)


def in_uneven_shards(rank, world_size):
    """A dimension of 1 leaves the second rank of a site without elements."""
    mesh = mesh_of(world_size)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1), nn.Linear(1, 10))
    fully_shard(model, mesh=mesh["ranks"])
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = local_sgd.DiLoCo(model, inner, sync_every=4, fragments=4, group=mesh.get_group("sites"))
    train(model, inner, rank, STEPS)
    assert outer.outer_steps == 12
    return torch.cat([parameter.full_tensor().detach().flatten() for parameter in model.parameters()])


def test_a_rank_may_have_no_elements_of_a_parameter():
    found = run_ranks(4, in_uneven_shards, fresh=True)
    assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])


def with_wrong_groups(rank, world_size):
    mesh = mesh_of(world_size)
    ranks, sites = mesh.get_group("ranks"), mesh.get_group("sites")
    replica = DistributedDataParallel(network())
    sharded = network()
    fully_shard(sharded, mesh=mesh["ranks"])
    for model, group in (
        (replica, None),
        (replica, sites),
        (DistributedDataParallel(network(), process_group=ranks), None),
        (DistributedDataParallel(network(), process_group=ranks), ranks),
        (sharded, None),
        (sharded, ranks),
    ):
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"group: expected one rank of each site, got ranks \[\d, \d.*device mesh"):
            local_sgd.DiLoCo(model, inner, group=group)


def test_two_ranks_of_one_site_are_refused():
    run_ranks(4, with_wrong_groups, fresh=True)


def recover_in_ddp(rank, world_size):
    mesh = mesh_of(world_size)
    model = DistributedDataParallel(network(), process_group=mesh.get_group("ranks"))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = local_sgd.DiLoCo(model, inner, sync_every=4, group=mesh.get_group("sites"))
    with pytest.raises(RuntimeError, match="expected sites of one rank"):
        outer.recover()


def test_sites_of_several_ranks_do_not_recover():
    run_ranks(4, recover_in_ddp)


def from_own_start(rank, world_size, group_of_some, dtype):
    group = dist.new_group([1, 2]) if group_of_some else None
    if group_of_some and rank == 0:
        return None
    model = network(dtype, seed=rank)
    inner = optim.SGD(model.parameters(), lr=0.0)
    local_sgd.DiLoCo(model, inner, sync_every=100, fragments=2, group=group)
    train(model, inner, rank, range(1, 2))
    return flat(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_of_some", [False, True])
def test_all_sites_begin_with_the_parameters_of_the_first(group_of_some, dtype):
    found = run_ranks(3, from_own_start, group_of_some, dtype)
    first = 1 if group_of_some else 0
    assert all(each is None or torch.equal(each, flat(network(dtype, seed=first))) for each in found)


class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.other = network()


DIFFERENCES = [
    dict(lr=0.5),
    dict(sync_every=8),
    dict(momentum=0.8),
    dict(nesterov=False),
    dict(fragments=2),
    dict(delay=1),
    dict(mix=0.25),
    dict(codec="int8"),
    dict(min_compress_numel=1),
    dict(error_feedback=False),
    "names",
    "shapes",
    "frozen",
]


def differ(rank, world_size):
    for difference in DIFFERENCES:
        model, options = network(), {}
        if rank == 1:
            if isinstance(difference, dict):
                options = difference
            elif difference == "names":
                model = Renamed()
            elif difference == "shapes":
                model[2] = nn.Linear(64, 11)
            else:
                model[0].weight.requires_grad_(False)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"lr, .*: expected the same at all sites"):
            local_sgd.DiLoCo(model, inner, **(dict(sync_every=4) | options))
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    local_sgd.DiLoCo(model, inner, sync_every=2)
    train(model, inner, rank, range(1, 3))
    return flat(model)


def test_sites_that_disagree_are_refused_everywhere():
    found = run_ranks(3, differ)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def by_local_sgd(rank, world_size):
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = local_sgd.LocalSGD(model, inner, sync_every=3)
    train(model, inner, rank, range(1, 4))
    own = flat(model)
    alone = network()
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), rank, range(1, 4))
    assert outer.outer_steps == 1
    return own, flat(alone)


def test_local_sgd_takes_the_mean_of_the_parameters():
    (mean, first), (other, second), (_, third) = run_ranks(3, by_local_sgd)
    assert torch.equal(mean, other)
    torch.testing.assert_close(mean, (first + second + third) / 3, rtol=1e-6, atol=1e-7)
