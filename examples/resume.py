"""A run that continues from a checkpoint of torch.distributed.checkpoint, with the bits of one that never stopped.

Model, optimizer, loss scale and the residuals of the hook, which differ between ranks, are one entry.
Run: torchrun --standalone --nproc-per-node 2 examples/resume.py
"""

import tempfile
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shared import TASK, accuracy, batches, finish, parser, start
from tasks import loss
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import amp, ddp, optim


class Run:
    """Has state_dict and load_state_dict, which is all that torch.distributed.checkpoint needs."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(TASK.model())
        self.optimizer = optim.AdamW(self.model.parameters(), lr=TASK.lr)
        self.scaler = amp.LossScaler("cpu", init_scale=2.0**10, growth_interval=10)
        self.hook = ddp.register(self.model, codec="int8", scaler=self.scaler)

    def train(self, first: int, last: int) -> None:
        for inputs, targets in islice(batches(last), first, None):
            self.optimizer.zero_grad()
            self.scaler.scale(loss(self.model(inputs), targets)).backward()
            self.scaler.step(self.optimizer, max_norm=1.0, grad_stats=self.hook.grad_stats)
            self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        ours = {"hook": self.hook.state_dict(), "scaler": self.scaler.state_dict()}
        return {"model": model, "optimizer": optimizer, **ours}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.hook.load_state_dict(state["hook"])
        self.scaler.load_state_dict(state["scaler"])


def main() -> None:
    steps = parser(__doc__).parse_args().steps
    start()
    whole, before, after = Run(), Run(), Run()
    whole.train(0, steps)
    before.train(0, steps // 2)
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)  # all ranks use that of rank 0
        dcp.save({"run": before}, checkpoint_id=folders[0])
        dcp.load({"run": after}, checkpoint_id=folders[0])
        dist.barrier()
    after.train(steps // 2, steps)
    same = all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), after.model.parameters(), strict=True))
    finish(
        f"test accuracy: {accuracy(after.model):.1%}",
        f"bytes sent: {1 / after.hook.stats()['ratio']:.1%} of fp32's",
        f"the bits of a run that never stopped: {'yes' if same else 'no'}",
    )


if __name__ == "__main__":
    main()
