"""Activation checkpointing: backward recomputes the activations, and the hook averages each gradient once.

Run: torchrun --standalone --nproc-per-node 2 examples/activation_checkpointing.py
"""

from shared import TASK, accuracy, batches, finish, parser, start
from tasks import loss
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint_sequential

from dltrain_ext import ddp, optim


class Checkpointed(nn.Module):
    """Keeps only the inputs of three parts of the model; the activations within them are recomputed."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, images: Tensor) -> Tensor:
        return checkpoint_sequential(self.layers, 3, images, use_reentrant=False)


def main() -> None:
    args = parser(__doc__).parse_args()
    start()
    model = DistributedDataParallel(Checkpointed(TASK.model()))
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
