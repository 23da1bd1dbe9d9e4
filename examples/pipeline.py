"""Pipeline parallelism: each of two stages is on its own rank, in DDP with the hook among the replicas of the stage.
The schedule calls the hook in the last of the micro-batches' backward passes only.

torchrun --standalone --nproc-per-node 4 examples/pipeline.py
Run: torchrun --standalone --nproc-per-node 2 examples/pipeline.py
"""

import torch
import torch.distributed as dist
from shared import TASK, accuracy, batches, finish, parser, start
from tasks import loss
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import amp, ddp, optim

BATCH_SIZE = 64
MICRO_BATCHES = 4


def micro_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return loss(logits, targets) / MICRO_BATCHES


def train(steps: int, codec: str) -> tuple[nn.Module, ddp.AllReduceState]:
    """Return the whole model, and the state of the hook of this rank's stage."""
    if dist.get_world_size() % 2:
        raise SystemExit(f"expected two ranks for each replica, got {dist.get_world_size()} in all; see --help")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "pipe"))
    pipe, is_last = mesh["pipe"].get_group(), mesh["pipe"].get_local_rank() == 1
    net = nn.Sequential(*TASK.model().children())
    stages = net[:5], net[5:]
    model = DistributedDataParallel(stages[is_last], process_group=mesh["data"].get_group())
    scaler = amp.LossScaler("cpu", enabled=False)  # only clips
    state = ddp.register(model, codec, scaler=scaler)
    optimizer = optim.AdamW(model.parameters(), lr=TASK.lr)
    # Without samples the stage would infer them in a forward pass of DDP outside of no_sync, and the first micro-batch
    # would call the hook, too.
    sample = torch.zeros(BATCH_SIZE // mesh["data"].size() // MICRO_BATCHES, *TASK.train[0].shape[1:])
    activations = stages[0](sample)
    samples = (activations, stages[1](activations)) if is_last else (sample, activations)
    stage = PipelineStage(model, int(is_last), 2, torch.device("cpu"), *samples, group=pipe)
    # With scale_grads the schedule would divide the gradients after the hook has computed grad_stats.
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=micro_loss, scale_grads=False)
    for inputs, targets in batches(steps, BATCH_SIZE, (mesh["data"].get_local_rank(), mesh["data"].size())):
        optimizer.zero_grad()
        if is_last:
            schedule.step(target=targets)
        else:
            schedule.step(inputs)
        squares = state.grad_stats.sum_squares  # of this stage
        dist.all_reduce(squares, group=pipe)
        scaler.step(optimizer, max_norm=1.0, grad_stats=amp.GradStats(squares))
    for i, part in enumerate(stages):
        for p in part.parameters():
            dist.broadcast(p.detach(), group=pipe, group_src=i)
    return net, state


def main() -> None:
    args = parser(__doc__).parse_args()
    start()
    net, state = train(args.steps, "int8")
    stats = state.stats()
    sent = f"{1 / stats['ratio']:.1%} of fp32's" if stats["wire_bytes"] else "none, as there is one replica"
    finish(
        f"test accuracy: {accuracy(net):.1%}",
        f"the hook was called in {state.steps} of {MICRO_BATCHES * args.steps} backward passes",
        f"bytes sent for gradients: {sent}",
    )


if __name__ == "__main__":
    main()
