"""The layout of a flat buffer: its regions and their codecs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic

import torch
from torch import Tensor

from dltrain_ext import _ops
from dltrain_ext.compress.feedback import Feedback, Part
from dltrain_ext.compress.parameters import Parameters


@dataclass(frozen=True)
class Region(Generic[Part]):
    """A contiguous part of a flat buffer that is sent in one codec."""

    part: Part  # the key of its residual
    first: int
    numel: int
    codec: str
    number: int  # the number of its first element, for random numbers; a multiple of 4
    owner: int = -1  # the rank to which it belongs in a reduce-scatter or an all-gather

    @property
    def is_lossy(self) -> bool:
        return _ops.find_codec(self.codec).error(False)[0] > 0


def regions_of(
    parameters: Parameters, firsts: Mapping[Tensor, int], codecs: Sequence[str], min_compress_numel: int
) -> list[Region[Tensor]]:
    """Returns a region for each of the tensors, whose first elements in the buffer are ``firsts``.

    Small tensors are sent raw, whatever their codec.
    """
    return [
        Region(
            tensor,
            first,
            tensor.numel(),
            "raw" if is_small(tensor.shape, min_compress_numel) else codec,
            parameters.number(tensor),
        )
        for (tensor, first), codec in zip(firsts.items(), codecs, strict=True)
    ]


def is_small(shape: Sequence[int], min_compress_numel: int) -> bool:
    """Returns whether a parameter is sent as it is: it has few elements, or at most one dimension."""
    return len(shape) <= 1 or math.prod(shape) < min_compress_numel


EXACT = {torch.float32: "raw", torch.float16: "fp16", torch.bfloat16: "bf16"}
"""The shortest codec that loses nothing, by the dtype of what is sent."""


def rows_of(size: int, ranks: int) -> list[tuple[int, int]]:
    """Returns the first row of each rank and how many it has, as torch cuts a dimension of that size for ``Shard``."""
    each = -(-size // ranks)
    firsts = [min(rank * each, size) for rank in range(ranks)]
    return [(first, min(each, size - first)) for first in firsts]


def divided(region: Region[Part], rows: int, ranks: int) -> list[Region[Part]]:
    """Returns the parts of a region of that many rows that belong to each of the ranks."""
    width = region.numel // rows if rows else 0
    parts = []
    for owner, (first, count) in enumerate(rows_of(rows, ranks)):
        skipped = first * width
        parts.append(
            replace(
                region,
                first=region.first + skipped,
                numel=count * width,
                number=region.number + skipped // 4 * 4,
                owner=owner,
            )
        )
    return parts


class Layout(Generic[Part]):
    """The regions of a buffer, and their state from one reduction to the next.

    Args:
        feedback: None without error feedback.
        by_parameter: the result of a region must not depend on what else is in the buffer, or regions have owners.
        with_squares: whether ``squares`` is computed, the sum of each region's squared averages, in float64.
    """

    def __init__(
        self,
        buffer: Tensor,
        regions: Sequence[Region[Part]],
        feedback: Feedback[Part] | None,
        *,
        by_parameter: bool = False,
        with_squares: bool = False,
    ):
        self.numel = buffer.numel()
        self.message_bytes = sum(_ops.find_codec(region.codec).bytes(region.numel) for region in regions)
        self.codec = next((region.codec for region in regions if region.is_lossy), "raw")  # by which plans are selected
        if not any(region.is_lossy for region in regions):
            feedback = None
        self.has_feedback = feedback is not None
        self.squares = None
        if with_squares:
            self.squares = torch.zeros(len(regions), dtype=torch.float64, device=buffer.device)
        lost = {}
        if feedback is not None:
            lost = feedback.lay(_spans(regions), buffer)
        self.handle = _ops.BucketState(
            [(region.first, region.numel, region.codec, region.number, region.owner) for region in regions],
            by_parameter=by_parameter,
            squares=self.squares,
            **lost,
        )


def _spans(regions: Sequence[Region[Part]]) -> dict[Part, tuple[int, int]]:
    """Returns the first element of each part and how many it has; the regions of a part are adjacent."""
    spans: dict[Part, tuple[int, int]] = {}
    for region in regions:
        first, numel = spans.get(region.part, (region.first, 0))
        spans[region.part] = (first, numel + region.numel)
    return spans
