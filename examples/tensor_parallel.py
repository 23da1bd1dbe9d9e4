"""Tensor parallelism: the ranks of a replica divide the linear layers, and only gradients in int8 are sent between the
replicas, by DDP's hook or, with --sharded, by FSDP2, which also shards the layers' parts over the replicas.

torchrun --standalone --nproc-per-node 4 examples/tensor_parallel.py
Run: torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py --tensor 1
"""

import warnings

import torch
import torch.distributed as dist
from shared import TASK, accuracy, batches, finish, parser, start
from tasks import loss
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import amp, ddp, fsdp, optim

PLAN = {"6": ColwiseParallel(), "8": RowwiseParallel()}  # the linear layers


def stats_of_whole(params: list[nn.Parameter], divided: list[bool], mesh: DeviceMesh) -> amp.GradStats:
    """Return the sum of squares of whole gradients, of which each rank of the mesh has the divided ones in part."""
    squares = [p.grad.double().square().sum() for p in params if p.grad is not None]
    of_parts = torch.tensor(divided)
    parts, whole = torch.stack(squares)[of_parts].sum(), torch.stack(squares)[~of_parts].sum()
    dist.all_reduce(parts, group=mesh.get_group())
    return amp.GradStats(parts + whole)


def train(steps: int, tensor: int, is_sharded: bool, codec: str) -> tuple[nn.Module, float | None]:
    """Return the model, and how many times fewer bytes than in fp32 the replicas have sent; None if there is one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tensor, tensor), mesh_dim_names=("data", "tensor"))
    net = parallelize_module(TASK.model(), mesh["tensor"], PLAN)
    divided = [isinstance(p, DTensor) and p.placements[0].is_shard() for p in net.parameters()]
    model: nn.Module = net
    if is_sharded:
        # No operation in place follows the layers, of which this warns.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        for layer in (*(layer for layer in net.children() if next(layer.parameters(), None) is not None), net):
            fully_shard(layer, mesh=mesh["data"])
        state: ddp.AllReduceState | fsdp.ShardedState = fsdp.register(net, codec)
    else:
        model = DistributedDataParallel(net, device_mesh=mesh["data"])  # its parameters are the local tensors
        state = ddp.register(model, codec)
    params = list(model.parameters())  # DDP's first forward pass removes the divided ones from the modules
    optimizer = optim.AdamW(params, lr=TASK.lr)
    scaler = amp.LossScaler("cpu", enabled=False)  # only clips
    for inputs, targets in batches(steps, replica=(mesh["data"].get_local_rank(), mesh["data"].size())):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        # The scaler adds up the squares of DTensors. DDP's tensors do not say that they are parts of others.
        scaler.step(optimizer, 1.0, None if is_sharded else stats_of_whole(params, divided, mesh["tensor"]))
    return model, state.stats()["ratio"] if mesh["data"].size() > 1 else None


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tensor", type=int, default=2, help="ranks that divide a replica (%(default)s)")
    options.add_argument("--sharded", action="store_true", help="FSDP2 instead of DDP")
    args = options.parse_args()
    start()
    model, ratio = train(args.steps, args.tensor, args.sharded, "int8")
    sent = f"{1 / ratio:.1%} of fp32's" if ratio else "none, as there is one replica"
    finish(f"test accuracy: {accuracy(model):.1%}", f"bytes sent for gradients: {sent}")


if __name__ == "__main__":
    main()
