"""Error feedback: what has been lost, and how a step that is skipped leaves no trace in it."""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from dltrain_ext.compress.scaling import StepOutcome

Part = TypeVar("Part", bound=Hashable)


class Feedback(Generic[Part]):
    """What encoding has lost of each part of a gradient so far, in units of the unscaled, averaged gradient.

    Where steps may be skipped it is kept twice: a step reads one and writes the other, and only if it is not skipped do
    they change places. Nobody waits for the outcome: that is a number on the device, which the kernels read.
    """

    def __init__(self, dtype: torch.dtype, double_buffered: bool):
        self.dtype, self.double_buffered = dtype, double_buffered
        self.initial: dict[Part, Tensor] = {}  # of parts that have not been laid out yet
        self._views: dict[Part, tuple[Tensor, Tensor]] = {}
        self._swapped: dict[torch.device, Tensor] = {}
        self._outcome: StepOutcome | None = None  # on what has been written since the last

    def lay(self, spans: dict[Part, tuple[int, int]], buffer: Tensor) -> dict[str, Tensor]:
        """Flat memory for a buffer in which the parts lie there, with what there is of them."""
        flat = torch.zeros(buffer.numel(), dtype=self.dtype, device=buffer.device)
        for part, (first, numel) in spans.items():
            if (before := self.of(part)) is not None:
                flat[first : first + numel].copy_(before)
        spare = flat.clone() if self.double_buffered else flat
        for part, (first, numel) in spans.items():
            self._views[part] = (flat[first : first + numel], spare[first : first + numel])
            self.initial.pop(part, None)
        if not self.double_buffered:
            return {"residual": flat}
        return {"residual": flat, "spare": spare, "swapped": self._swapped_on(flat.device)}

    def _swapped_on(self, device: torch.device) -> Tensor:
        if device not in self._swapped:
            self._swapped[device] = torch.zeros(1, dtype=torch.uint8, device=device)
        return self._swapped[device]

    def of(self, part: Part) -> Tensor | None:
        """Flat; None where nothing has been lost yet."""
        if (views := self._views.get(part)) is None:
            return self.initial.get(part)
        if not self.double_buffered:
            return views[0]
        return torch.where(self._swapped_on(views[0].device).bool(), views[1], views[0])

    def expect(self, outcome: StepOutcome) -> None:
        """Whether what is written from now on holds. Where no step can be skipped nobody is asked."""
        if self.double_buffered:
            self._outcome = outcome

    def settle(self, unreached: Iterable[Part] = ()) -> None:
        """Asks for the outcome that is expected; parts that were not reduced keep what they have, whatever it is."""
        if self._outcome is None:
            return
        for part in unreached:
            lost = self.of(part)
            for view in self._views.get(part, ()):
                if lost is not None:
                    view.copy_(lost)
        is_taken = self._outcome.ask()
        self._outcome = None
        for device, swapped in self._swapped.items():
            swapped.bitwise_xor_(is_taken.to(device, torch.uint8, non_blocking=True))
