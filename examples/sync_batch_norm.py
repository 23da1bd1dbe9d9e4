"""SyncBatchNorm, which normalizes over the batches of all ranks, together with the hook. torch has it only for GPUs.

On the CPU this trains with BatchNorm instead, whose statistics DDP broadcasts from rank 0 before each forward pass.
Run: torchrun --standalone --nproc-per-node 2 examples/sync_batch_norm.py
"""

import os

import torch
from shared import TASK, accuracy, batches, finish, parser, start
from tasks import loss
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import ddp, optim


def main() -> None:
    args = parser(__doc__).parse_args()
    start()
    first, *others = TASK.model()
    model: nn.Module = nn.Sequential(first, nn.BatchNorm2d(32), *others)
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = DistributedDataParallel(model.to(device))
    state = ddp.register(model, codec="int8")
    optimizer = optim.AdamW(model.parameters(), lr=TASK.lr)
    for inputs, targets in batches(args.steps):
        optimizer.zero_grad()
        loss(model(inputs.to(device)), targets.to(device)).backward()
        optimizer.step()
    finish(
        "SyncBatchNorm over all ranks"
        if on_gpu
        else "not every rank has a GPU, so BatchNorm is used instead of SyncBatchNorm",
        f"test accuracy: {accuracy(model.module.to('cpu')):.1%}",
        f"bytes sent: {1 / state.stats()['ratio']:.1%} of fp32's",
    )


if __name__ == "__main__":
    main()
