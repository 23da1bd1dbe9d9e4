"""torch.compile of a DDP model: its graph is split at DDP's buckets, and the hook sends each bucket when it is ready.

Register the hook first. Compiling the model before it is wrapped in DDP also works; keep the default of optimize_ddp.
Run: torchrun --standalone --nproc-per-node 2 examples/compiled.py
"""

import torch
from shared import TASK, accuracy, batches, finish, parser, start
from tasks import loss
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import ddp, optim


class Net(nn.Module):
    """A user-defined class: torch.compile compiles nothing of a bare nn.Sequential in DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 512), nn.Linear(512, 512), nn.Linear(512, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.second(self.first(images.flatten(1)).relu()).relu())


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--backend", default="inductor", help="backend of torch.compile (%(default)s)")
    args = options.parse_args()
    start()
    model = DistributedDataParallel(Net(), bucket_cap_mb=1)
    state = ddp.register(model, codec="int8")
    compiled = torch.compile(model, backend=args.backend)
    optimizer = optim.AdamW(model.parameters(), lr=TASK.lr)
    for inputs, targets in batches(args.steps):
        optimizer.zero_grad()
        loss(compiled(inputs), targets).backward()
        optimizer.step()
    finish(
        f"test accuracy: {accuracy(model):.1%}",
        f"bytes sent: {1 / state.stats()['ratio']:.1%} of fp32's",
    )


if __name__ == "__main__":
    main()
