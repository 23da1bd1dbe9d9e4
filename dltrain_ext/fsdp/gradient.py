"""The gradient of one group of parameters of ``fully_shard``, from one reduction to the next."""

from collections.abc import Callable

import torch
from torch import Tensor

from dltrain_ext.amp import LossScaler
from dltrain_ext.compress.feedback import Feedback
from dltrain_ext.compress.layout import Layout, Region


class Gradient:
    """One flat tensor, each time that it is reduced.

    Args:
        numel: of it, where all parameters have gradients.
        seed: gradients draw different random numbers.
        feedback_dtype: None where what is lost is lost.
        scaler: one that is enabled.
    """

    def __init__(
        self,
        name: str,
        numel: int,
        seed: int,
        steps: int,
        feedback_dtype: torch.dtype | None,
        scaler: torch.amp.GradScaler | None,
    ):
        self.name, self.numel, self.seed, self.steps = name, numel, seed, steps
        self.feedback = None if feedback_dtype is None else Feedback[str](feedback_dtype, twofold=scaler is not None)
        self.message_bytes = 0  # of the latest
        self._layouts: dict[int, Layout[str]] = {}  # by its elements: without feedback some parameters may be unused
        self._scaler = scaler
        self._was_taken: Callable[[], Tensor] | None = None  # the step after what is lost was written last

    def enter(self, tensor: Tensor, codec: str) -> Layout[str]:
        """Before each reduction."""
        numel = tensor.numel()
        if self.feedback is not None and numel != self.numel:
            raise RuntimeError(
                f"error_feedback: expected gradients of all parameters of {self.name or 'the model'} in each backward "
                f"pass, {self.numel} elements, got {numel}; where some are unused, register with False"
            )
        if numel not in self._layouts:
            self._layouts[numel] = Layout(tensor, [Region(self.name, 0, numel, codec, 0)], self.feedback)
        layout = self._layouts[numel]
        self.message_bytes = layout.message_bytes
        self.numel = numel
        self._settle()
        if self.feedback is not None and self._scaler is not None:
            self._was_taken = next_step_of(self._scaler, tensor.device)
        self.steps += 1
        return layout

    def _settle(self) -> None:
        """What was lost last counts, unless its step has been skipped. No host waits for that."""
        if self._was_taken is not None and self.feedback is not None:
            self.feedback.settle(self._was_taken())
        self._was_taken = None

    def loss_scale(self, device: torch.device) -> Tensor | None:
        if self._scaler is None or self.feedback is None:
            return None
        return _scale_of(self._scaler, device)

    def lost(self) -> Tensor:
        """Flat, and zero before the first reduction."""
        self._settle()
        residual = None if self.feedback is None else self.feedback.of(self.name)
        return torch.zeros(self.numel) if residual is None else residual.clone()

    def stats(self) -> dict[str, int]:
        counted = [layout.handle.stats() for layout in self._layouts.values()]
        return {
            "numel": self.numel,
            **{key: int(sum(each[key] for each in counted)) for key in ("calls", "wire_bytes")},
        }


def next_step_of(scaler: torch.amp.GradScaler, device: torch.device) -> Callable[[], Tensor]:
    """Says, once the scaler has been updated, whether the step in between was taken. No host waits."""
    if isinstance(scaler, LossScaler):
        skipped = scaler.skipped_steps
        return lambda: scaler.skipped_steps == skipped
    before = _scale_of(scaler, device)

    def was_taken() -> Tensor:
        # Another counts the steps since its scale has changed, and lowers that where it skips one.
        scale, counted = scaler._check_scale_growth_tracker("settle")
        return (scale.to(device, non_blocking=True) >= before) | (counted.to(device, non_blocking=True) > 0)

    return was_taken


def _scale_of(scaler: torch.amp.GradScaler, device: torch.device) -> Tensor:
    scale: Tensor = scaler.scale(torch.ones((), device=device))
    return scale
