"""What a state of the hook tells of its passes: statistics, metrics and findings."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dltrain_ext.comm import Communicator
from dltrain_ext.compress.feedback import Feedback
from dltrain_ext.compress.layout import Layout
from dltrain_ext.compress.scaling import loss_scale_of
from dltrain_ext.compress.watch import Finding, Watch
from dltrain_ext.ddp.buckets import Buckets
from dltrain_ext.ddp.budget import Budget
from dltrain_ext.ddp.selection import Reduction
from dltrain_ext.ddp.statistics import Passes, gradient_norm, ratio_of, residual_norm, stats_of


class Reports:
    """The base of the states, which set these attributes."""

    communicator: Communicator
    choice: Reduction
    scaler: torch.amp.GradScaler | None
    steps: int
    _group: dist.ProcessGroup
    _world_size: int
    _names: dict[Tensor, str]
    _buckets: Buckets
    _feedback: Feedback[Tensor] | None
    _passes: Passes
    _watch: Watch | None
    _budget: Budget | None

    def stats(self) -> dict[str, Any]:
        """Returns what has been sent and how long it took. Waits for the device.

        Returns:
            A dict with the number of ``buckets`` that were averaged; ``wire_bytes`` and ``inside_bytes``, which this
            rank has sent, as its communicator counts them; ``steps``, the number of backward passes; the entries of
            ``choice``; ``ratio``, the size of fp32 messages over that of the latest pass's messages; ``hidden``, the
            fraction of the communication time that overlaps with backward, where the rest is from the time when the
            last bucket is ready until it has been reduced; and ``per_bucket``, a list with an entry for each bucket
            since it was laid out. An entry has ``numel``, ``codec``, ``wire_bytes`` and ``ratio``; ``codec_error``,
            the 2-norm of this rank's residual over that of the averaged gradient; and seconds per pass: ``queued``
            behind other buckets; ``busy``, which includes ``encoding`` (and decoding), ``sending`` and ``waiting`` for
            peers; and ``late``, from when the bucket was ready until it was reduced. Unknown values are None: errors
            without feedback, and times on CUDA, where calls only enqueue (``torch.profiler`` shows them).
        """
        counted = self.communicator.stats()
        self._buckets.settle_after_backward()
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        calls = counted.pop("calls") - (0 if self._budget is None else self._budget.calls)
        return {
            "buckets": calls,
            **counted,
            "steps": self.steps,
            **self.choice.to_dict(),
            **stats_of(self._buckets.reduced, self._feedback, scale),
        }

    def metrics(self, *, errors: bool = True) -> dict[str, float]:
        """Returns numbers for a logger, a flat dict: those of ``communicator.metrics()``, ``ddp/steps`` and what else
        is known. Waits for the device.

        Args:
            errors: whether ``ddp/residual_norm`` and ``ddp/codec_error`` are computed, for which the residuals are
                read once and, without a scaler, the gradients.

        Returns:
            ``ddp/ratio``, the size of fp32 messages over that of the latest pass's messages; ``ddp/residual_norm``, the
            2-norm of this rank's residuals in units of the unscaled, averaged gradient; ``ddp/codec_error``, the same
            over the norm of the averaged gradients; and of the passes since the previous call ``ddp/hidden``, as in
            :meth:`stats`, and seconds per pass: ``ddp/waiting``, during which this rank has waited for peers, and
            ``ddp/exposed``, from when the last bucket is ready until it has been reduced. With ``max_error`` also
            ``ddp/budget_error``, the largest error of a bucket when it was measured in its codec, and for each codec,
            as ``ddp/share_int8``, the part of the elements whose codec it is; ``native`` is the backend's all-reduce.
            :func:`dltrain_ext.monitor.over_ranks` says of these who is late.
        """
        self._buckets.settle_after_backward()
        buckets = self._buckets.reduced
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        found = {
            **self.communicator.metrics(),
            "ddp/steps": float(self.steps),
            **self._passes.metrics(buckets),
        }
        if (ratio := ratio_of(buckets)) is not None:
            found["ddp/ratio"] = ratio
        if self._budget is not None:
            found |= self._budget.metrics()
        if errors and (lost := residual_norm(buckets, self._feedback)) is not None:
            found["ddp/residual_norm"] = lost
            if (total := gradient_norm(buckets)) > 0:
                found["ddp/codec_error"] = lost / total * scale
        return found

    def _look(self, watch: Watch, layout: Layout[Tensor], bucket: dist.GradBucket) -> None:
        parameters, share = bucket.parameters(), 1.0 / self._world_size
        scale = loss_scale_of(self.scaler, bucket.buffer().device)
        names = (self._names.get(p, f"a parameter of shape {list(p.shape)}") for p in parameters)
        watch.look(
            tuple(names),
            bucket.gradients(),
            self._feedback.norms(parameters) if layout.has_feedback and self._feedback is not None else None,
            self.steps,
            share if scale is None else share / scale,
        )

    def findings(self) -> list[Finding]:
        """Returns what went wrong first since the previous call, by the name of the parameter, the rank and the step: a
        gradient that was not finite before it was averaged, or feedback that grows. This is a collective call of a
        state with ``watch=True``, and waits for the device.

        Returns:
            :class:`dltrain_ext.monitor.Finding` objects: of each kind those of the earliest step, of all ranks that
            have some. In a step a rank finds the parameter that backward reached first, up to the order in a bucket.

        Raises:
            RuntimeError: the state was made without ``watch=True``.
        """
        if self._watch is None:
            raise RuntimeError("findings: expected a state with watch=True")
        return self._watch.findings(self._group)
