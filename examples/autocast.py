"""Mixed precision with torch.autocast: fp16 with loss scaling, bf16 without; clipping is part of the step in both.

The hook finds the norm, and whether all gradients are finite, while it reduces, so the step does not have to.
Run: torchrun --standalone --nproc-per-node 2 examples/autocast.py --dtype fp16
"""

import torch
from shared import TASK, accuracy, batches, finish, parser, start
from tasks import loss
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import amp, ddp, optim

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype of the forward pass (%(default)s)")
    args = options.parse_args()
    start()
    model = DistributedDataParallel(TASK.model())
    optimizer = optim.AdamW(model.parameters(), lr=TASK.lr)
    scaler = amp.LossScaler("cpu", enabled=args.dtype == "fp16")  # bf16 has the range of fp32
    state = ddp.register(model, codec="int8", scaler=scaler)
    for inputs, targets in batches(args.steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", DTYPES[args.dtype]):
            mean = loss(model(inputs), targets)
        scaler.scale(mean).backward()
        scaler.step(optimizer, max_norm=1.0, grad_stats=state.grad_stats)
        scaler.update()
    finish(
        f"test accuracy: {accuracy(model):.1%}",
        f"bytes sent: {1 / state.stats()['ratio']:.1%} of fp32's",
        f"loss scale: {scaler.get_scale():.0f}, steps skipped: {scaler.skipped_steps.item()}",
    )


if __name__ == "__main__":
    main()
