"""Metrics over ranks, who is late, the first overflow by name, and a writer of JSON lines.

States, loss scalers, optimizers and communicators have ``metrics()``, a flat dict of numbers, which loggers take as it
is::

    metrics = state.metrics() | scaler.metrics() | optimizer.metrics()
"""

from dltrain_ext.compress.watch import Finding
from dltrain_ext.monitor.lines import JSONLines
from dltrain_ext.monitor.over_ranks import over_ranks

__all__ = ["Finding", "JSONLines", "over_ranks"]
