"""Checks of the arguments of several estimates."""

import math


def check_seconds(**given: float) -> None:
    for name, seconds in given.items():
        if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise ValueError(f"{name}: expected at least 0 s, got {seconds!r}")


def check_stragglers(stragglers: tuple[float, float]) -> tuple[float, float]:
    if not isinstance(stragglers, tuple) or [isinstance(x, int | float) for x in stragglers] != [True, True]:
        raise TypeError(f"stragglers: expected a probability and seconds, got {stragglers!r}")
    probability, delay = stragglers
    if not (0 <= probability <= 1 and 0 <= delay < math.inf):
        raise ValueError(f"stragglers: expected a probability and seconds, got {stragglers!r}")
    return probability, delay
