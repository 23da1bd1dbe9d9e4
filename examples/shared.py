"""The code that the short examples share: the start of a run, its data, and its final output."""

import argparse
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from tasks import digits
from torch import Tensor, nn

TASK = digits()


def parser(doc: str | None, steps: int = 60) -> argparse.ArgumentParser:
    """Return a parser that already has ``--steps``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps, help="steps of the optimizer (%(default)s)")
    return parser


def start(backend: str = "gloo") -> None:
    """Join torchrun's ranks in a group; without torchrun, the group has one rank."""
    if "RANK" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://"))
        # torchrun's store keeps the keys of the previous ranks after a restart, so each restart has its own prefix.
        prefixed = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group(backend, store=prefixed, rank=rank, world_size=world_size)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same weights on every rank


def rank_and_size() -> tuple[int, int]:
    """Return the rank and the world size; (0, 1) without a group, as frameworks make none for one process."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def batches(
    steps: int, batch_size: int = 64, replica: tuple[int, int] | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's part of each batch. The batches do not depend on the number of ranks.

    ``replica`` is the index of the model's replica, and their number, if a replica has several ranks.
    """
    inputs, targets = TASK.train
    generator = torch.Generator().manual_seed(0)
    rank, world_size = replica or rank_and_size()
    for _ in range(steps):
        batch = torch.randint(len(inputs), (batch_size,), generator=generator)
        mine = batch[rank::world_size]
        yield inputs[mine], targets[mine]


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Return the accuracy on the held-out digits. All ranks must call this if the model communicates in forward."""
    model.eval()
    inputs, targets = TASK.test
    return TASK.score(model(inputs), targets).float().mean().item()


def finish(*lines: str) -> None:
    """Print the lines on rank 0, and leave the group."""
    if rank_and_size()[0] == 0:
        print(*lines, sep="\n")
    if dist.is_initialized():
        dist.destroy_process_group()
