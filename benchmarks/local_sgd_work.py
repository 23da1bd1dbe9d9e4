"""The work of an outer step without a network, in one process: our two passes, and torch's operations."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import interleave
from benchmarks.local_sgd_sides import LAYERS, LR, MOMENTUM, layers_of, sgd
from dltrain_ext import codecs
from dltrain_ext.comm import Communicator
from dltrain_ext.local_sgd.fragments import Fragment
from dltrain_ext.local_sgd.trained import trained
from dltrain_ext.selftest.sums import count_wrong

FP32 = "raw"


class Cost(NamedTuple):
    """`resident`: bytes a parameter that stay from one outer step to the next; `peak`: those and what a step adds."""

    side: str
    codec: str
    ours: bool
    wrong: int
    resident: float
    peak: float
    samples: list[float]


class Outer:
    """A model, and its outer steps by torch: with a codec, also the encoding and the decoding of what is averaged."""

    ours = False

    def __init__(self, width: int, codec: str):
        self.model, self.codec = layers_of(width), codec
        self.parameters = [p.detach() for p in self.model.parameters()]
        self.setup()

    @property
    def name(self) -> str:
        return "torch" if self.codec == FP32 else f"torch and codecs, {self.codec}"

    def setup(self) -> None:
        self.backups = [p.clone() for p in self.parameters]
        self.residuals = [] if self.codec == FP32 else [torch.zeros_like(p) for p in self.parameters]
        self.optimizer = torch.optim.SGD(self.backups, lr=LR, momentum=MOMENTUM, nesterov=True, foreach=True)

    def call(self) -> None:
        moved = torch._foreach_sub(self.backups, self.parameters)
        for each, residual in zip(moved, self.residuals, strict=False):
            encoded = codecs.encode(each, self.codec, residual=residual)
            codecs.decode(encoded, out=each)
        for backup, each in zip(self.backups, moved, strict=True):
            backup.grad = each
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch._foreach_copy_(self.parameters, self.backups)

    def kept(self) -> list[Tensor]:
        state = [entry["momentum_buffer"] for entry in self.optimizer.state.values()]
        return [*self.backups, *self.residuals, *state]

    @property
    def transient(self) -> int:
        """Return the bytes that a step allocates and frees: here, the pseudo-gradients."""
        return sum(each.nbytes for each in self.parameters)

    def move(self, factor: float) -> None:
        torch._foreach_mul_(self.parameters, factor)


class Ours(Outer):
    ours = True

    @property
    def name(self) -> str:
        return f"DiLoCo, {self.codec}"

    def setup(self) -> None:
        has_feedback = self.codec != FP32
        self.fragment = Fragment(trained(self.model), has_momentum=True, has_feedback=has_feedback)
        self.fragment.lay(self.codec, 0, 1)  # with one rank what it encodes is the mean
        self.fragment.remember(sgd(self.model))
        self.communicator = Communicator(ranks_per_host=1)
        self.message = torch.empty(self.fragment.message_bytes, dtype=torch.uint8)

    def call(self) -> None:
        self.fragment.send(self.communicator, self.parameters, self.message, agreement=1, waits=True)
        copies = [None] * len(self.parameters)
        self.fragment.step(self.message, self.parameters, copies, lr=LR, momentum=MOMENTUM, nesterov=True, mix=0.0)

    transient = 0

    def kept(self) -> list[Tensor]:
        fragment = self.fragment
        found = [fragment.backup, fragment.momentum, self.message, *fragment.residuals().values()]
        return [each for each in found if each is not None]


def measure(
    numel: int, threads: int, names: list[str], rounds: int, progress: Callable[[float], None]
) -> Iterator[Cost]:
    """Yield what an outer step costs, ours and torch's, in each codec, after a check against torch's in fp32."""
    width = math.isqrt(numel // LAYERS)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with group_of_one():
            sides = [make(width, codec) for codec in names for make in (Ours, Outer)]
            wrong = [check(side, width) for side in sides]
            right = {side.name: side for side, count in zip(sides, wrong, strict=True) if not count}
            turns = dict.fromkeys(right, 0)

            def move(name: str) -> None:
                turns[name] += 1
                right[name].move(1.001 if turns[name] % 2 else 1 / 1.001)

            timed = interleave(
                {name: side.call for name, side in right.items()},
                rounds=(rounds, rounds),
                before=move,
                progress=progress,
            )
            for side, count in zip(sides, wrong, strict=True):
                resident = sum(each.nbytes for each in side.kept()) / (LAYERS * width**2)
                total = resident + side.transient / (LAYERS * width**2)
                yield Cost(side.name, side.codec, side.ours, count, resident, total, timed.get(side.name, []))
    finally:
        torch.set_num_threads(before)


class group_of_one:
    def __enter__(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()


def check(side: Outer, width: int) -> int:
    """Take two outer steps, and compare with the same by torch in fp32."""
    exact = Outer(width, FP32)
    start = [p.clone() for p in exact.parameters]
    for step in range(2):
        for each in (side, exact):
            each.move(1.01 if step else 0.99)
            each.call()
    lost = 1e-5 if side.codec == FP32 else 4 * codecs.error_bound(side.codec).max
    wrong = 0
    for found, expected, first in zip(side.parameters, exact.parameters, start, strict=True):
        magnitude = (expected - first).abs().max().item()
        rounding = 1e-6 * expected.abs().max().item()
        wrong += count_wrong(found, expected, lost * magnitude + rounding)
    return wrong
