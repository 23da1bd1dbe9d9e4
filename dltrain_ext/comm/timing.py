"""Times the all-reduces of a live group."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_MOST_TURNS = 6


class Trial(NamedTuple):
    """An all-reduce that is timed."""

    codec: str  # or "native"
    nbytes: int  # the size of the tensor in fp32
    algorithm: str
    segments: int  # 0 selects by size


@dataclass(frozen=True)
class Group:
    """What timing needs of a communicator.

    all_reduce: runs a trial on a tensor, in place, and returns when it is complete.
    exchange: returns the texts of all ranks, by rank.
    """

    rank: int
    world_size: int
    device: torch.device
    all_reduce: Callable[[Tensor, Trial], None]
    exchange: Callable[[str], list[str]]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timer(group: Group, nbytes: int, dtype: torch.dtype = torch.float32) -> Callable[[Trial, int], float]:
    """Returns a function that returns the seconds of a trial of that size: the mean of so many calls after a barrier.
    The tensor is written anew before each of them, as gradients are."""
    tensor = torch.zeros(nbytes // 4, dtype=dtype, device=group.device)
    barrier = torch.zeros(1, device=group.device)

    def once(trial: Trial, calls: int) -> float:
        tensor.zero_()
        group.all_reduce(barrier, Trial("raw", 4, "recursive_doubling", 1))
        synchronize(group.device)
        began = time.perf_counter()
        group.all_reduce(tensor, trial)
        for _ in range(calls - 1):
            tensor.zero_()
            group.all_reduce(tensor, trial)
        synchronize(group.device)
        return (time.perf_counter() - began) / calls

    return once


class TrialRunner:
    """Runs trials in turns within a number of seconds.

    The ranks average their times by all-reduces, so what these decide is the same on all ranks.
    """

    def __init__(self, group: Group, seconds: float):
        self._group, self.seconds, self._began = group, seconds, time.perf_counter()
        self.left = seconds  # after the latest turns

    def run(self, trials: Sequence[Trial], part: float, dtype: torch.dtype = torch.float32) -> list[float]:
        """Returns the shortest time of each trial over some turns, which may take a part of all the time: other load
        and first calls only add time. There is a second turn unless no time is left at all."""
        once, end = timer(self._group, trials[0].nbytes, dtype), self.left - part * self.seconds
        shortest = [math.inf] * len(trials)
        for turn in range(_MOST_TURNS):
            shortest = list(map(min, shortest, self._mean([once(trial, 1) for trial in trials])))
            if self.left - sum(shortest) < (0 if turn == 0 else end):
                break
        return shortest

    def _mean(self, numbers: Sequence[float]) -> list[float]:
        group = self._group
        spent = time.perf_counter() - self._began
        tensor = torch.tensor([*numbers, spent], device=group.device) / group.world_size
        group.all_reduce(tensor, Trial("raw", 4 * len(tensor), "direct", 1))
        *numbers, spent = tensor.tolist()
        self.left = self.seconds - spent
        return numbers
