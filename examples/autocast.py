"""Mixed precision by torch.autocast: fp16 under a LossScaler, bf16 without; clipping is part of the step in both.

The hook finds the norm and the verdict while it reduces, so the step does not read the gradients for them.
Run: torchrun --standalone --nproc-per-node 2 examples/autocast.py --dtype fp16
"""

import shared
import torch
from tasks import loss
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import amp, ddp, optim

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def main() -> None:
    parser = shared.parser(__doc__)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the forward pass (%(default)s)")
    options = parser.parse_args()
    shared.start()
    model = DistributedDataParallel(shared.TASK.model())
    optimizer = optim.AdamW(model.parameters(), lr=shared.TASK.lr)
    scaler = amp.LossScaler("cpu", enabled=options.dtype == "fp16")  # bf16 has the range of fp32
    state = ddp.register(model, codec="int8", scaler=scaler)
    for inputs, targets in shared.batches(options.steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", DTYPES[options.dtype]):
            mean = loss(model(inputs), targets)
        scaler.scale(mean).backward()
        scaler.step(optimizer, max_norm=1.0, grad_stats=state.grad_stats)
        scaler.update()
    shared.finish(
        f"test accuracy: {shared.accuracy(model):.1%}",
        f"bytes sent: {1 / state.stats()['ratio']:.1%} of fp32's",
        f"loss scale: {scaler.get_scale():.0f}, steps skipped: {scaler.skipped_steps.item()}",
    )


if __name__ == "__main__":
    main()
