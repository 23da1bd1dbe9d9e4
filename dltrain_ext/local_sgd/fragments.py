"""Fragments of a model: parameters that are averaged together, and what outer steps keep of them."""

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dltrain_ext import _ops
from dltrain_ext.comm import Communicator
from dltrain_ext.comm.work import Work
from dltrain_ext.compress.feedback import Feedback
from dltrain_ext.compress.layout import Layout, Region, is_small
from dltrain_ext.compress.parameters import numbers_of
from dltrain_ext.local_sgd.trained import Trained, in_memory_order

ALGORITHM = "direct"  # two rounds, and each element is encoded at most twice
_ALIGNMENT = 16  # elements


def divide(sizes: Sequence[int], parts: int) -> list[range]:
    """Returns the indices of adjacent items of each part, so that the largest part is as small as possible."""
    ends = list(itertools.accumulate(sizes))

    def cut(most: int) -> list[int]:
        """Returns where parts of at most that size end, as few as possible."""
        borders = [0]
        while borders[-1] < len(sizes):
            before = ends[borders[-1] - 1] if borders[-1] else 0
            borders.append(bisect.bisect_right(ends, before + most))
        return borders

    most = bisect.bisect_left(range(ends[-1]), True, lo=max(sizes), key=lambda most: len(cut(most)) - 1 <= parts)
    borders = cut(most)
    while len(borders) <= parts:  # fewer parts would do: the largest one that can be divided is
        widths = {
            i: ends[b - 1] - (ends[a - 1] if a else 0)
            for i, (a, b) in enumerate(itertools.pairwise(borders))
            if b - a > 1
        }
        widest = max(widths, key=lambda i: widths[i])
        borders.insert(widest + 1, borders[widest] + 1)
    return [range(a, b) for a, b in itertools.pairwise(borders)]


class Fragment:
    """Parameters that are averaged together. On the CPU it has, in fp32, what all sites had after its last outer step
    (``backup``), the momentum of the outer steps, and what encoding has lost of this rank's movements.

    Args:
        trained: the parameters that this rank averages, which may be none.
    """

    def __init__(self, trained: Sequence[Trained], *, has_momentum: bool, has_feedback: bool):
        self.trained = trained
        self._feedback = Feedback[str](torch.float32, double_buffered=False) if has_feedback else None
        sizes = [-(-each.numel // _ALIGNMENT) * _ALIGNMENT for each in trained]
        self._firsts = dict(zip((each.name for each in trained), itertools.accumulate(sizes, initial=0), strict=False))
        self.backup = torch.zeros(sum(sizes))
        self.momentum = torch.zeros(sum(sizes)) if has_momentum else None

    def lay(self, codec: str, min_compress_numel: int, world_size: int) -> None:
        """Determines how it is sent among so many sites: in a codec, small parameters raw."""
        self._world_size = world_size
        regions, number = [], 0
        for each in self.trained:
            own = "raw" if is_small(each.shape, min_compress_numel) else codec
            regions.append(Region(each.name, self._firsts[each.name], each.numel, own, number))
            number += numbers_of(each.numel)
        self._layout = Layout(self.backup, regions, self._feedback, by_parameter=True)
        self.message_bytes = _ops.message_bytes(self._layout.handle, self.backup.numel(), **self._plan)

    @property
    def _plan(self) -> dict[str, Any]:
        return {"algorithm": ALGORITHM, "codec": self._layout.codec, "world_size": self._world_size}

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Returns views of a flat tensor, like ``backup``, by the names of the parameters and in their shapes."""
        return {each.name: each.view(flat, self._firsts[each.name]) for each in self.trained}

    def remember(self, inner: Optimizer) -> None:
        """Takes the present values as those after the last outer step."""
        for each, kept in zip(self.trained, self.named(self.backup).values(), strict=True):
            kept.copy_(each.value(inner))

    def restore(self, inner: Optimizer) -> None:
        """Sets the parameters to what all sites had after the last outer step."""
        for each, kept in zip(self.trained, self.named(self.backup).values(), strict=True):
            each.write(inner, kept)

    def digest(self) -> int:
        """Returns a number that is the same where ``backup`` has the same bits, and else hardly ever, unless elements
        have changed places."""
        return int(self.backup.view(torch.int64).sum())

    def residuals(self) -> dict[str, Tensor]:
        """Returns views of what encoding has lost, by parameter: not of parameters that are sent as they are."""
        found = {each: None if self._feedback is None else self._feedback.of(each.name) for each in self.trained}
        return {each.name: each.view(lost, 0) for each, lost in found.items() if lost is not None}

    def forget(self) -> None:
        """Forgets what encoding has lost."""
        for lost in self.residuals().values():
            lost.zero_()

    def send(
        self, communicator: Communicator, moved: Sequence[Tensor], message: Tensor, agreement: int, waits: bool
    ) -> Work | None:
        """Averages how far parameters with these values have moved. The mean is written to the message, encoded.

        agreement: a number that must be the same at all sites, not 0. Returns a Work unless it ``waits``.
        """
        options: dict[str, Any] = {
            "average": True,
            "algorithm": ALGORITHM,
            "codec": self._layout.codec,
            "feeds": self._layout.has_feedback,
            "step": 0,  # of random numbers, which are not used
            "minus": [in_memory_order(each) for each in moved],
            "message": message,
            "agreement": agreement,
        }
        if not waits:
            return communicator.submit_bucket(self.backup, self._layout.handle, **options)
        communicator.run_bucket(self.backup, self._layout.handle, **options)
        return None

    def step(
        self,
        message: Tensor,
        parameters: Sequence[Tensor],
        copies: Sequence[Tensor | None],
        **rule: Any,
    ) -> bool:
        """Takes the outer step with the mean in the message, and writes the parameters and their half copies. Returns
        whether the mean is finite."""
        return _ops.outer_step(
            self._layout.handle,
            message,
            backup=self.backup,
            momentum_buffer=self.momentum,
            parameters=[in_memory_order(each) for each in parameters],
            copies=[None if each is None else in_memory_order(each) for each in copies],
            **self._plan,
            **rule,
        )
