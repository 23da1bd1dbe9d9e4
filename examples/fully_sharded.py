"""FSDP2: every rank has a shard of the model and receives its gradients in int8. With --hosts, hybrid sharding: each
host has a replica, sharded among its ranks, and only gradients in int8 are sent between hosts.

torchrun --standalone --nproc-per-node 2 examples/fully_sharded.py
torchrun --standalone --nproc-per-node 4 examples/fully_sharded.py --hosts 2
"""

import torch.distributed as dist
from shared import TASK, accuracy, batches, finish, parser, start
from tasks import loss
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dltrain_ext import amp, fsdp, optim


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--hosts", type=int, default=1, help="hosts, each with a replica (%(default)s)")
    args = options.parse_args()
    start()
    sizes = (args.hosts, dist.get_world_size() // args.hosts)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    model = TASK.model()
    for layer in model:
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    state = fsdp.register(model, "int8", replicas=mesh["replicate"] if args.hosts > 1 else None)

    optimizer = optim.AdamW(model.parameters(), lr=TASK.lr)
    scaler = amp.LossScaler("cpu", enabled=False)  # only clips, with the norm over all shards
    for inputs, targets in batches(args.steps):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        scaler.step(optimizer, max_norm=1.0)

    ratio = state.stats()["ratio"]  # None if one rank has all shards
    sent = f"{ratio:.2f} times fewer bytes than fp32" if ratio else "one rank, which sends nothing"
    finish(f"{TASK.metric} {accuracy(model):.2%} after {args.steps} steps, with {sent}")


if __name__ == "__main__":
    main()
