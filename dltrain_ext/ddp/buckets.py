"""DDP's buckets, as the hook has seen them last: their layout and what was found out about them."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dltrain_ext.amp import GradStats
from dltrain_ext.compress.feedback import Feedback
from dltrain_ext.compress.layout import Layout, Region, divided, regions_of
from dltrain_ext.compress.parameters import Parameters
from dltrain_ext.compress.scaling import StepOutcome
from dltrain_ext.ddp.parameters import check_parameters


@dataclass(eq=False)
class Bucket:
    """One of DDP's buckets, as it was seen last."""

    index: int
    parameters: list[Tensor]
    codecs: tuple[str, ...]  # of the parameters, unless they are small; "native" is sent by the backend
    layout: Layout[Tensor]

    @property
    def is_timed(self) -> bool:
        """Whether the seconds of its calls are known. On a device calls only enqueue."""
        return self.parameters[0].device.type == "cpu"

    @property
    def codec(self) -> str:
        """The name of its codec, or those of several."""
        return ", ".join(sorted({*self.codecs}))

    def is_like(self, bucket: dist.GradBucket, codecs: tuple[str, ...]) -> bool:
        return (
            self.codecs == codecs
            and are_same(bucket.parameters(), self.parameters)
            and self.layout.numel == bucket.buffer().numel()
        )


def are_same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Returns whether these are the same objects."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


