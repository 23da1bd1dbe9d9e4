"""Copying a member of a population onto another: population.exploit against a file, and a raw send of as many bytes."""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.cases.optim import resnet50
from benchmarks.harness import Failure, Keep, Progress, Row, Table, at_least, interleave
from benchmarks.machine.ranks import count_ranks, on_ranks, over_ranks
from dltrain_ext import optim, population
from dltrain_ext.selftest.sums import first_if_unlike

OVERVIEW = ["-n", "3"]
DEADLINE = 120.0
LOSER, WINNER = 0, 1
EXPLOIT, FILE, SEND = "population.exploit", "torch.save and torch.load", "raw send"


class Job(NamedTuple):
    rounds: int
    quick: bool


class Result(NamedTuple):
    """One side; ``samples`` is empty if the members differ after it."""

    side: str
    wrong: int
    nbytes: int
    samples: list[float]


class Member:
    """The parameters of ResNet-50 and the state of AdamW; the loser's are spoilt before each copy."""

    def __init__(self, rank: int, quick: bool, folder: str):
        torch.manual_seed(rank)
        self.rank, self.file = rank, Path(folder, "member.pt")
        self.model = nn.ParameterList(torch.randn(shape) for shape in resnet50(quick))
        self.optimizer = optim.AdamW(self.model.parameters())
        self.model.requires_grad_()
        for parameter in self.model:
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.buffer = torch.ones(sum(tensor.numel() for tensor in self.tensors()))

    def tensors(self) -> list[Tensor]:
        state = [value for of_one in self.optimizer.state_dict()["state"].values() for value in of_one.values()]
        return [*(parameter.detach() for parameter in self.model), *state]

    def spoil(self) -> None:
        if self.rank == LOSER:
            torch._foreach_mul_([tensor for tensor in self.tensors() if tensor.dim()], 0.5)
        dist.barrier()

    def exploit(self) -> None:
        population.exploit(self.model, self.optimizer, float(self.rank))

    def through_a_file(self) -> None:
        if self.rank == WINNER:
            torch.save((self.model.state_dict(), self.optimizer.state_dict()), self.file)
        dist.barrier()
        if self.rank == LOSER:
            model, state = torch.load(self.file, weights_only=True)
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(state)

    def send(self) -> None:
        if self.rank == WINNER:
            dist.send(self.buffer, LOSER)
        elif self.rank == LOSER:
            dist.recv(self.buffer, WINNER)

    def count_wrong(self) -> int:
        """Return the number of the loser's elements that differ from the winner's."""
        own = torch.cat([tensor.flatten() for tensor in self.tensors()])
        first = first_if_unlike(own)
        return int(over_ranks([0.0 if first is None else float((own != first).sum())], "sum")[0])


def work(rank: int, ranks: int, progress: Progress, job: Job) -> Iterator[Result]:
    with tempfile.TemporaryDirectory() as folder:
        folders: list[str] = [folder]
        dist.broadcast_object_list(folders, WINNER)
        member = Member(rank, job.quick, folders[0])
        sides: dict[str, Callable[[], None]] = {EXPLOIT: member.exploit, FILE: member.through_a_file, SEND: member.send}
        wrong = {}
        for name in (EXPLOIT, FILE):
            member.spoil()
            sides[name]()
            wrong[name] = member.count_wrong()
        right = {name: call for name, call in sides.items() if not wrong.get(name)}
        advance = partial(progress, "a member is copied")
        timed = interleave(
            right,
            rounds=(job.rounds, job.rounds),
            warmup=1,
            before=lambda name: member.spoil(),
            progress=advance,
        )
        for name in sides:
            samples = over_ranks(timed[name], "max") if name in timed else []
            yield Result(name, wrong.get(name, 0), member.buffer.nbytes, samples)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "If torchrun's variables (RANK, WORLD_SIZE, ...) are set, it runs as that rank; rank 0 reports."
    parser.add_argument("-n", "--iters", type=at_least(1), help="timed copies (default: 10, --quick: 2)")


def run(options: argparse.Namespace, progress: Progress, keep: Keep) -> None:
    if (ranks := count_ranks(options.ranks, 2)) != 2:
        raise Failure(f"ranks: expected 2, one member each, got {ranks}")
    job = Job(options.iters or (2 if options.quick else 10), options.quick)
    notes = [
        "a sample is one copy after a barrier, on the slower one of two ranks; the sides are timed alternately",
        "#wrong: elements of parameters and state that differ between the members afterwards; a raw send, into memory "
        "that exists and on connections that exist, copies no member",
    ]
    table = Table("Copying a member: the parameters of ResNet-50 and AdamW's state, 2 ranks", [], notes, "#wrong")
    keep(table)

    def take(result: Result) -> None:
        ours = result.side == EXPLOIT
        row = Row("copy", result.side, ours, result.wrong == 0, str(result.wrong), result.samples)
        row.figures = {"MB": 1e-6 * result.nbytes}
        if table.rows:
            row.compare_with(table.rows[0])
        table.rows.append(row)

    on_ranks(work, 2, job, take=take, progress=progress, deadline=DEADLINE)
