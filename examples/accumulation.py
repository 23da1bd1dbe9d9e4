"""Gradient accumulation: one backward pass of several sends the sum of their gradients, in int8 with error feedback.

Under no_sync() the hook is not called; what it has lost before waits for the pass that sends.
Run: torchrun --standalone --nproc-per-node 2 examples/accumulation.py
"""

import contextlib

import shared
from tasks import loss
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import amp, ddp, optim


def main() -> None:
    parser = shared.parser(__doc__)
    parser.add_argument("--accumulate", type=int, default=4, help="backward passes a step (%(default)s)")
    options = parser.parse_args()
    shared.start()
    model = DistributedDataParallel(shared.TASK.model())
    optimizer = optim.AdamW(model.parameters(), lr=shared.TASK.lr)
    scaler = amp.LossScaler(enabled=False)  # clips within the step
    state = ddp.register(model, codec="int8", scaler=scaler)
    passes = options.steps * options.accumulate
    for number, (inputs, targets) in enumerate(shared.batches(passes, batch_size=16), 1):
        steps = number % options.accumulate == 0
        with contextlib.nullcontext() if steps else model.no_sync():
            scaler.scale(loss(model(inputs), targets) / options.accumulate).backward()
        if steps:
            scaler.step(optimizer, max_norm=1.0, grad_stats=state.grad_stats)
            scaler.update()
            optimizer.zero_grad()
    stats = state.stats()
    shared.finish(
        f"{passes} backward passes, {stats['steps']} of which sent {1 / stats['ratio']:.1%} of fp32's bytes",
        f"test accuracy: {shared.accuracy(model):.1%}",
    )


if __name__ == "__main__":
    main()
