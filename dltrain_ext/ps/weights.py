"""The grace of a quorum, and the weights of the contributions of a version."""

from datetime import timedelta
from typing import Any

import torch

from dltrain_ext._arguments import as_number
from dltrain_ext.ps.settings import Settings

_LONGEST = timedelta(days=365)
_FLOAT32 = torch.finfo(torch.float32)


def check_grace(grace: Any, quorum: str | int, delay_compensation: float) -> float:
    """Returns it in seconds, and 0 for None. Raises TypeError or ValueError where it is invalid."""
    if grace is None:
        return 0.0
    if not isinstance(grace, timedelta):
        raise TypeError(f"grace: expected a timedelta or None, got {grace!r}")
    if not timedelta() < grace <= _LONGEST:
        raise ValueError(f"grace: expected more than 0 and at most {_LONGEST.days} days, got {grace!r}")
    if quorum == "all":
        raise ValueError(f"grace: expected None with quorum 'all', got {grace!r}")
    if delay_compensation:
        raise ValueError(f"grace: expected None with delay_compensation {delay_compensation!r}, got {grace!r}")
    return grace.total_seconds()


def factors(settings: Settings, weight: Any) -> tuple[float, float]:
    """Returns by what a push multiplies its values, and the weight that it tells the servers. They divide by the sum of
    the weights if there is a grace, because the workers do not know then how many contributions a version has."""
    if not settings.grace:
        shares = settings.quorum or len(settings.workers)
        return (1.0 / shares if weight is None else weight), 1.0
    number = 1.0 if weight is None else as_number(weight, "weight")
    if not _FLOAT32.tiny <= number <= _FLOAT32.max:
        raise ValueError(f"weight: expected a finite number > 0 in the range of float32, got {weight!r}")
    return number, number
