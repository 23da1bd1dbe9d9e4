"""Activation checkpointing: backward recomputes the activations, and the hook averages each gradient once.

Run: torchrun --standalone --nproc-per-node 2 examples/activation_checkpointing.py
"""

import torch
from shared import TASK, accuracy, batches, finish, parser, start
from tasks import loss
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint_sequential

from dltrain_ext import ddp, optim


class Checkpointed(nn.Module):
    """Keeps only the inputs of three parts of the model; the activations within them are recomputed."""

    def __init__(self, layers: nn.Sequential, is_reentrant: bool) -> None:
        super().__init__()
        self.layers, self.is_reentrant = layers, is_reentrant

    def forward(self, images: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.layers(images)
        if self.is_reentrant:
            images.requires_grad_()  # otherwise the parameters of the first part would have no gradients
        return checkpoint_sequential(self.layers, 3, images, use_reentrant=self.is_reentrant)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--reentrant", action="store_true", help="recompute in backward passes within backward")
    args = options.parse_args()
    start()
    model = DistributedDataParallel(Checkpointed(TASK.model(), args.reentrant))
    state = ddp.register(model, codec="int8")
    optimizer = optim.AdamW(model.parameters(), lr=TASK.lr)
    for inputs, targets in batches(args.steps):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    finish(
        f"test accuracy: {accuracy(model):.1%}",
        f"bytes sent: {1 / state.stats()['ratio']:.1%} of fp32's",
    )


if __name__ == "__main__":
    main()
