"""Error feedback: residuals, and how a step that is skipped does not change them."""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from dltrain_ext.compress.scaling import StepOutcome

Part = TypeVar("Part", bound=Hashable)


class Feedback(Generic[Part]):
    """The residual of each part of a gradient, in units of the unscaled, averaged gradient.

    If steps may be skipped it is double-buffered: a step reads the current buffer and writes the other one, which
    becomes the current one if the step is taken. No host waits for this: the outcome is a number on the device.
    """

    def __init__(self, dtype: torch.dtype, double_buffered: bool):
        self.dtype, self.double_buffered = dtype, double_buffered
        self.initial: dict[Part, Tensor] = {}  # residuals of parts that have not been laid out yet
        self._views: dict[Part, tuple[Tensor, Tensor]] = {}
        self._swapped: dict[torch.device, Tensor] = {}
        self._outcome: StepOutcome | None = None  # of the step whose residuals have been written

    def lay(self, spans: dict[Part, tuple[int, int]], buffer: Tensor) -> dict[str, Tensor]:
        """Returns flat memory for a buffer that has the parts in these spans, with the residuals that exist."""
        flat = torch.zeros(buffer.numel(), dtype=self.dtype, device=buffer.device)
        for part, (first, numel) in spans.items():
            if (before := self.of(part)) is not None:
                flat[first : first + numel].copy_(before)
        other = flat.clone() if self.double_buffered else flat
        for part, (first, numel) in spans.items():
            self._views[part] = (flat[first : first + numel], other[first : first + numel])
            self.initial.pop(part, None)
        if not self.double_buffered:
            return {"residual": flat}
        return {"residual": flat, "spare": other, "swapped": self._swapped_on(flat.device)}

    def _swapped_on(self, device: torch.device) -> Tensor:
        if device not in self._swapped:
            self._swapped[device] = torch.zeros(1, dtype=torch.uint8, device=device)
        return self._swapped[device]

    def of(self, part: Part) -> Tensor | None:
        """Returns the flat residual of a part, or None if it has none yet."""
        if (views := self._views.get(part)) is None:
            return self.initial.get(part)
        if not self.double_buffered:
            return views[0]
        return torch.where(self._swapped_on(views[0].device).bool(), views[1], views[0])

    def discard(self, parts: Iterable[Part]) -> None:
        """Forgets the residuals of these parts."""
        for part in parts:
            self._views.pop(part, None)
            self.initial.pop(part, None)

    def norms(self, parts: Iterable[Part]) -> Tensor:
        """Returns the 2-norm of the residual of each of these parts, which are laid out on one device."""
        current, other = zip(*(self._views[part] for part in parts), strict=True)
        norms = torch.stack(torch._foreach_norm(current))
        if not self.double_buffered:
            return norms
        return torch.where(self._swapped_on(norms.device).bool(), torch.stack(torch._foreach_norm(other)), norms)

    def norm(self, parts: Iterable[Part]) -> float:
        """Returns the 2-norm of the residuals of those of these parts that are laid out. Waits for the device."""
        swapped = {device: bool(flag) for device, flag in self._swapped.items()}
        laid = [views[swapped.get(views[0].device, False)] for part in parts if (views := self._views.get(part))]
        return float(get_total_norm(laid)) if laid else 0.0

    def expect(self, outcome: StepOutcome) -> None:
        """Sets the outcome that decides about the residuals written from now on, unless no step can be skipped."""
        if self.double_buffered:
            self._outcome = outcome

    def settle(self, unreached: Iterable[Part] = ()) -> None:
        """Swaps the buffers if the expected step is taken. Parts that were not reduced keep their residuals in any
        case."""
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
