"""A table of the fastest plan, and its number of segments, for each size of a message. It is made by measuring."""

import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dltrain_ext.codecs import error_bound
from dltrain_ext.comm.arguments import check_names
from dltrain_ext.comm.cost_model import Network

VERSION = 1
LIKE_THE_FASTEST = 1.1  # up to this factor of the fastest time, a plan or codec is taken for equally fast


@dataclass(frozen=True)
class Choice:
    """The fastest plan for messages of about a size.

    Attributes:
        nbytes: size of the tensor in fp32.
        algorithm: as for ``comm.all_reduce``.
        segments: likewise.
        seconds: the time of the all-reduce.
        measured: whether this time was measured, or is that of the model.
    """

    nbytes: int
    algorithm: str
    segments: int
    seconds: float
    measured: bool


@dataclass(frozen=True)
class Tuning:
    """What :meth:`Communicator.tune` has measured of a group. It can be printed, saved, and passed to another run.

    Attributes:
        world_size: the number of ranks of the group.
        network: its measured properties, for :mod:`dltrain_ext.sim`.
        table: the choices by growing size, by codec; ``"native"`` is the backend's own all-reduce.
    """

    world_size: int
    network: Network
    table: Mapping[str, Sequence[Choice]]

    def choose(self, codec: str, nbytes: int) -> Choice:
        """Returns the choice whose size is nearest to ``nbytes``, logarithmically, with its time scaled beyond the
        largest."""
        choices = self.table[codec]
        for smaller, larger in itertools.pairwise(choices):
            if nbytes**2 <= smaller.nbytes * larger.nbytes:
                return smaller
        largest = choices[-1]
        if nbytes <= largest.nbytes:
            return largest
        return Choice(nbytes, largest.algorithm, largest.segments, largest.seconds * nbytes / largest.nbytes, False)

    def codec_for(self, nbytes: int, dtype: torch.dtype = torch.float32) -> str:
        """Returns the most accurate codec that takes at most 10 % longer than the fastest, or ``"native"`` if that is
        the backend's own all-reduce. It never returns sign, whose error is as large as the signal.

        nbytes, dtype: as for :meth:`times_for`.
        """
        seconds = self.times_for(nbytes, dtype)
        if not seconds:
            raise ValueError("codec: expected one by its name where the tuning holds sign alone, got 'auto'")
        return most_accurate(seconds)

    def times_for(self, nbytes: int, dtype: torch.dtype = torch.float32) -> dict[str, float]:
        """Returns the seconds of an all-reduce by the codecs that ``"auto"`` can be.

        nbytes: size of the tensor in fp32. dtype: that in which the backend's own all-reduce sends it, which is assumed
        to take as long as for the same number of bytes of fp32.
        """
        seconds = {codec: self.choose(codec, nbytes).seconds for codec in self.table if codec != "sign"}
        if "native" in seconds:
            seconds["native"] = self.choose("native", nbytes * dtype.itemsize // 4).seconds
        return seconds

    def __str__(self) -> str:
        network = self.network
        lines = [
            f"{self.world_size} ranks: latency {network.latency * 1e6:.0f} us, bandwidth "
            f"{network.bandwidth * 8e-9:.3g} Gbit/s",
            f"{'bytes':>10}  " + "".join(f"{codec:>32}" for codec in self.table),
        ]
        for nbytes in sorted({choice.nbytes for choices in self.table.values() for choice in choices}):
            cells = [_cell(next((c for c in choices if c.nbytes == nbytes), None)) for choices in self.table.values()]
            lines.append(f"{nbytes:>10}  " + "".join(f"{cell:>32}" for cell in cells))
        return "\n".join([*lines, "plan/segments, and milliseconds; ~ where these are the model's"])

    def to_json(self) -> str:
        return json.dumps(
            {
                "version": VERSION,
                "world_size": self.world_size,
                "network": self.network.to_dict(),
                "table": {codec: [asdict(choice) for choice in choices] for codec, choices in self.table.items()},
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> "Tuning":
        """Makes a tuning of what ``to_json`` returned. Raises ValueError if it is something else."""
        try:
            plain: dict[str, Any] = json.loads(text)
            if plain["version"] != VERSION:
                raise ValueError(f"version {plain['version']}, not {VERSION}")
            table = {codec: [Choice(**choice) for choice in choices] for codec, choices in plain["table"].items()}
            for codec, choices in table.items():
                if not choices:
                    raise ValueError(f"no choice for {codec}")
                for choice in choices:
                    whole = (choice.nbytes, choice.segments)
                    if not all(type(number) is int and number < 2**62 for number in whole):
                        raise ValueError(f"{choice} has bytes or segments that are no whole numbers")
                    if not isinstance(choice.seconds, int | float) or choice.seconds == math.inf:
                        raise ValueError(f"{choice} has seconds that are not a finite number")
                    if not (choice.nbytes > 0 and choice.seconds > 0 and choice.segments > 0):
                        raise ValueError(f"{choice} has a number that is not above 0")
                    check_names(choice.algorithm, "raw" if codec == "native" else codec)
                if any(larger.nbytes <= smaller.nbytes for smaller, larger in itertools.pairwise(choices)):
                    raise ValueError(f"the sizes for {codec} do not grow")
            if not table or type(plain["world_size"]) is not int or plain["world_size"] < 1:
                raise ValueError(f"a table of {len(table)} codecs for {plain['world_size']!r} ranks")
            return cls(plain["world_size"], Network.from_dict(plain["network"]), table)
        except (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"tuning: expected what Tuning.to_json() wrote, got something else: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the tuning to a file, completely or not at all."""
        part = Path(f"{os.fspath(path)}.part")
        part.write_text(self.to_json())
        part.replace(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tuning":
        try:
            return cls.from_json(Path(path).read_text())
        except UnicodeDecodeError as error:
            raise ValueError(f"tuning: expected what Tuning.save() wrote, got no text in {path}: {error}") from error
        except IsADirectoryError as error:
            raise ValueError(f"tuning: expected the path of a file, got the folder {path}") from error


def seconds_for(choices: Sequence[Choice], nbytes: int) -> float:
    """Returns the seconds of an all-reduce by the choices of a codec, interpolated between their sizes. For smaller
    tensors it is the time of the smallest, and for larger ones that of the largest in proportion."""
    smallest, largest = choices[0], choices[-1]
    if nbytes >= largest.nbytes:
        return largest.seconds * nbytes / largest.nbytes
    for smaller, larger in itertools.pairwise(choices):
        if smaller.nbytes < nbytes <= larger.nbytes:
            return interpolated((smaller.nbytes, smaller.seconds), (larger.nbytes, larger.seconds), nbytes)
    return smallest.seconds


def interpolated(below: tuple[int, float], above: tuple[int, float], nbytes: int) -> float:
    """Returns the seconds for a size between two sizes with their seconds, linear in the logarithms of both."""
    part = math.log(nbytes / below[0]) / math.log(above[0] / below[0])
    return below[1] * math.exp(part * math.log(above[1] / below[1]))


def most_accurate(seconds: Mapping[str, float]) -> str:
    """Returns the most accurate of the codecs, or ``"native"``, that take at most 10 % longer than the fastest."""
    fast = [codec for codec in seconds if seconds[codec] <= LIKE_THE_FASTEST * min(seconds.values())]
    exact = [codec for codec in fast if codec in ("raw", "native")]
    return min(exact or fast, key=lambda codec: (0 if exact else error_bound(codec).rms, seconds[codec]))


def _cell(choice: Choice | None) -> str:
    if choice is None:
        return "-"
    return f"{choice.algorithm}/{choice.segments} {'' if choice.measured else '~'}{choice.seconds * 1e3:.3g}"
