"""What the checks have found: a line for each as soon as it is known, and a JSON for a bug report."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

PASSED, FAILED, SKIPPED = "passed", "FAILED", "skipped"


class Skip(Exception):
    """Raised by a check that has nothing to look at here; its text says why."""


class Found(NamedTuple):
    """What a check has seen: a short text for the table, and figures for the JSON."""

    text: str
    figures: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Site:
    """Where a check runs: one rank's place in the group, and the device of its tensors."""

    device: torch.device
    rank: int
    world_size: int
    quick: bool


class Check(NamedTuple):
    """``run`` raises where something is wrong, AssertionError as a rule."""

    name: str
    run: Callable[[Site], Found]


@dataclass(frozen=True)
class Outcome:
    """Of one check on one rank, or on all of them together."""

    check: str
    device: str
    outcome: str
    seconds: float
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    traceback: str = ""

    @classmethod
    def of_all(cls, ranks: Sequence["Outcome"]) -> "Outcome":
        """The one that failed first, named by its rank, since others may fail for want of it; else rank 0's."""
        if failed := [rank for rank, one in enumerate(ranks) if one.outcome == FAILED]:
            rank = min(failed, key=lambda rank: ranks[rank].seconds)
            if len({one.text for one in ranks}) == 1:  # they have agreed on it, or there is one rank
                return ranks[rank]
            return replace(ranks[rank], text=f"rank {rank}: {ranks[rank].text}")
        return replace(ranks[0], seconds=max(one.seconds for one in ranks))


class Report:
    """Shows and keeps the outcomes; on ranks other than 0 it keeps silent."""

    def __init__(self, facts: Mapping[str, Any], path: Path | None, speaks: bool) -> None:
        self._facts, self._path, self._speaks = facts, path, speaks
        self.outcomes: list[Outcome] = []

    @property
    def failed(self) -> int:
        return sum(one.outcome == FAILED for one in self.outcomes)

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if self._speaks:
            one = outcome
            print(f"{one.outcome:8}{one.device:6}{one.check:32}{one.seconds:7.1f} s  {one.text}", flush=True)
            self._write(complete=False)

    def skip(self, device: str, reason: str) -> None:
        """All checks on a device."""
        self.add(Outcome("all checks", device, SKIPPED, 0.0, reason))

    def close(self) -> None:
        """Prints the count, and marks the JSON as complete: one that is not tells where a rank crashed."""
        if not self._speaks:
            return
        counts = {word: sum(one.outcome == word for one in self.outcomes) for word in (PASSED, FAILED, SKIPPED)}
        print(", ".join(f"{count} {word.lower()}" for word, count in counts.items()))
        self._write(complete=True)

    def _write(self, complete: bool) -> None:
        if self._path is None:
            return
        kept = {"complete": complete, "facts": self._facts, "outcomes": [asdict(one) for one in self.outcomes]}
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(json.dumps(kept, indent=1) + "\n")
        part.replace(self._path)
