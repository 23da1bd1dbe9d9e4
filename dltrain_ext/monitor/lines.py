"""A file of metrics, a line of JSON for each step."""

import json
import math
import os
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from dltrain_ext._arguments import as_number, check_number


class JSONLines:
    """Writes metrics to a file, one JSON object in each line (jsonlines.org), so that ``pandas.read_json(path,
    lines=True)`` reads it while the run goes on.

    A line is written at once and has ``step`` and ``time``, in seconds since 1970, before the metrics. Numbers that
    JSON does not have, NaN and infinities, are written as null. A run that continues appends to its file.

    Args:
        path: the file. Its folder must exist.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (closed by close)

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Appends a line.

        Raises:
            TypeError, ValueError: ``metrics`` is not a mapping from names to numbers, ``step`` is not an int of at
                least 0, or the file was closed. Nothing is written.
        """
        check_number(step, "step", 2**63)
        if not isinstance(metrics, Mapping):
            raise TypeError(f"metrics: expected a mapping from names to numbers, got {type(metrics).__name__}")
        line: dict[str, Any] = {"step": step, "time": time.time()}
        for name, value in metrics.items():
            if not isinstance(name, str) or name in ("step", "time"):
                raise ValueError(f"metrics: expected names other than step and time, got {name!r}")
            number = as_number(value, f"metrics: {name!r}")
            line[name] = number if math.isfinite(number) else None
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> "JSONLines":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
