"""Quantization-aware training: forward uses weights rounded to few bits, whose gradients are those of the fp32 weights
(a straight-through estimator); the hook averages them in int8. With --after, weights are only rounded in the end.

Run: torchrun --standalone --nproc-per-node 2 examples/quantized_training.py
"""

import torch
from shared import TASK, accuracy, batches, finish, parser, start
from tasks import loss
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

from dltrain_ext import ddp, optim


class Rounded(nn.Module):
    """Rounds each output channel of a weight to multiples of its largest value over 2**(bits - 1) - 1."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.largest = 2 ** (bits - 1) - 1

    def forward(self, weight: Tensor) -> Tensor:
        scale = weight.detach().flatten(1).abs().amax(1).clamp(min=1e-12) / self.largest
        zero = torch.zeros_like(scale, dtype=torch.int32)
        return torch.fake_quantize_per_channel_affine(weight, scale, zero, 0, -self.largest, self.largest)


def layers_of(net: nn.Module) -> list[nn.Module]:
    return [layer for layer in net.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]


def round_weights(net: nn.Module, bits: int) -> None:
    for layer in layers_of(net):
        register_parametrization(layer, "weight", Rounded(bits))


def train(net: nn.Module, steps: int) -> ddp.AllReduceState:
    model = DistributedDataParallel(net)
    state = ddp.register(model, codec="int8")
    optimizer = optim.AdamW(model.parameters(), lr=TASK.lr)
    for inputs, targets in batches(steps):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    return state


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--bits", type=int, default=2, help="bits of a weight (%(default)s)")
    options.add_argument("--after", action="store_true", help="train with the exact weights, for comparison")
    args = options.parse_args()
    start()
    net = TASK.model()
    if not args.after:
        round_weights(net, args.bits)
    state = train(net, args.steps)
    if args.after:
        round_weights(net, args.bits)
    for layer in layers_of(net):
        remove_parametrizations(layer, "weight")  # the rounded weights become the parameters
    levels = max(len(row.unique()) for layer in layers_of(net) for row in layer.weight.flatten(1))
    finish(
        f"test accuracy with weights of at most {levels} values per output channel: {accuracy(net):.1%}",
        f"bytes sent for gradients: {1 / state.stats()['ratio']:.1%} of fp32's",
    )


if __name__ == "__main__":
    main()
