"""What a logger gets to know about collectives."""

import collections
from collections.abc import Mapping

SENT = ("calls", "wire_bytes", "inside_bytes")
"""The counters of a communicator that ``stats`` has."""


class Bandwidths:
    """Makes metrics of the counters of communicators; its bandwidths are those since the previous time."""

    def __init__(self) -> None:
        self._before = collections.Counter[str]()

    def metrics(self, counted: Mapping[str, float]) -> dict[str, float]:
        """Returns the counters, and ``comm/algbw`` and ``comm/busbw`` in 10^9 bytes per second where times are known:
        the bytes of the tensors per second that a collective takes, and the same times a factor, with which collectives
        and numbers of ranks can be compared, as nccl-tests define them."""
        found = {f"comm/{name}": float(counted[name]) for name in (*SENT, "seconds")}
        seconds = counted["seconds"] - self._before["seconds"]
        if seconds > 0:
            for name, of in (("algbw", "tensor_bytes"), ("busbw", "bus_bytes")):
                found[f"comm/{name}"] = (counted[of] - self._before[of]) / seconds * 1e-9
        self._before = collections.Counter(counted)
        return found
