"""Gradient accumulation: the last of several backward passes sends their summed gradients, in int8 with error feedback.

Under no_sync() the hook is not called, and its residual is kept for the pass that sends.
Run: torchrun --standalone --nproc-per-node 2 examples/accumulation.py
"""

import contextlib

from shared import TASK, accuracy, batches, finish, parser, start
from tasks import loss
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import amp, ddp, optim


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--accumulate", type=int, default=4, help="backward passes per step (%(default)s)")
    args = options.parse_args()
    start()
    model = DistributedDataParallel(TASK.model())
    optimizer = optim.AdamW(model.parameters(), lr=TASK.lr)
    scaler = amp.LossScaler(enabled=False)  # only clips, as part of the step
    state = ddp.register(model, codec="int8", scaler=scaler)
    passes = args.steps * args.accumulate
    for number, (inputs, targets) in enumerate(batches(passes, batch_size=16), 1):
        steps = number % args.accumulate == 0
        with contextlib.nullcontext() if steps else model.no_sync():
            scaler.scale(loss(model(inputs), targets) / args.accumulate).backward()
        if steps:
            scaler.step(optimizer, max_norm=1.0, grad_stats=state.grad_stats)
            scaler.update()
            optimizer.zero_grad()
    stats = state.stats()
    finish(
        f"{passes} backward passes, {stats['steps']} of which sent {1 / stats['ratio']:.1%} of fp32's bytes",
        f"test accuracy: {accuracy(model):.1%}",
    )


if __name__ == "__main__":
    main()
