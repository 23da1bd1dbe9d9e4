"""What the short examples share: how a run begins, what it trains on, and what it says at its end."""

import argparse
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from tasks import digits
from torch import Tensor, nn

TASK = digits()


def parser(doc: str | None, steps: int = 60) -> argparse.ArgumentParser:
    """One that knows ``--steps`` already."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps, help="of the optimizer (%(default)s)")
    return parser


def start() -> None:
    """Joins torchrun's ranks in a Gloo group; without torchrun this rank is alone in it."""
    if "RANK" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://"))
        # torchrun's store outlives a restart, and so does what the last ranks have left in it.
        life = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group("gloo", store=life, rank=rank, world_size=world_size)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same weights on every rank


def place() -> tuple[int, int]:
    """Which rank this is, and of how many. Frameworks make no group for one process."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def batches(steps: int, batch_size: int = 64) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of so many batches, which are the same whatever the number of ranks."""
    inputs, targets = TASK.train
    generator = torch.Generator().manual_seed(0)
    rank, world_size = place()
    for _ in range(steps):
        batch = torch.randint(len(inputs), (batch_size,), generator=generator)
        mine = batch[rank::world_size]
        yield inputs[mine], targets[mine]


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """On the held-out digits. Collective where the model is."""
    model.eval()
    inputs, targets = TASK.test
    return TASK.score(model(inputs), targets).float().mean().item()


def finish(*lines: str) -> None:
    """Rank 0 prints; all leave."""
    if place()[0] == 0:
        print(*lines, sep="\n")
    if dist.is_initialized():
        dist.destroy_process_group()
