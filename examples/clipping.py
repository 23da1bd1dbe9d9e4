"""Gradient clipping: clip_grad_norm_ before the step, or both in one pass with a LossScaler that does not scale.

Run: torchrun --standalone --nproc-per-node 2 examples/clipping.py
"""

import torch
from shared import TASK, accuracy, batches, finish, parser, start
from tasks import loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from dltrain_ext import amp, ddp, optim

MAX_NORM = 0.5


def train(steps: int, fused: bool) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = DistributedDataParallel(TASK.model())
    optimizer = optim.AdamW(model.parameters(), lr=TASK.lr)
    scaler = amp.LossScaler(enabled=False)
    state = ddp.register(model, codec="raw", scaler=scaler)
    for inputs, targets in batches(steps):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        if fused:
            scaler.step(optimizer, max_norm=MAX_NORM, grad_stats=state.grad_stats)
        else:
            clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
    return model


def main() -> None:
    args = parser(__doc__).parse_args()
    start()
    plain, fused = train(args.steps, fused=False), train(args.steps, fused=True)
    difference = max((a - b).abs().max().item() for a, b in zip(plain.parameters(), fused.parameters(), strict=True))
    finish(
        f"test accuracy: {accuracy(plain):.1%} and {accuracy(fused):.1%}",
        f"largest difference of a parameter: {difference:.1g}",
    )


if __name__ == "__main__":
    main()
