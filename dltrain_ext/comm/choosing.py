"""What "auto" stands for on a communicator: by its tuning, and by the environment, which stands above it."""

import hashlib
import os
from dataclasses import dataclass

from dltrain_ext.comm.arguments import check_names
from dltrain_ext.comm.connections import tell_once
from dltrain_ext.comm.plans import ALGORITHMS, algorithms_for
from dltrain_ext.comm.tuning import Tuning


class Chooser:
    """Of one communicator, whose ``tuning`` argument it is given."""

    def __init__(self, tuning: Tuning | str | os.PathLike[str] | None, world_size: int):
        given = _as_tuning(tuning, world_size)
        self._overrides = Overrides.of_environment(world_size)
        self.tuning = self._overrides.tuning or given

    @property
    def digest(self) -> str:
        """The same for all that choose alike."""
        return hashlib.sha256(repr((self.tuning, self._overrides)).encode()).hexdigest()

    def plan_for(self, codec: str, nbytes: int) -> tuple[str, int | None]:
        """For the algorithm ``"auto"`` and tensors of so many bytes in fp32: a plan, and the number of segments where
        that is decided; ``"auto"`` before tuning."""
        overrides, choice = self._overrides, None
        if overrides.algorithm is not None:
            _check_override(overrides.algorithm, codec)
        elif self.tuning is not None and codec in self.tuning.table:
            choice = self.tuning.choose(codec, nbytes)
        algorithm = overrides.algorithm or (choice.algorithm if choice else "auto")
        return algorithm, overrides.segments or (choice.segments if choice else None)


def codec_for(tuning: Tuning, nbytes: int, algorithm: str, *, tells: bool) -> tuple[str, str]:
    """For the codec ``"auto"``: the algorithm to go with it, ``"native"`` where compressing would lose, and a codec."""
    codec = tuning.codec_for(nbytes)
    if codec in ("raw", "native") and tells:
        gbits = tuning.network.bandwidth * 8e-9
        tell_once(f"codec 'auto': compression would lose at {gbits:.3g} Gbit/s, so there is none")
    if codec == "native":
        return ("native" if algorithm == "auto" else algorithm), "raw"
    return algorithm, codec


def is_raw_alone(algorithm: str) -> bool:
    """Whether it takes no other codec."""
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
    """What the environment says for ``algorithm="auto"``: ``DLTRAIN_ALGORITHM``, ``DLTRAIN_SEGMENTS`` and
    ``DLTRAIN_TUNING``, the path of a saved tuning. It has to be the same on all ranks."""

    algorithm: str | None
    segments: int | None
    tuning: Tuning | None

    @classmethod
    def of_environment(cls, world_size: int) -> "Overrides":
        """Raises ValueError naming the variable."""
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
