"""Selects a codec and a plan for tensors of one size, by timing them on a live group for a second at most."""

from collections.abc import Sequence

import torch

from dltrain_ext.comm.plans import algorithms_for
from dltrain_ext.comm.timing import Group, Trial, TrialRunner
from dltrain_ext.comm.tuning import LIKE_THE_FASTEST, most_accurate

_FEW_BYTES = "direct"  # it also encodes least often
_MANY_BYTES = frozenset(("oneshot", "tree", "double_tree", "recursive_doubling"))  # for large tensors and many ranks
_CODECS = ("raw", "fp16", "int8", "int4")  # bf16 and fp8 lose more with as many bytes, and sign's error is too large
_SMALL, _PROBE = 4**6, 4**8  # bytes
_PART = 0.4  # the part of the time that is for the codec, and that for the plan
_LEAST_TURNS = 3
_LARGE = 4**11  # bytes from which on having few rounds is no advantage


def select_by_trials(group: Group, nbytes: int, dtype: torch.dtype, algorithm: str, seconds: float) -> tuple[str, str]:
    """Returns the codec, and the plan if the algorithm is ``"auto"``; both are ``"native"`` for the backend's own
    all-reduce. This is a collective call.

    The codec is the most accurate one that takes at most 10 % longer than the fastest. The plan is ``"direct"``, which
    sends few bytes and encodes least often, unless another is clearly faster.

    nbytes: the size of the tensors in fp32. If it takes too long to time these, smaller ones are timed and
    extrapolated: the time of a message is a latency plus a constant for each byte. dtype: the dtype of the tensors.
    """
    runner = TrialRunner(group, seconds)
    plan = _FEW_BYTES if algorithm == "auto" else algorithm
    codec = most_accurate(_times_of_codecs(runner, nbytes, dtype, plan))
    if codec == "native" or algorithm != "auto":
        return codec, "native" if codec == "native" else plan
    return codec, _select_plan(runner, nbytes, dtype, codec, group.world_size)


def times_by_trials(group: Group, nbytes: int, dtype: torch.dtype, algorithm: str, seconds: float) -> dict[str, float]:
    """Returns the seconds of an all-reduce by codec, with what :func:`select_by_trials` would time in its first part.
    This is a collective call."""
    runner = TrialRunner(group, seconds)
    return _times_of_codecs(runner, nbytes, dtype, _FEW_BYTES if algorithm == "auto" else algorithm)


def _times_of_codecs(runner: TrialRunner, nbytes: int, dtype: torch.dtype, plan: str) -> dict[str, float]:
    (latency,) = runner.run([Trial("raw", _SMALL, plan, 1)], 0.05)
    trials = [*(Trial(name, nbytes, plan, 0) for name in _CODECS), Trial("native", nbytes, "native", 0)]
    size = _affordable(runner, len(trials), nbytes, "raw")
    times = runner.run([trial._replace(nbytes=size) for trial in trials], _PART, dtype)
    grown = [_at(nbytes, size, seconds, latency) for seconds in times]
    return dict(zip((trial.codec for trial in trials), grown, strict=True))


def _select_plan(runner: TrialRunner, nbytes: int, dtype: torch.dtype, codec: str, world_size: int) -> str:
    plans = _plans(codec, world_size, nbytes)
    size = _affordable(runner, len(plans), nbytes, codec)
    if size < nbytes // 4:  # too small for a decision
        return _FEW_BYTES
    times = runner.run([Trial(codec, size, plan, 0) for plan in plans], _PART, dtype)
    took = dict(zip(plans, times, strict=True))
    fastest = min(plans, key=took.__getitem__)
    return _FEW_BYTES if took[_FEW_BYTES] <= LIKE_THE_FASTEST * took[fastest] else fastest


def _plans(codec: str, world_size: int, nbytes: int) -> Sequence[str]:
    left_out = _MANY_BYTES if world_size > 2 and nbytes > _LARGE else frozenset()
    return [name for name in algorithms_for(codec) if name not in left_out]


def _affordable(runner: TrialRunner, trials: int, nbytes: int, codec: str) -> int:
    """Returns a size, at most ``nbytes``, at which the trials in that codec can take some turns in their part of the
    time."""
    size = min(_PROBE, max(nbytes, _SMALL))
    while size < nbytes:
        (took,) = runner.run([Trial(codec, size, _FEW_BYTES, 1)], 0.02)
        fits = int(size * min(runner.left, _PART * runner.seconds) / (_LEAST_TURNS * trials * took))
        larger = min(nbytes, fits, 16 * size) // 4 * 4
        if larger < min(2 * size, nbytes):
            break
        size = larger
    return size


def _at(nbytes: int, size: int, seconds: float, latency: float) -> float:
    """Extrapolates the time of an all-reduce from ``size`` to ``nbytes``."""
    sending = max(seconds - latency, 0.02 * seconds)
    return seconds - sending + sending * nbytes / size
