"""Which batches the factors are made of, and how the gradients of these are scaled."""

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState


class Batches:
    """What all layers know of the current step.

    Attributes:
        are_taken: whether the moments of this step's calls are taken.
        sums: the running sums of all layers and their weights, which decay before the first moments of a step.
    """

    def __init__(self, decay: float, accumulation_steps: int, scaler: GradScaler | None):
        self.are_taken = True
        self.sums: list[Tensor] = []
        self._decay, self._accumulation_steps = decay, accumulation_steps
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._decays = False

    def begin(self) -> None:
        """Is called before moments are added."""
        if self._decays:
            with torch.no_grad():
                torch._foreach_mul_(self.sums, self._decay)
            self._decays = False

    def end(self, next_are_taken: bool) -> None:
        """Is called at the end of a step."""
        self._decays |= self.are_taken
        self.are_taken = next_are_taken

    def loss_scale(self) -> float | Tensor:
        scale = None if self._scaler is None else self._scaler._get_scale_async()
        return 1.0 if scale is None else scale

    def scale(self) -> float | Tensor:
        """Returns by how much gradients are larger than those of the mean loss of a call."""
        return self.loss_scale() / self._accumulation_steps

    def check_stage(self) -> None:
        states = {} if self._scaler is None else self._scaler._per_optimizer_states
        if any(state["stage"] is OptState.UNSCALED for state in states.values()):
            raise RuntimeError("step: expected to be called before unscale_ of the scaler, which scales all gradients")
