"""A run that continues after a rank has been killed, with the same bits as an undisturbed run.

torchrun --standalone --nproc-per-node 3 --max-restarts 2 examples/elastic.py --folder run --kill 1

Rank 1 kills itself in the middle of a step. The other ranks raise in their backward, and write the culprit's rank to
run/rank-N.txt; torchrun restarts all ranks, and they continue from the newest checkpoint. With more --steps, a run with
another --nproc-per-node can continue from the same folder: the residuals of int8 are divided among the new ranks.
"""

import argparse
import hashlib
import os
import shutil
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shared import TASK, batches, finish, parser, start
from tasks import loss
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import amp, comm, ddp, optim

RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class Run:
    """The state that is restored for the same bits: weights, moments, loss scale, and the residuals of the codec."""

    def __init__(self) -> None:
        self.model = DistributedDataParallel(TASK.model(), bucket_cap_mb=0.1)  # several buckets
        self.optimizer = optim.AdamW(self.model.parameters(), lr=2e-3)
        self.scaler = amp.LossScaler("cpu", init_scale=2.0**10, growth_interval=25)
        # The deadline is below the 30 s after which torchrun kills ranks to which it has sent SIGTERM.
        self.hook = ddp.register(self.model, codec="int8", scaler=self.scaler, timeout=timedelta(seconds=20))

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        error = loss(self.model(inputs), targets)
        self.scaler.scale(error).backward()
        self.scaler.step(self.optimizer, max_norm=1.0, grad_stats=self.hook.grad_stats)
        self.scaler.update()
        return error.detach()

    def state(self, saved_by: int | None = None) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        hook = self.hook.state_dict(saved_by=saved_by)
        return {"model": weights, "optimizer": moments, "scaler": self.scaler, "hook": hook}

    def save(self, folder: Path, step: int) -> None:
        """Save a checkpoint. It gets its final name when all ranks have written their part."""
        unfinished = folder / f"step-{step}.tmp"
        dcp.save(self.state(), checkpoint_id=unfinished)
        if dist.get_rank() == 0:
            unfinished.rename(folder / f"step-{step}")
            for old in checkpoints(folder)[:-2]:
                shutil.rmtree(old)

    def load(self, checkpoint: Path) -> None:
        """Load a checkpoint that was saved by any number of ranks."""
        saved = {"hook": {"world_size": 0}}
        dcp.load(saved, checkpoint_id=checkpoint)
        state = self.state(saved_by=saved["hook"]["world_size"])
        dcp.load(state, checkpoint_id=checkpoint)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.hook.load_state_dict(state["hook"])

    def digest(self) -> str:
        """Return a hash of all that this rank would save."""
        return hashlib.sha256(bits(self.state() | {"scaler": self.scaler.state_dict()})).hexdigest()[:16]


def bits(value: Any) -> bytes:
    if isinstance(value, dict):
        return b"".join(bits(each) for each in value.values())
    return value.detach().numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode()


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return sorted((each for each in folder.glob("step-*") if not each.suffix), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def die_in_backward(model: DistributedDataParallel) -> None:
    """Have this rank kill itself before the last gradient, for which the other ranks wait."""
    next(model.parameters()).register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))


def train(run: Run, done: int, args: argparse.Namespace) -> None:
    terminated: list[int] = []
    # torchrun sends SIGTERM as soon as a rank has died. The others first finish their step, or raise its error.
    signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))
    for step, (inputs, targets) in enumerate(batches(args.steps), start=1):
        if step <= done:
            continue
        if RESTARTS == 0 and dist.get_rank() == args.kill and step == args.at:
            die_in_backward(run.model)
        error = run.step(inputs, targets)
        if step % args.every == 0 or step == args.steps:
            comm.all_reduce(error, "avg", algorithm="ring")  # "auto" selects by times, so bits could differ
            run.save(args.folder, step)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {error.item():.6f} ({error.item().hex()})")
        if terminated:
            raise SystemExit(f"terminated by torchrun after step {step}")


@record
def main() -> None:
    options = parser(__doc__)
    options.add_argument("--folder", type=Path, required=True, help="folder for checkpoints and for survivors' errors")
    options.add_argument("--every", type=int, default=20, help="steps between two checkpoints (%(default)s)")
    options.add_argument("--kill", type=int, metavar="RANK", help="rank that kills itself before the first restart")
    options.add_argument("--at", type=int, metavar="STEP", default=50, help="step in which it does so (%(default)s)")
    args = options.parse_args()
    start()
    args.folder.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        for unfinished in args.folder.glob("step-*.tmp"):
            shutil.rmtree(unfinished)
    run, done = Run(), 0
    if found := checkpoints(args.folder):
        run.load(found[-1])
        done = step_of(found[-1])
        if dist.get_rank() == 0:
            print(f"restart {RESTARTS}: continues from step {done}")
    try:
        train(run, done, args)
    except dist.DistBackendError as error:
        (args.folder / f"rank-{dist.get_rank()}.txt").write_text(str(error))
        what, _, culprit = str(error).rpartition("; ")
        print(f"rank {dist.get_rank()}: {culprit}; {what}")
        raise
    finish(f"digest {run.digest()}")


if __name__ == "__main__":
    main()
