"""FSDP2 with CPUOffloadPolicy: a GPU has only the layers in use, and the CPU keeps and updates the shards, which takes
the memory of parameters, gradients and AdamW's state from the GPU. Without a GPU for each rank all is on the CPU.

Run: torchrun --standalone --nproc-per-node 2 examples/offload.py
"""

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from shared import TASK, accuracy, batches, finish, parser, start
from tasks import loss
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dltrain_ext import amp, fsdp, optim


def kept_on_cpu(tensors: Iterable[Tensor]) -> str:
    """Return the size of this rank's shards."""
    shards = [tensor.to_local() for tensor in tensors if isinstance(tensor, DTensor)]
    return f"{sum(shard.nbytes for shard in shards if shard.device.type == 'cpu') / 2**10:.0f} KiB"


def main() -> None:
    args = parser(__doc__).parse_args()
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    start("cpu:gloo,cuda:nccl" if on_gpu else "gloo")  # the norm of the gradients is added up on the CPU
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", (dist.get_world_size(),))
    model = TASK.model()
    for layer in (*(layer for layer in model.children() if next(layer.parameters(), None) is not None), model):
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=on_gpu))
    # FSDP moves the inputs to the GPU; this moves the outputs to the targets.
    model.register_forward_hook(lambda *call: call[-1].cpu())
    state = fsdp.register(model, "int8")
    optimizer = optim.AdamW(model.parameters(), lr=TASK.lr)
    scaler = amp.LossScaler("cpu", enabled=False)  # only clips
    for inputs, targets in batches(args.steps):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        scaler.step(optimizer, max_norm=1.0)
    moments = [value for of_one in optimizer.state.values() for value in of_one.values()]
    ratio = state.stats()["ratio"]  # None if one rank has all shards
    finish(
        f"test accuracy: {accuracy(model):.1%}; the layers ran on the {'GPU' if on_gpu else 'CPU'}",
        f"on rank 0 the CPU keeps {kept_on_cpu(model.parameters())} of parameters, {kept_on_cpu(moments)} of moments",
        f"bytes sent for gradients: {1 / ratio:.1%} of fp32's" if ratio else "one rank, so no gradients are sent",
    )


if __name__ == "__main__":
    main()
