"""What the hook runs: decided once, since a gradient's bits depend on it."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dltrain_ext._arguments import check_number
from dltrain_ext.comm import Communicator
from dltrain_ext.comm.arguments import IN_PLANS, check_names
from dltrain_ext.comm.groups import device_of, group_of

_BUCKET = 25 << 20  # bytes, DDP's default
_IN_RANK_ORDER = ("direct", "oneshot")  # they add up every element in the same order, whichever chunk it is in
_log = logging.getLogger("dltrain_ext")


@dataclass(frozen=True)
class Reduction:
    """A codec, an algorithm and segments, as for ``comm.all_reduce``; None: these go by the size of the bucket."""

    codec: str
    algorithm: str
    segments: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: object) -> "Reduction":
        """Raises ValueError where it is none."""
        try:
            if not isinstance(plain, Mapping):
                raise TypeError("no mapping")
            choice = cls(**plain)
            check_names(choice.algorithm, choice.codec)
            if choice.segments is not None:
                check_number(choice.segments, "segments", 2**16)
            return choice
        except (TypeError, ValueError) as error:
            raise ValueError(f"state_dict: expected choice of codec, algorithm and segments, got {plain!r}") from error

    def __str__(self) -> str:
        segments = "" if self.segments is None else f" in {self.segments} segments"
        return f"{self.codec} by {self.algorithm}{segments}"

    def is_by_parameter(self, codec: str, world_size: int) -> bool:
        """Whether gradients that travel in that codec have to be cut each by itself, for their bits not to depend on
        their buckets."""
        in_any_order = world_size <= 2 or self.algorithm in _IN_RANK_ORDER
        return not (codec == "raw" and in_any_order)

    def or_saved(self, states: Sequence[Mapping[str, Any]], asked: "Reduction", world_size: int) -> "Reduction":
        """What a run before, of as many ranks, had in its checkpoints, where that is what is asked for now.

        Raises ValueError where they have several, or something else.
        """
        choices = {self.from_dict(state["choice"]) for state in states if "choice" in state}
        if len(choices) > 1:
            raise ValueError(f"state_dict: expected states of one choice, got {', '.join(sorted(map(str, choices)))}")
        if not choices or states[0]["world_size"] != world_size:
            return self
        (saved,) = choices
        fits = asked.codec in ("auto", saved.codec) and asked.algorithm in ("auto", saved.algorithm)
        return saved if fits else self


def usual_codec(group: dist.ProcessGroup | None, parameters: Iterable[Tensor]) -> str:
    """What gradients travel as, where nobody says: on CUDA what measuring comes to, since links between GPUs may be so
    fast that to compress takes longer than to send."""
    device = next((parameter.device for parameter in parameters), None)
    if device is None:
        device = device_of(group_of(group))
    return "auto" if device.type == "cuda" else "int8"


def choose(
    communicator: Communicator, group: dist.ProcessGroup, asked: Reduction, parameters: Iterable[Tensor]
) -> Reduction:
    """What ``"auto"`` stands for, with buckets of these parameters. Collective.

    A codec is found by measuring, where there is no tuning; a plan alone goes by the ranks, so that runs have the same
    bits. Where no parameters are known, for float32 and DDP's buckets of 25 MiB.
    """
    codec, algorithm, segments = asked.codec, asked.algorithm, None
    numel, dtype = _typical(parameters)
    if codec == "auto":
        algorithm, codec = communicator.codec_for(4 * numel, algorithm, dtype)
    if algorithm == "auto":
        algorithm, segments = communicator.plan_for(codec, 4 * numel)
    if algorithm == "auto":
        algorithm = communicator.usual_plan
    choice = Reduction(codec, algorithm, segments)
    communicator.connect(numel, dtype, **choice.to_dict())
    if asked.codec == "auto" and dist.get_rank(group) == 0:
        _log.warning("codec 'auto': gradients travel as %s, for buckets of %d elements of %s", choice, numel, dtype)
    return choice


def _typical(parameters: Iterable[Tensor]) -> tuple[int, torch.dtype]:
    """Elements of a bucket, and their dtype: that of most."""
    numels = dict.fromkeys(IN_PLANS, 0)
    for parameter in parameters:
        if parameter.dtype in numels:
            numels[parameter.dtype] += parameter.numel()
    dtype = max(numels, key=numels.__getitem__)
    most = _BUCKET // dtype.itemsize
    return (min(numels[dtype], most) or most), dtype
