"""A model whose parameters, activations and gradients are bf16 or fp16; autocast.py keeps the parameters in fp32.

AdamW has fp32 master weights in its state, so that updates smaller than the spacing of 16-bit numbers are not lost.
Run: torchrun --standalone --nproc-per-node 2 examples/low_precision.py --dtype fp16
"""

import argparse

import torch
from shared import TASK, accuracy, batches, finish, parser, start
from tasks import loss
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import amp, ddp, optim

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Converted(nn.Module):
    """A model of another dtype, with inputs and outputs in fp32."""

    def __init__(self, net: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.net, self.dtype = net.to(dtype), dtype

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs.to(self.dtype)).float()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype of the model (%(default)s)")
    options.add_argument(
        "--masters", action=argparse.BooleanOptionalAction, default=True, help="fp32 master weights (%(default)s)"
    )
    args = options.parse_args()
    start()
    model = DistributedDataParallel(Converted(TASK.model(), DTYPES[args.dtype]))
    optimizer = optim.AdamW(model.parameters(), lr=TASK.lr, master_weights=args.masters)
    scaler = amp.LossScaler("cpu", enabled=args.dtype == "fp16")  # bf16 has the range of fp32
    state = ddp.register(model, codec="int8", scaler=scaler)
    for inputs, targets in batches(args.steps):
        optimizer.zero_grad()
        scaler.scale(loss(model(inputs), targets)).backward()
        scaler.step(optimizer, max_norm=1.0, grad_stats=state.grad_stats)
        scaler.update()
    kept = [value for of_one in optimizer.state.values() for name, value in of_one.items() if name != "step"]
    numel = sum(p.numel() for p in model.parameters())
    finish(
        f"test accuracy: {accuracy(model):.1%}",
        f"bytes sent: {1 / state.stats()['ratio']:.1%} of fp32's",
        f"bytes per parameter: {sum(p.nbytes for p in model.parameters()) / numel:.1f} of the model, "
        f"{sum(value.nbytes for value in kept) / numel:.1f} of the optimizer's state",
    )


if __name__ == "__main__":
    main()
