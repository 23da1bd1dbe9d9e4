"""The state of a process that has nothing to reduce."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dltrain_ext.amp import GradStats
from dltrain_ext.compress.watch import Finding
from dltrain_ext.ddp.budget import check_budget
from dltrain_ext.ddp.hook import AllReduceState
from dltrain_ext.ddp.parameters import trained_parameters
from dltrain_ext.ddp.selection import usual_codec


def has_peers() -> bool:
    """Returns whether this process is one of several, by its group or, before there is one, by ``WORLD_SIZE``."""
    return dist.get_world_size() > 1 if dist.is_initialized() else os.environ.get("WORLD_SIZE", "1") != "1"


class LocalState(AllReduceState):
    """The state of a model in a process without peers; ``steps`` are those of the checkpoint that was loaded.

    An optimizer that was to be sharded updates the whole model, which is therefore ``shards``.
    """

    def __init__(self, model: nn.Module, codec: str | None = None, max_error: float | None = None, **options: Any):
        self.shards = model
        self._trained = trained_parameters(model)
        if codec is None:
            codec = usual_codec(None, self._trained.values()) if self._trained else "int8"
        check_budget(max_error, codec)
        codec = "raw" if codec == "auto" else codec
        super().__init__(codec=codec, named_parameters=self._trained.items(), **options)

    def _use(self, group: dist.ProcessGroup | None) -> None:
        self._rank, self._world_size, self.choice, self._budget = 0, 1, self._asked, None

    @property
    def grad_stats(self) -> GradStats:
        """The sum of squares of the gradients, which are read for it in this call.

        Raises:
            RuntimeError: there is no scaler, or no gradient yet.
        """
        self._check_scaler()
        norms = [
            torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)
            for parameter in self._trained.values()
            if parameter.grad is not None
        ]
        if not norms:
            raise RuntimeError("grad_stats: expected a backward pass first")
        return GradStats(torch.stack([norm.to(norms[0].device, non_blocking=True) for norm in norms]).square().sum())

    def findings(self) -> list[Finding]:
        """Returns nothing: no gradient is looked at, since none is averaged."""
        return []

    def metrics(self, *, errors: bool = True) -> dict[str, float]:
        """Returns ``ddp/steps``; nothing was sent."""
        return {"ddp/steps": float(self.steps)}

    def stats(self) -> dict[str, Any]:
        """Returns the entries of :meth:`AllReduceState.stats`; nothing was sent."""
        sent = {"buckets": 0, "wire_bytes": 0, "inside_bytes": 0}
        return {**sent, "steps": self.steps, **self.choice.to_dict(), "ratio": 1.0, "hidden": None, "per_bucket": []}
