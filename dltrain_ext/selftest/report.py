"""The results of the checks: a line for each as soon as it is complete, and JSON for a bug report."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

PASSED, FAILED, SKIPPED = "passed", "FAILED", "skipped"


class Skip(Exception):
    """Raised by a check that cannot be made here; its text says why."""


class Found(NamedTuple):
    """The result of a check: a short text for the table, and figures for the JSON."""

    text: str
    figures: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Site:
    """Where a check runs: the rank, the size of the group, and the device of the tensors."""

    device: torch.device
    rank: int
    world_size: int
    quick: bool


class Check(NamedTuple):
    """``run`` raises an exception, usually AssertionError, if something is wrong."""

    name: str
    run: Callable[[Site], Found]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one check on one rank, or on all of them together."""

    check: str
    device: str
    outcome: str
    seconds: float
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    traceback: str = ""

    @classmethod
    def of_all(cls, ranks: Sequence["Outcome"]) -> "Outcome":
        """Returns the one that failed first, with its rank, since others may fail as a consequence; else rank 0's."""
        if failed := [rank for rank, one in enumerate(ranks) if one.outcome == FAILED]:
            rank = min(failed, key=lambda rank: ranks[rank].seconds)
            if len({one.text for one in ranks}) == 1:  # the text is common to all, or there is one rank
                return ranks[rank]
            return replace(ranks[rank], text=f"rank {rank}: {ranks[rank].text}")
        return replace(ranks[0], seconds=max(one.seconds for one in ranks))


class Report:
    """Prints and stores the outcomes. On ranks other than 0 it prints and writes nothing."""

    def __init__(self, facts: Mapping[str, Any], path: Path | None, is_rank_0: bool) -> None:
        self._facts, self._path, self._is_rank_0 = facts, path, is_rank_0
        self.outcomes: list[Outcome] = []

    @property
    def failed(self) -> int:
        return sum(one.outcome == FAILED for one in self.outcomes)

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if self._is_rank_0:
            one = outcome
            print(f"{one.outcome:8}{one.device:6}{one.check:32}{one.seconds:7.1f} s  {one.text}", flush=True)
            self._write(complete=False)

    def skip(self, device: str, reason: str) -> None:
        """Adds an outcome for all checks on a device."""
        self.add(Outcome("all checks", device, SKIPPED, 0.0, reason))

    def close(self) -> None:
        """Prints the counts, and marks the JSON as complete: an incomplete one shows in which check a rank crashed."""
        if not self._is_rank_0:
            return
        counts = {word: sum(one.outcome == word for one in self.outcomes) for word in (PASSED, FAILED, SKIPPED)}
        print(", ".join(f"{count} {word.lower()}" for word, count in counts.items()))
        self._write(complete=True)

    def _write(self, complete: bool) -> None:
        if self._path is None:
            return
        kept = {"complete": complete, "facts": self._facts, "outcomes": [asdict(one) for one in self.outcomes]}
        write(self._path, kept)


def write(path: Path, kept: Mapping[str, Any]) -> None:
    """Writes a file of JSON, completely or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(kept, indent=1) + "\n")
    part.replace(path)
