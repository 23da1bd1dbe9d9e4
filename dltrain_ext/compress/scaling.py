"""What a loss scaler means for feedback: the units of residuals, and the steps that do not change them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler


def is_scaling(scaler: GradScaler | None) -> bool:
    return scaler is not None and scaler.is_enabled()


def loss_scale_of(scaler: GradScaler | None, device: torch.device) -> Tensor | None:
    """Returns the current factor of the gradients, a float32 number on the device, or None without an enabled scaler.

    Raises RuntimeError if no loss has been scaled yet.
    """
    if scaler is None or not is_scaling(scaler):
        return None
    return _scale_of(scaler).to(device, non_blocking=True)


def _scale_of(scaler: GradScaler) -> Tensor:
    scale: Tensor | None = scaler._scale  # get_scale() would wait for the device, and scale() would initialize it
    if scale is None:
        raise RuntimeError("scaler: expected one whose scale(loss) has been called before backward")
    return scale


@runtime_checkable
class _Counting(Protocol):
    """A scaler that counts the steps that it skips, as ``amp.LossScaler`` does."""

    @property
    def skipped_steps(self) -> Tensor: ...


@dataclass(frozen=True)
class StepOutcome:
    """Says whether the step of a reduction is taken; ``ask`` is called before the next reduction. No host waits for it.

    What decides depends on the gradients that a rank has.
    """

    ask: Callable[[], Tensor]

    @classmethod
    def of_sum(cls, sum_squares: Callable[[], Tensor]) -> "StepOutcome":
        """Is the outcome for ranks that have the averages of all gradients, which are finite exactly if their sum of
        squares is.

        The sum is known at once, and for each backward pass. A scaler could not decide if there are several passes
        before a step, if it also counts the steps of other models, on a rank that has joined, where it is not updated,
        or for a checkpoint between backward and step.
        """
        return cls(lambda: torch.isfinite(sum_squares()))

    @classmethod
    def of_scaler(cls, scaler: GradScaler) -> "StepOutcome":
        """Is the outcome for ranks that have a shard, which may be finite where others are not: the scaler has seen
        all.

        The outcome is known when the scaler has been updated, so there must be one reduction per step, and one update
        between two.
        """
        if isinstance(scaler, _Counting):
            skipped = scaler.skipped_steps
            return cls(lambda: scaler.skipped_steps == skipped)
        before = _scale_of(scaler).clone()

        def is_taken() -> Tensor:
            # torch's scaler counts the steps since its scale has changed, and decreases the scale when it skips one.
            scale, counted = scaler._check_scale_growth_tracker("settle")
            return (scale >= before) | (counted > 0)

        return cls(is_taken)
