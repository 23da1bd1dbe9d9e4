"""Modules that only call what is tested on CUDA elsewhere: on one GPU, two ranks end about where they do on the CPU."""

import pytest
import torch
import torch.distributed as dist
from contributions import same_everywhere
from ranks import on_gpu, run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import amp, comm, ddp, elastic, fsdp, kfac, local_sgd, monitor, optim, population, ps, sim

pytestmark = pytest.mark.gpu
STEPS, WIDTH, CLASSES = 12, 128, 10


def make(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, CLASSES)).to(
        device
    )


def train(model, optimizer, rank, device, scaler=None, before_step=lambda: None):
    data = torch.Generator().manual_seed(rank)
    scaler = amp.LossScaler(device, enabled=False) if scaler is None else scaler
    for _ in range(STEPS):
        inputs = torch.randn(32, WIDTH, generator=data).to(device)
        targets = torch.randint(CLASSES, (32,), generator=data).to(device)
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(inputs), targets)).backward()
        before_step()
        scaler.step(optimizer)
        scaler.update()


def values(model):
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return torch.cat([p.detach().float().cpu().flatten() for p in whole])


def averaging(rank, world_size, device, options):
    model = make(device).to(options.pop("dtype", torch.float32))
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    store = ps.Store() if options.pop("has_store", False) else None
    outer = local_sgd.DiLoCo(model, optimizer, sync_every=4, store=store, **options)
    if next(model.parameters()).dtype == torch.float32:
        train(model, optimizer, rank, device, amp.LossScaler(device))
    else:
        with torch.autocast(device, torch.bfloat16):
            train(model, optimizer, rank, device)
    kept = torch.cat([value.flatten() for value in outer.state_dict()["backup"].values()])
    assert outer.outer_steps == 3 * options.get("fragments", 1)
    if not options.get("delay"):
        kept_in_their_type = kept.to(next(model.parameters()).dtype).float()
        assert torch.equal(values(model), kept_in_their_type)
    return kept


def joining(rank, world_size, device):
    """Both are members of a job from the beginning."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    ports = [store and store.port]
    dist.broadcast_object_list(ports)
    own = dist.TCPStore("127.0.0.1", ports[0], is_master=False)
    model = make(device)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    members = elastic.Membership(own, least=world_size)
    outer = local_sgd.DiLoCo(model, optimizer, sync_every=4, codec="raw", group=members)
    train(model, optimizer, rank, device)
    assert outer.outer_steps == 3 and members.members == (1, 2)
    outer.close()
    dist.barrier()  # before the store goes
    return values(model)


def budgeting(rank, world_size, device):
    model = DistributedDataParallel(make(device))
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    choices = {codec: [comm.Choice(1 << 20, "direct", 1, time, True)] for codec, time in (("raw", 2.0), ("int8", 1.0))}
    tuning = comm.Tuning(world_size, sim.Network(), choices)
    state = ddp.register(model, "auto", max_error=0.05, tuning=tuning, min_compress_numel=0)
    train(model, optimizer, rank, device)
    assert "int8" in state.state_dict()["budget"]["codecs"].values()
    assert same_everywhere(values(model))
    return values(model)


def copying(rank, world_size, device):
    """The second member becomes a copy of the first, and trains on as it does."""
    model = make(device)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2 * (rank + 1), state_codec="int8")
    train(model, optimizer, rank, device)
    winner = population.exploit(model, optimizer, -rank, fraction=0.5)
    assert (winner and winner.rank) == (None if rank == 0 else 0)
    train(model, optimizer, 7, device)
    assert same_everywhere(values(model))
    return values(model)


def sharding(rank, world_size, device, codec):
    model = DistributedDataParallel(make(device))
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    scaler = amp.LossScaler(device)
    ddp.register(model, codec, shard=optimizer, scaler=scaler)
    train(model, optimizer, rank, device, scaler)
    return values(model)


def gathering(rank, world_size, device, offload):
    if device == "cuda":
        mesh = DeviceMesh.from_group(dist.new_group(backend="nccl"), "cuda")
    else:
        mesh = init_device_mesh("cpu", (world_size,))
    policy = CPUOffloadPolicy(pin_memory=device == "cuda") if offload else OffloadPolicy()
    model = fully_shard(make(device), mesh=mesh, offload_policy=policy)
    state = fsdp.register(model, "int8", gather="int8")
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, rank, device)
    assert state.stats()["gather_bytes"] > 0
    shards = [p.to_local().detach().cpu().flatten() for p in model.parameters()]
    return torch.cat(shards)


def watching(rank, world_size, device):
    model = DistributedDataParallel(make(device))
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    scaler = amp.LossScaler(device)
    state = ddp.register(model, "int4", scaler=scaler, watch=True)
    train(model, optimizer, rank, device, scaler)
    found = {**state.metrics(), **scaler.metrics(), **optimizer.metrics(), **state.communicator.metrics()}
    assert state.findings() == []
    assert set(monitor.over_ranks(found)) > set()
    return values(model)


def preconditioning(rank, world_size, device):
    module = make(device)
    model = DistributedDataParallel(module)
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    preconditioner = kfac.KFAC(model, 1e-2)
    train(model, optimizer, rank, device, before_step=preconditioner.step)
    return values(model)


def serving(rank, world_size, device):
    model = make(device)
    optimizer = ps.Optimizer(model.named_parameters(), optim.AdamW, lr=1e-2, codec="int8")
    train(model, optimizer, rank, device)
    found = values(model)
    optimizer.close()
    return found


CASES = {
    "DiLoCo": (averaging, {"codec": "raw"}),
    "DiLoCo in int4": (averaging, {}),
    "DiLoCo with a delay": (averaging, {"delay": 1, "fragments": 2}),
    "DiLoCo of bf16": (averaging, {"dtype": torch.bfloat16, "codec": "int8"}),
    "DiLoCo of members": (joining,),
    "DiLoCo on a store": (averaging, {"codec": "raw", "has_store": True}),
    "error budget": (budgeting,),
    "population": (copying,),
    "ZeRO-1": (sharding, "raw"),
    "ZeRO-1 in int8": (sharding, "int8"),
    "FSDP2": (gathering, False),
    "FSDP2 offloaded": (gathering, True),
    "metrics": (watching,),
    "K-FAC": (preconditioning,),
    "parameter server": (serving,),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_end_about_where_they_do_on_the_cpu(case):
    body, *args = CASES[case]
    expected = run_ranks(2, body, "cpu", *args, fresh=True)
    found = run_ranks(2, on_gpu, body, "cuda", *args, fresh=True)
    for on_cpu, on_cuda in zip(expected, found, strict=True):
        torch.testing.assert_close(on_cuda, on_cpu, rtol=0.05, atol=0.05)
