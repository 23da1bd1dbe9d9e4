"""Selects once what the hook runs, since the bits of gradients depend on it."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dltrain_ext._arguments import check_number
from dltrain_ext.comm import Communicator
from dltrain_ext.comm.arguments import IN_PLANS, check_names
from dltrain_ext.comm.groups import device_of, group_of

PLAIN = ("native", "raw")  # the backend's own all-reduce, and ours
_BUCKET = 25 << 20  # bytes, DDP's default
_IN_RANK_ORDER = ("direct", "oneshot")  # their order of additions does not depend on an element's chunk
_log = logging.getLogger("dltrain_ext")


@dataclass(frozen=True)
class Reduction:
    """A codec, an algorithm and a number of segments, as for ``comm.all_reduce``; None: as many as suit the bucket.

    The codec is ``"auto"`` if each bucket has its own."""

    codec: str
    algorithm: str
    segments: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: object) -> "Reduction":
        """Raises ValueError if ``plain`` is not what ``to_dict`` returns."""
        try:
            if not isinstance(plain, Mapping):
                raise TypeError("no mapping")
            choice = cls(**plain)
            check_names(choice.algorithm, "raw" if choice.codec == "auto" else choice.codec)
            if choice.segments is not None:
                check_number(choice.segments, "segments", 2**16)
            return choice
        except (TypeError, ValueError) as error:
            raise ValueError(f"state_dict: expected choice of codec, algorithm and segments, got {plain!r}") from error

    def __str__(self) -> str:
        segments = "" if self.segments is None else f" in {self.segments} segments"
        return f"{self.codec} by {self.algorithm}{segments}"

    def of_bucket(self, codecs: Iterable[str]) -> "Reduction":
        """Returns how a bucket is sent whose parameters have these codecs: by the backend if all are ``"native"``, else
        by the plan. Its codec, which only describes the call, is one that loses something, if there is one."""
        found = {*codecs}
        if found == {"native"}:
            return Reduction("raw", "native")
        return replace(self, codec=min(found - {*PLAIN}, default="raw"))

    def is_by_parameter(self, world_size: int) -> bool:
        """Returns whether each gradient must be divided into chunks on its own, so that its bits do not depend on its
        bucket."""
        in_any_order = world_size <= 2 or self.algorithm in _IN_RANK_ORDER
        return not (self.codec == "raw" and in_any_order)

    def or_saved(self, states: Sequence[Mapping[str, Any]], asked: "Reduction", world_size: int) -> "Reduction":
        """Returns the choice in the checkpoints of a run of as many ranks, if it fits what is asked for now; else this
        one.

        Raises ValueError if the checkpoints have several choices, or something else.
        """
        choices = {self.from_dict(state["choice"]) for state in states if "choice" in state}
        if len(choices) > 1:
            raise ValueError(f"state_dict: expected states of one choice, got {', '.join(sorted(map(str, choices)))}")
        if not choices or states[0]["world_size"] != world_size:
            return self
        (saved,) = choices
        if (saved.codec == "auto") != (self.codec == "auto"):
            return self  # one of them had a budget
        fits = asked.codec in ("auto", saved.codec) and asked.algorithm in ("auto", saved.algorithm)
        return saved if fits else self


def usual_codec(group: dist.ProcessGroup | None, parameters: Iterable[Tensor]) -> str:
    """Returns the codec where the user gives none. On CUDA it is selected by measuring, since links between GPUs may be
    so fast that compressing takes longer than sending."""
    device = next((parameter.device for parameter in parameters), None)
    if device is None:
        device = device_of(group_of(group))
    return "auto" if device.type == "cuda" else "int8"


def choose(
    communicator: Communicator, group: dist.ProcessGroup, asked: Reduction, parameters: Iterable[Tensor]
) -> Reduction:
    """Returns what ``"auto"`` stands for, with buckets of these parameters. This is a collective call.

    A codec is selected by measuring if there is no tuning. A plan alone is selected by the number of ranks, so that
    runs have the same bits. If no parameters are known, buckets are taken to be float32 and of 25 MiB, as DDP's are.
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


def choose_plan(communicator: Communicator, asked: Reduction, parameters: Iterable[Tensor]) -> Reduction:
    """Returns the plan for buckets of these parameters whose codecs are selected one by one. This is a collective
    call."""
    algorithm, segments = asked.algorithm, None
    numel, dtype = _typical(parameters)
    if algorithm == "auto":
        try:
            algorithm, segments = communicator.plan_for("int8", 4 * numel)
        except ValueError:  # the environment names one that accepts raw alone
            algorithm, segments = communicator.plan_for("raw", 4 * numel)
    if algorithm == "auto":
        algorithm = communicator.usual_plan
    communicator.connect(numel, dtype, codec="raw", algorithm=algorithm, segments=segments)
    return Reduction("auto", algorithm, segments)


def _typical(parameters: Iterable[Tensor]) -> tuple[int, torch.dtype]:
    """Returns the number of elements of a bucket, and their dtype: that of most parameters' elements."""
    numels = dict.fromkeys(IN_PLANS, 0)
    for parameter in parameters:
        if parameter.dtype in numels:
            numels[parameter.dtype] += parameter.numel()
    dtype = max(numels, key=numels.__getitem__)
    most = _BUCKET // dtype.itemsize
    return (min(numels[dtype], most) or most), dtype