class Buckets:
    """The buckets of the latest backward pass. DDP reduces them by index, and can be configured to skip unused ones.

    Args:
        parameters: those of the model.
        feedback: None without error feedback.
        min_compress_numel: parameters of fewer elements, or of at most one dimension, are sent raw.
        with_squares: whether the sum of squares is computed.
        owners: the number of ranks to which the rows of each parameter belong; 0 if they belong to none.
        outcome: says whether the step of the gradients that were averaged is taken; None for their sum of squares.
    """

    def __init__(
        self,
        parameters: Parameters,
        feedback: Feedback[Tensor] | None,
        *,
        min_compress_numel: int,
        with_squares: bool,
        owners: int = 0,
        outcome: Callable[[], StepOutcome] | None = None,
    ):
        self.parameters = parameters
        self.feedback = feedback
        self.reduced: list[Bucket] = []  # in this pass so far, by index
        self._laid: dict[int, Bucket] = {}
        self._last: torch.futures.Future[Tensor] | None = None  # that of the latest bucket
        self._task = -1  # id of autograd's graph task in the latest pass
        self._min_compress_numel = min_compress_numel
        self._with_squares = with_squares
        self._owners = owners
        self._outcome = outcome or (lambda: StepOutcome.of_sum(self.sum_squares))
        # The order by number of the parameters of these buckets. It is valid until a bucket changes.
        self._orders: dict[tuple[int, ...], Tensor] = {}

    def begins(self, bucket: dist.GradBucket, skips: bool) -> bool:
        """Returns whether a pass begins with this bucket. Indices increase within a pass; if DDP skips some, the next
        pass may begin with a higher one. In the first pass of a static graph all indices are 0."""
        if not self.reduced:
            return True
        task = torch._C._current_graph_task_id()
        if bucket.index() > self.reduced[-1].index:
            return skips and task != self._task
        if task == -1 or task != self._task:
            return True
        first = bucket.parameters()[0]
        return any(p is first for reduced in self.reduced for p in reduced.parameters)

    def begin(self) -> None:
        """Begins a pass."""
        self.settle()
        self.reduced = []
        self._task = torch._C._current_graph_task_id()

    def submitted(self, future: torch.futures.Future[Tensor], feeds: bool) -> None:
        """Records the future of the bucket that was found last, and whether its reduction writes feedback."""
        self._last = future
        if feeds and self.feedback is not None:
            self.feedback.expect(self._outcome())

    def settle(self) -> None:
        """Decides between passes whether the feedback of the latest pass is kept. The host does not wait for it."""
        if self.feedback is not None and self._last is not None and self._last.done():
            sent_plain = (bucket for bucket in self.reduced if not bucket.layout.has_feedback)
            unreached = itertools.chain(self.skipped(), sent_plain)
            self.feedback.settle(unreached=(p for bucket in unreached for p in bucket.parameters))

    def settle_after_backward(self) -> None:
        if torch._C._current_graph_task_id() == -1:
            self.settle()

    def find(self, bucket: dist.GradBucket, codecs: tuple[str, ...], by_parameter: bool) -> Bucket:
        """Returns the bucket as it was, or laid out anew if it has changed; forgets those behind a pass's last bucket.

        by_parameter: the result of a gradient must not depend on what else is in its bucket.
        """
        index = max(bucket.index(), self.reduced[-1].index + 1 if self.reduced else 0)
        found = self._laid.get(index)
        if found is None or not found.is_like(bucket, codecs):
            regions = self._regions(bucket, codecs)
            layout = Layout(
                bucket.buffer(), regions, self.feedback, by_parameter=by_parameter, with_squares=self._with_squares
            )
            found = self._laid[index] = Bucket(index, bucket.parameters(), codecs, layout)
            self._orders.clear()
        if bucket.is_last():
            self._laid = {i: laid for i, laid in self._laid.items() if i <= index}
        self.reduced.append(found)
        return found

    def skipped(self) -> list[Bucket]:
        """Returns the buckets of earlier passes that the latest pass has not reduced."""
        return [bucket for bucket in self._laid.values() if bucket not in self.reduced]

    def lay_copy(self, bucket: dist.GradBucket, copy: Tensor, codec: str, by_parameter: bool) -> Layout[Tensor]:
        """Returns the layout of a copy of the bucket's buffer, without feedback."""
        codecs = (codec,) * len(bucket.parameters())
        return Layout(copy, self._regions(bucket, codecs), None, by_parameter=by_parameter)

    def laid(self) -> list[Bucket]:
        """Returns the buckets of the latest passes."""
        return [*self._laid.values()]

    def _regions(self, bucket: dist.GradBucket, codecs: tuple[str, ...]) -> list[Region[Tensor]]:
        buffer, parameters = bucket.buffer(), bucket.parameters()
        if buffer.layout != torch.strided:
            raise TypeError(f"bucket: expected dense gradients, got {buffer.layout}; make the embedding's sparse=False")
        check_parameters((f"one of shape {tuple(p.shape)}", p) for p in parameters)
        codecs = tuple("raw" if codec == "native" else codec for codec in codecs)
        firsts = [int(gradient.storage_offset() - buffer.storage_offset()) for gradient in bucket.gradients()]
        regions = regions_of(
            self.parameters, dict(zip(parameters, firsts, strict=True)), codecs, self._min_compress_numel
        )
        if self._owners:
            regions = [part for region in regions for part in divided(region, len(region.part), self._owners)]
        return regions

    def _absent(self) -> list[str]:
        """Returns the names of parameters that have a gradient but are in no bucket."""
        names = self.parameters.names
        if names is None or sum(len(bucket.parameters) for bucket in self._laid.values()) == len(names):
            return []
        present = {p for bucket in self._laid.values() for p in bucket.parameters}
        return [name for name, p in names.items() if p not in present and p.grad is not None]

    def sum_squares(self) -> Tensor:
        """Returns the sum of squares of the gradients that the latest pass has averaged: a float64 number on the device
        of its first bucket.

        It is added parameter by parameter in the model's order, so its bits do not depend on the buckets.
        """
        found = [bucket.layout.squares for bucket in self.reduced if bucket.layout.squares is not None]
        device = found[0].device
        squares = torch.cat([numbers.to(device, non_blocking=True) for numbers in found])
        indices = tuple(bucket.index for bucket in self.reduced)
        if indices not in self._orders:
            numbers = [self.parameters.number(p) for bucket in self.reduced for p in bucket.parameters]
            self._orders[indices] = torch.tensor(numbers).argsort().to(device, non_blocking=True)
        return squares[self._orders[indices]].sum()

    def _sum_left_squares(self) -> Tensor | None:
        """Returns the sum of squares of the gradients that skipped buckets still have, or None if there are none."""
        left = [p.grad for bucket in self.skipped() for p in bucket.parameters if p.grad is not None]
        if not left:
            return None
        device = left[0].device
        return torch.stack([square_sum(gradient).to(device, non_blocking=True) for gradient in left]).sum()

    def grad_stats(self) -> GradStats:
        """Implements AllReduceState.grad_stats."""
        if not self.reduced:
            raise RuntimeError("grad_stats: expected a backward pass first")
        if absent := self._absent():
            raise RuntimeError(
                f"grad_stats: expected all parameters in DDP's buckets, got none of {', '.join(absent)}, which DDP was "
                "told to ignore or to delay, or were frozen when it was made; step without grad_stats"
            )
        squares, left = self.sum_squares(), self._sum_left_squares()
        return GradStats(squares if left is None else squares + left.to(squares.device, non_blocking=True))


def square_sum(tensor: Tensor) -> Tensor:
    return tensor.double().square().sum()
