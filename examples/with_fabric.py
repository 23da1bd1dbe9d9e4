"""Lightning Fabric. Run: torchrun --standalone --nproc-per-node 2 examples/with_fabric.py

The strategy registers the hook on the model that it wraps, and our scaler clips in one pass with the step. Batches are
accumulated with fabric.no_backward_sync, so the hook sends the sum of two backward passes.
"""

import logging
import os
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from shared import TASK, accuracy, batches, finish, parser
from tasks import loss
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import amp, ddp, optim

ACCUMULATE = 2


class CompressedDDP(DDPStrategy):
    """Registers the hook with these options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        model = super().setup_module(module)
        self.hook_state = ddp.register(model, **self.options)
        return model


def train(steps: int, codec: str) -> tuple[nn.Module, ddp.AllReduceState]:
    """Return the model without its wrappers, and the state of the hook."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scaler = amp.LossScaler(device, enabled=False)  # only clips; bf16 needs no scaling
    strategy = CompressedDDP(codec=codec, scaler=scaler)
    ranks, hosts = (int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
    fabric = Fabric(accelerator=device, devices=ranks, num_nodes=hosts, strategy=strategy, precision="bf16-mixed")
    fabric.launch()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = TASK.model()
    model, optimizer = fabric.setup(net, optim.AdamW(net.parameters(), lr=TASK.lr))
    for number, batch in enumerate(batches(ACCUMULATE * steps), 1):
        inputs, targets = fabric.to_device(batch)
        steps_now = number % ACCUMULATE == 0
        with fabric.no_backward_sync(model, enabled=not steps_now):
            fabric.backward(loss(model(inputs), targets) / ACCUMULATE)
        if steps_now:
            # Fabric's own optimizer.step would not pass these on.
            scaler.step(optimizer.optimizer, max_norm=1.0, grad_stats=strategy.hook_state.grad_stats)
            optimizer.zero_grad()
    return net, strategy.hook_state


def main() -> None:
    steps = parser(__doc__).parse_args().steps
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    net, state = train(steps, "int8")
    ratio = state.stats()["ratio"]
    finish(
        f"test accuracy: {accuracy(net.cpu()):.1%}",
        f"{ACCUMULATE * steps} backward passes, {state.steps} of which sent {1 / ratio:.1%} of fp32's bytes",
    )


if __name__ == "__main__":
    main()
