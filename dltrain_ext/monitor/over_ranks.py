"""Metrics over the ranks of a group."""

import math
from collections.abc import Mapping

import torch.distributed as dist

from dltrain_ext._arguments import as_number
from dltrain_ext.comm.groups import group_of

_WAITING = "ddp/waiting"


def over_ranks(metrics: Mapping[str, float], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Returns the smallest, the mean and the largest of each number over the ranks of a group, on all of them. This is
    a collective call, over the group itself.

    A rank that is late makes the others wait, and waits least itself. So if ``ddp/waiting`` of
    :meth:`dltrain_ext.ddp.AllReduceState.metrics` is among the metrics of all ranks, the result has ``late/rank``, the
    global rank that has waited least, and ``late/seconds``, how much longer the others have waited on average. Only a
    difference that is large compared with the rest of a step means that the rank is slow.

    Args:
        metrics: numbers by name. A name that some ranks do not have is reduced over those that have it.
        group: the process group; the default group if None.

    Returns:
        For each name ``name/min``, ``name/mean`` and ``name/max``. A NaN on any rank makes all three NaN.

    Raises:
        TypeError, ValueError: ``metrics`` is not a mapping from names to numbers, or ``group`` is none of this rank's.
    """
    group = group_of(group)
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics: expected a mapping from names to numbers, got {type(metrics).__name__}")
    if unnamed := [name for name in metrics if not isinstance(name, str)]:
        raise TypeError(f"metrics: expected names, got {unnamed[0]!r}")
    own = {name: as_number(value, f"metrics: {name!r}") for name, value in metrics.items()}
    ranks: list[dict[str, float]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(ranks, own, group=group)
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for each in ranks for name in each):
        values = [each[name] for each in ranks if name in each]
        has_nan = any(map(math.isnan, values))
        found[f"{name}/min"] = math.nan if has_nan else min(values)
        found[f"{name}/mean"] = math.fsum(values) / len(values) if all(map(math.isfinite, values)) else sum(values)
        found[f"{name}/max"] = math.nan if has_nan else max(values)
    if len(ranks) > 1 and all(_WAITING in each for each in ranks):
        waited = [each[_WAITING] for each in ranks]
        least = min(waited)
        late = waited.index(least)
        found["late/rank"] = float(dist.get_process_group_ranks(group)[late])
        found["late/seconds"] = (math.fsum(waited) - least) / (len(ranks) - 1) - least
    return found
