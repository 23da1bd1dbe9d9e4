"""The gradient of one group of parameters of ``fully_shard``, from one reduction to the next."""

import torch
from torch import Tensor

from dltrain_ext.compress.feedback import Feedback
from dltrain_ext.compress.layout import Layout, Region
from dltrain_ext.compress.scaling import StepOutcome


class Gradient:
    """A flat tensor that is reduced in each step.

    Args:
        numel: its number of elements if all parameters have gradients.
        seed: the seed of its random numbers, different for each gradient.
        feedback_dtype: None without error feedback.
        scaler: one that is enabled, or None.
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
        self.feedback = (
            None if feedback_dtype is None else Feedback[str](feedback_dtype, double_buffered=scaler is not None)
        )
        self.message_bytes = 0  # of the latest reduction
        self._layouts: dict[int, Layout[str]] = {}  # by numel: without feedback some parameters may be unused
        self._scaler = scaler

    def enter(self, tensor: Tensor, codec: str) -> Layout[str]:
        """Is called before each reduction."""
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
        if self.feedback is not None:
            self.feedback.settle()
            if self._scaler is not None:
                self.feedback.expect(StepOutcome.of_scaler(self._scaler))
        self.steps += 1
        return layout

    def lost(self) -> Tensor:
        """Returns the flat residual, which is zero before the first reduction."""
        residual = None
        if self.feedback is not None:
            self.feedback.settle()
            residual = self.feedback.of(self.name)
        return torch.zeros(self.numel) if residual is None else residual.clone()

    def stats(self) -> dict[str, int]:
        counted = [layout.handle.stats() for layout in self._layouts.values()]
        return {
            "numel": self.numel,
            **{key: int(sum(each[key] for each in counted)) for key in ("calls", "wire_bytes")},
        }
