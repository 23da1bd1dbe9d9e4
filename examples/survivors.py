"""Ranks that continue, in the same processes, after one of them has died. Run: python examples/survivors.py

A launcher starts four ranks and kills one. The all-reduce of the others raises at once, and names the culprit. No rank
can find out reliably which ranks are left, so the launcher, which sees its processes, sends them the list and a new
store. With these they make a new group, and all-reduce again.
"""

import multiprocessing
import tempfile
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from dltrain_ext import comm

RANKS, VICTIM = 4, 2


def join(store: str, rank: int, world_size: int) -> comm.Communicator:
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    return comm.Communicator(timeout=timedelta(seconds=20))


def add_up(communicator: comm.Communicator) -> str:
    total = torch.ones(1000)
    communicator.all_reduce(total, codec="int8")
    return f"{int(total[0])} ranks add up"


def work(number: int, launcher: Connection, store: str) -> None:
    communicator = join(store, number, RANKS)
    launcher.send(add_up(communicator))
    try:
        while True:
            add_up(communicator)
    except dist.DistBackendError as error:
        launcher.send(str(error))
    communicator.close()
    dist.destroy_process_group()  # needs neither the dead rank nor the old store

    members, store = launcher.recv()
    launcher.send(add_up(join(store, members.index(number), len(members))))
    dist.destroy_process_group()


def main() -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe() for _ in range(RANKS)]
        ranks = [
            context.Process(target=work, args=(number, theirs, str(Path(folder, "store"))))
            for number, (_, theirs) in enumerate(ends)
        ]
        for rank in ranks:
            rank.start()
        for ours, _ in ends:
            print(ours.recv())
        ranks[VICTIM].kill()
        ranks[VICTIM].join()
        members = [number for number, rank in enumerate(ranks) if rank.is_alive()]
        for number in members:
            ours, _ = ends[number]
            print(ours.recv())  # the error of its all-reduce
            ours.send((members, str(Path(folder, "store of the survivors"))))
        for number in members:
            print(f"rank {number}, now {members.index(number)}: {ends[number][0].recv()}")
            ranks[number].join()


if __name__ == "__main__":
    main()
