"""The settings of an outer optimizer, which are the same at all sites."""

from dataclasses import dataclass
from typing import Any

import torch

from dltrain_ext import _ops
from dltrain_ext._arguments import as_number, check_number, check_schedule
from dltrain_ext.comm.arguments import check_names
from dltrain_ext.local_sgd.fragments import ALGORITHM

NAMES = "model, sync_every, lr, momentum, nesterov, fragments, delay, mix, codec, error_feedback, min_compress_numel"


@dataclass(frozen=True)
class Settings:
    """See :class:`dltrain_ext.local_sgd.DiLoCo`. Raises TypeError or ValueError that names what is invalid."""

    sync_every: int
    lr: float
    momentum: float
    nesterov: bool
    fragments: int
    delay: int
    mix: float
    codec: str
    error_feedback: bool
    min_compress_numel: int

    def __post_init__(self) -> None:
        for name in ("nesterov", "error_feedback"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name}: expected a bool, got {value!r}")
        check_schedule(self.sync_every, self.fragments, self.delay)
        for name in ("lr", "momentum", "mix"):
            object.__setattr__(self, name, as_number(given := getattr(self, name), name))
            value = float(torch.tensor(getattr(self, name), dtype=torch.float32))  # as the kernel takes it
            if name == "lr" and not 0 < value < float("inf"):
                raise ValueError(f"lr: expected more than 0, and finite in float32, got {given!r}")
            if name != "lr" and not 0 <= value < 1:
                raise ValueError(f"{name}: expected 0 or more, less than 1, got {given!r}")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov: expected False without momentum, got True")
        check_names(ALGORITHM, self.codec)
        check_number(self.min_compress_numel, "min_compress_numel", 2**63)
        if self.error_feedback:
            _ops.check_feedback(self.codec, False, "error_feedback: expected False")

    @property
    def interval(self) -> int:
        """The number of steps between two averages, of one fragment and the next."""
        return self.sync_every // self.fragments

    @property
    def rule(self) -> dict[str, Any]:
        """The numbers of an outer step, except for ``own_share``."""
        return {"lr": self.lr, "momentum": self.momentum, "nesterov": self.nesterov}

    @property
    def own_share(self) -> float:
        """The share of a site's own parameters in the new ones; 0 if it has not gone on meanwhile."""
        return self.mix if self.delay else 0.0
