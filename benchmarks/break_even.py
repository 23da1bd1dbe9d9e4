"""The crossings of two measured curves, with straight lines between the measured points on logarithmic axes."""

import math
from collections.abc import Mapping
from itertools import pairwise

Curve = Mapping[float, float]
"""Times, keyed by the sizes or the rates at which they were measured."""


def crossings(ours: Curve, theirs: Curve) -> list[tuple[float, bool]]:
    """Return the x of each crossing, and whether ours is faster below it."""
    points = [(math.log(x), math.log(ours[x] / theirs[x])) for x in sorted(ours) if x in theirs]
    found = []
    for (x, before), (following, after) in pairwise(points):
        if (before < 0) != (after < 0):
            found.append((math.exp(x + (following - x) * before / (before - after)), before < 0))
    return found


def at(curve: Curve, x: float) -> float:
    """Interpolate the time at an x within the curve."""
    below, above = max(p for p in curve if p <= x), min(p for p in curve if p >= x)
    if below == above:
        return curve[below]
    share = math.log(x / below) / math.log(above / below)
    return curve[below] ** (1 - share) * curve[above] ** share


def faster_in(ours: Curve, theirs: Curve) -> list[tuple[float, float]]:
    """Return the intervals in which ours is faster, between the first and the last measured x."""
    shared = sorted(set(ours) & set(theirs))
    if not shared:
        return []
    starts = [shared[0]] if ours[shared[0]] < theirs[shared[0]] else []
    ends = []
    for x, was_faster in crossings(ours, theirs):
        (ends if was_faster else starts).append(x)
    return list(zip(starts, [*ends, shared[-1]], strict=False))


def in_words(ours: Curve, theirs: Curve, ours_free: float | None = None, theirs_free: float | None = None) -> str:
    """Say up to which x, or from which x on, ours is faster. The last two times are those without a limit (no x)."""
    shared = sorted(set(ours) & set(theirs))
    faster = [ours[x] < theirs[x] for x in shared]
    parts = [f"{'up to' if below else 'from'} {x:.3g}" for x, below in crossings(ours, theirs)]
    if ours_free and theirs_free:
        faster.append(ours_free < theirs_free)
        if shared and faster[-1] != faster[-2]:
            parts.append(f"{'from' if faster[-1] else 'up to'} > {shared[-1]:g}")
    if not faster:
        return ""
    return ", ".join(parts) or f"{'faster' if faster[0] else 'slower'} everywhere measured"
