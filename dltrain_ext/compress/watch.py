"""Notes on the device, without waiting for it, which gradient was the first one that was not finite, and which feedback
the first one that grew."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

LIMIT = 10.0


class Finding(NamedTuple):
    """What was found first on a rank, by a state that was made with ``watch=True``.

    Attributes:
        kind: ``"overflow"``: this rank's own gradient of the parameter was not finite, before it was averaged.
            ``"feedback"``: the residual of the parameter had a 2-norm of more than ten times the largest one that this
            rank's contributions to the average had so far.
        step: the number of the backward pass, as ``steps`` counts them.
        parameter: its name.
        rank: the global rank.
        value: of an overflow the norm of the gradient, which is inf or NaN; of feedback the two norms' ratio.
    """

    kind: str
    step: int
    parameter: str
    rank: int
    value: float


class Watch:
    """Looks at this rank's contributions before they are averaged."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._firsts: dict[
            tuple[str, ...], int
        ] = {}  # the number of the first of the names that are looked at together
        self._largest: dict[tuple[str, ...], Tensor] = {}  # norms of their contributions so far
        self._found: dict[tuple[str, torch.device], Tensor] = {}  # step, number of the name, value; step 0: nothing

    def look(
        self,
        names: tuple[str, ...],
        gradients: Sequence[Tensor],
        residuals: Tensor | None,
        step: int,
        share: Tensor | float,
    ) -> None:
        """Is called before each reduction.

        Args:
            residuals: the norms of the residuals, if there is feedback.
            step: the number of the backward pass, at least 1.
            share: the factor of the gradients in the average, in the units of the residuals.
        """
        if names not in self._firsts:
            self._firsts[names] = len(self._names)
            self._names += names
        first = self._firsts[names]
        norms = torch.stack(torch._foreach_norm(list(gradients))).double()
        self._note("overflow", ~norms.isfinite(), norms, first, step)
        if residuals is None:
            return
        own = torch.nan_to_num(norms * share, 0.0, 0.0, 0.0)
        largest = self._largest.get(names)
        if largest is not None:
            ratios = residuals.double() / largest
            self._note("feedback", (ratios > LIMIT) & (largest > 0), ratios, first, step)
        self._largest[names] = own if largest is None else torch.maximum(largest, own)

    def _note(self, kind: str, are_meant: Tensor, values: Tensor, first: int, step: int) -> None:
        before = self._found.get((kind, values.device))
        if before is None:
            before = torch.zeros(3, dtype=torch.float64, device=values.device)
        index = are_meant.byte().argmax()
        now = torch.stack([torch.full_like(before[0], step), index + first, values[index]])
        self._found[kind, values.device] = torch.where(are_meant.any() & (before[0] == 0), now, before)

    def findings(self, group: dist.ProcessGroup | None) -> list[Finding]:
        """Returns of each kind those of the earliest step since the previous call, of all ranks of a group, and forgets
        them. This is a collective call, and waits for the device."""
        own: dict[str, Finding] = {}
        for (kind, _), found in self._found.items():
            step, number, value = found.tolist()
            if step and (kind not in own or step < own[kind].step):
                own[kind] = Finding(kind, int(step), self._names[int(number)], dist.get_rank(), value)
        self._found.clear()
        ranks: list[dict[str, Finding]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(ranks, own, group=group)
        findings = [finding for each in ranks for finding in each.values()]
        earliest = {kind: min(f.step for f in findings if f.kind == kind) for kind in {f.kind for f in findings}}
        return sorted(finding for finding in findings if finding.step == earliest[finding.kind])
