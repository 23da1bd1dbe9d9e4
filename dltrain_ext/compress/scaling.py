"""What a loss scaler means for feedback: the units that it is kept in, and the steps that leave no trace in it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler


def is_scaling(scaler: GradScaler | None) -> bool:
    return scaler is not None and scaler.is_enabled()


def loss_scale_of(scaler: GradScaler | None, device: torch.device) -> Tensor | None:
    """How many times larger gradients are now: a float32 number on the device; None without a scaler that is enabled.

    Raises RuntimeError where no loss has been scaled yet.
    """
    if scaler is None or not is_scaling(scaler):
        return None
    return _scale_of(scaler).to(device, non_blocking=True)


def _scale_of(scaler: GradScaler) -> Tensor:
    scale: Tensor | None = scaler._scale  # get_scale() would wait for the device, and scale() initialise the scaler
    if scale is None:
        raise RuntimeError("scaler: expected one whose scale(loss) has been called before backward")
    return scale


@runtime_checkable
class _Counting(Protocol):
    """A scaler that counts what it skips, as ``amp.LossScaler`` does."""

    @property
    def skipped_steps(self) -> Tensor: ...


@dataclass(frozen=True)
class StepOutcome:
    """Says whether the step is taken that a reduction was for, when asked before the next one. No host waits for it.

    By whom it is said depends on what a rank sees of the gradients.
    """

    ask: Callable[[], Tensor]

    @classmethod
    def of_sum(cls, sum_squares: Callable[[], Tensor]) -> "StepOutcome":
        """Where each rank has the averages of all gradients: they are finite exactly if the sum of their squares is.

        That is known at once, and of each backward pass. A scaler could not say it where there are several passes
        before a step, where it also counts the steps of other models, or on a rank that has joined, where it stands
        still; nor for a checkpoint between backward and step.
        """
        return cls(lambda: torch.isfinite(sum_squares()))

    @classmethod
    def of_scaler(cls, scaler: GradScaler) -> "StepOutcome":
        """Where each rank has a shard, which may be finite where others are not: the scaler, which has heard of all.

        It knows when it has been updated, so there must be one reduction a step, and one update between two.
        """
        if isinstance(scaler, _Counting):
            skipped = scaler.skipped_steps
            return cls(lambda: scaler.skipped_steps == skipped)
        before = _scale_of(scaler).clone()

        def is_taken() -> Tensor:
            # Torch's counts the steps since its scale has changed, and lowers that where it skips one.
            scale, counted = scaler._check_scale_growth_tracker("settle")
            return (scale >= before) | (counted > 0)

        return cls(is_taken)
