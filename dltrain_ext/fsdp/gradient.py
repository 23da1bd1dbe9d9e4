"""The gradient of one group of parameters of ``fully_shard``, from one reduction to the next."""

import torch
from torch import Tensor

from dltrain_ext.compress.feedback import Feedback
from dltrain_ext.compress.layout import Layout, Region
from dltrain_ext.compress.scaling import StepOutcome


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
        self.feedback = (
            None if feedback_dtype is None else Feedback[str](feedback_dtype, double_buffered=scaler is not None)
        )
        self.message_bytes = 0  # of the latest
        self._layouts: dict[int, Layout[str]] = {}  # by its elements: without feedback some parameters may be unused
        self._scaler = scaler

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
        if self.feedback is not None:
            self.feedback.settle()
            if self._scaler is not None:
                self.feedback.expect(StepOutcome.of_scaler(self._scaler))
        self.steps += 1
        return layout

    def lost(self) -> Tensor:
        """Flat, and zero before the first reduction."""
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
