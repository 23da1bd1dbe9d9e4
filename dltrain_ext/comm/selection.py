"""Selects what "auto" stands for on a communicator: by the environment first, by its tuning, or by measuring."""

import hashlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from dltrain_ext.comm.arguments import check_names
from dltrain_ext.comm.connections import tell_once
from dltrain_ext.comm.plans import ALGORITHMS, algorithms_for
from dltrain_ext.comm.timing import Group
from dltrain_ext.comm.trial_selection import select_by_trials, times_by_trials
from dltrain_ext.comm.tuning import Tuning

_MOST_PLANS = 1024  # that are kept, because a call for a small tensor does not take longer than to find one
_SECONDS = 1.0  # the time that measuring for a codec may take
Measured = Callable[[], AbstractContextManager[Group]]  # enters and leaves the measuring of the group; collective


class Selector:
    """Selects for one communicator; ``tuning`` is the communicator's argument."""

    def __init__(self, tuning: Tuning | str | os.PathLike[str] | None, world_size: int):
        given = _as_tuning(tuning, world_size)
        self._overrides = Overrides.of_environment(world_size)
        self.use(self._overrides.tuning or given)
        self._world_size = world_size
        # In torch's deterministic mode the noise of measurements must not change the bits.
        self.may_measure = world_size > 1 and not torch.are_deterministic_algorithms_enabled()
        self._selected: dict[object, tuple[str, str]] = {}
        self._times: dict[object, dict[str, float]] = {}

    def use(self, tuning: Tuning | None) -> None:
        """Selects by this tuning from now on; None selects without one."""
        self.tuning = tuning
        self._plans: dict[tuple[str, int], tuple[str, int | None]] = {}  # found by plan_for

    @property
    def digest(self) -> str:
        """A digest that is the same for all ranks that select alike."""
        return hashlib.sha256(repr((self.tuning, self._overrides, self.may_measure)).encode()).hexdigest()

    def plan_for(self, codec: str, nbytes: int) -> tuple[str, int | None]:
        """Returns for the algorithm ``"auto"`` and tensors of ``nbytes`` bytes in fp32 a plan, which is ``"auto"``
        without a tuning, and the number of segments if it is decided."""
        if (known := self._plans.get((codec, nbytes))) is not None:
            return known
        if len(self._plans) == _MOST_PLANS:
            self._plans.clear()
        return self._plans.setdefault((codec, nbytes), self._find_plan(codec, nbytes))

    def _find_plan(self, codec: str, nbytes: int) -> tuple[str, int | None]:
        overrides, choice = self._overrides, None
        if overrides.algorithm is not None:
            _check_override(overrides.algorithm, codec)
        elif self.tuning is not None and codec in self.tuning.table:
            choice = self.tuning.choose(codec, nbytes)
        algorithm = overrides.algorithm or (choice.algorithm if choice else "auto")
        return algorithm, overrides.segments or (choice.segments if choice else None)

    def codec_for(
        self, nbytes: int, algorithm: str, dtype: torch.dtype, measured: Measured, *, warns: bool
    ) -> tuple[str, str]:
        """Returns for the codec ``"auto"`` an algorithm, ``"native"`` if compression would be slower, and a codec."""
        algorithm = self._overridden(algorithm)
        if is_raw_alone(algorithm) or self._world_size == 1:
            return algorithm, "raw"
        plan = algorithm
        if self.tuning is not None:
            codec = self.tuning.codec_for(nbytes, dtype)
        else:
            codec, plan = self._select_by_trials(nbytes, dtype, algorithm, measured)
        if warns and codec in ("raw", "native"):
            tell_once("codec 'auto': compression would be slower here, so nothing is compressed")
        if codec == "native":
            return ("native" if algorithm == "auto" else algorithm), "raw"
        return plan, codec

    def times_for(self, nbytes: int, algorithm: str, dtype: torch.dtype, measured: Measured) -> dict[str, float]:
        """Returns the seconds of an all-reduce by the codecs that ``"auto"`` can be, which is raw alone if there are
        none."""
        algorithm = self._overridden(algorithm)
        if is_raw_alone(algorithm) or self._world_size == 1:
            return {}
        if self.tuning is not None:
            return self.tuning.times_for(nbytes, dtype)
        alike = nbytes.bit_length(), dtype, algorithm
        if alike not in self._times:
            with measured() as group:
                self._times[alike] = times_by_trials(group, nbytes, dtype, algorithm, _SECONDS)
        return self._times[alike]

    def _overridden(self, algorithm: str) -> str:
        return algorithm if algorithm != "auto" else self._overrides.algorithm or "auto"

    def _select_by_trials(self, nbytes: int, dtype: torch.dtype, algorithm: str, measured: Measured) -> tuple[str, str]:
        """Selects by trials, once for sizes of the same number of bits."""
        alike = nbytes.bit_length(), dtype, algorithm
        if alike not in self._selected:
            with measured() as group:
                self._selected[alike] = select_by_trials(group, nbytes, dtype, algorithm, _SECONDS)
        return self._selected[alike]


def is_raw_alone(algorithm: str) -> bool:
    """Returns whether an algorithm accepts only the codec raw."""
    return algorithm == "native" or algorithm in set(ALGORITHMS) - set(algorithms_for("int8"))


def _as_tuning(given: Tuning | str | os.PathLike[str] | None, world_size: int) -> Tuning | None:
    tuning = Tuning.load(given) if isinstance(given, str | os.PathLike) else given
    if tuning is not None and not isinstance(tuning, Tuning):
        raise TypeError(f"tuning: expected a Tuning or the path of a saved one, got {given!r}")
    if tuning is not None:
        _check_fits(tuning, world_size)
    return tuning


@dataclass(frozen=True)
class Overrides:
    """The environment variables for ``algorithm="auto"``: ``DLTRAIN_ALGORITHM``, ``DLTRAIN_SEGMENTS`` and
    ``DLTRAIN_TUNING``, the path of a saved tuning. They must be the same on all ranks."""

    algorithm: str | None
    segments: int | None
    tuning: Tuning | None

    @classmethod
    def of_environment(cls, world_size: int) -> "Overrides":
        """Reads the variables. Raises ValueError that names an invalid one."""
        algorithm, segments, path = (os.environ.get(f"DLTRAIN_{name}") for name in ("ALGORITHM", "SEGMENTS", "TUNING"))
        if algorithm is not None:
            _check_override(algorithm, "raw")
        if segments is not None and not (segments.isdecimal() and len(segments) <= 5 and 0 < int(segments) < 2**16):
            raise ValueError(f"DLTRAIN_SEGMENTS: expected a number of 1 to {2**16 - 1}, got {segments[:20]!r}")
        tuning = None
        if path is not None:
            try:
                tuning = Tuning.load(path)
                _check_fits(tuning, world_size)
            except (OSError, ValueError) as error:
                raise ValueError(f"DLTRAIN_TUNING={path}: {error}") from error
        return cls(algorithm, int(segments) if segments else None, tuning)


def _check_override(algorithm: str, codec: str) -> None:
    try:
        if algorithm == "auto":
            raise ValueError("expected a plan's name, got 'auto'")
        check_names(algorithm, codec)
    except ValueError as error:
        raise ValueError(f"DLTRAIN_ALGORITHM: {error}") from error


def _check_fits(tuning: Tuning, world_size: int) -> None:
    if tuning.world_size != world_size:
        raise ValueError(f"tuning: expected one of {world_size} ranks, got one of {tuning.world_size}")
