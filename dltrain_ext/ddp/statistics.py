"""Statistics of the buckets of a backward pass."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils import get_total_norm

from dltrain_ext import _ops
from dltrain_ext.compress.feedback import Feedback
from dltrain_ext.ddp.buckets import Bucket

TIMES = ("queued", "encoding", "sending", "waiting", "busy", "late")
Counted = dict[str, float]  # of a bucket: calls, bytes, and seconds


def stats_of(buckets: Sequence[Bucket], feedback: Feedback[Tensor] | None, scale: float) -> dict[str, Any]:
    """Returns ``ratio``, ``hidden`` and ``per_bucket`` of AllReduceState.stats. Waits for the device."""
    per_bucket = [_stats_of(bucket, feedback, scale) for bucket in buckets]
    hidden = _hidden([{name: bucket[name] or 0.0 for name in TIMES} for bucket in per_bucket])
    return {"ratio": ratio_of(buckets), "hidden": hidden, "per_bucket": per_bucket}


def ratio_of(buckets: Sequence[Bucket]) -> float | None:
    """Returns the size of fp32 messages over that of the messages of these buckets."""
    sent = sum(bucket.layout.message_bytes for bucket in buckets)
    return 4 * sum(p.numel() for bucket in buckets for p in bucket.parameters) / sent if sent else None


def _stats_of(bucket: Bucket, feedback: Feedback[Tensor] | None, scale: float) -> dict[str, Any]:
    stats = bucket.layout.handle.stats()
    times = _times(stats) if bucket.is_timed else dict.fromkeys(TIMES)
    lost, total = residual_norm([bucket], feedback), gradient_norm([bucket])
    return {
        "numel": bucket.layout.numel,
        "codec": bucket.codec,
        "wire_bytes": int(stats["wire_bytes"]),
        "ratio": ratio_of([bucket]),
        "codec_error": lost / total * scale if lost is not None and total > 0 else None,
        **times,
    }


def _times(counted: Counted) -> dict[str, float | None]:
    """Returns seconds per pass."""
    calls = counted["calls"]
    return {name: counted[name] / calls if calls else None for name in TIMES}


def _hidden(per_bucket: Sequence[dict[str, float]]) -> float | None:
    total = math.fsum(times["busy"] for times in per_bucket)
    return max(0.0, 1 - per_bucket[-1]["late"] / total) if total > 0 else None


def residual_norm(buckets: Sequence[Bucket], feedback: Feedback[Tensor] | None) -> float | None:
    """Returns the 2-norm of the residuals; None without feedback."""
    parts = [p for bucket in buckets if bucket.layout.has_feedback for p in bucket.parameters]
    return feedback.norm(parts) if feedback is not None and parts else None


def gradient_norm(buckets: Sequence[Bucket]) -> float:
    """Returns the 2-norm of the averaged gradients, which are 0 if they have been cleared."""
    norms = [0.0]
    for bucket in buckets:
        if bucket.layout.squares is not None:
            norms.append(math.sqrt(float(bucket.layout.squares.sum())))
        elif gradients := [p.grad for p in bucket.parameters if p.grad is not None]:
            norms.append(float(get_total_norm(gradients)))
    return math.hypot(*norms)


class Passes:
    """What the passes since the previous look have taken."""

    def __init__(self) -> None:
        self._before: dict[_ops.BucketState, Counted] = {}

    def metrics(self, buckets: Sequence[Bucket]) -> dict[str, float]:
        """Returns ``ddp/hidden``, and seconds per pass: ``ddp/waiting`` for peers, in all buckets together, and
        ``ddp/exposed``, which the last bucket takes after it is ready."""
        buckets = [bucket for bucket in buckets if bucket.is_timed]
        now = {bucket.layout.handle: bucket.layout.handle.stats() for bucket in buckets}
        since = []
        for handle, counted in now.items():
            before = self._before.get(handle, dict.fromkeys(counted, 0.0))
            since.append(_times({name: number - before[name] for name, number in counted.items()}))
        self._before = now
        known = [{name: seconds for name, seconds in times.items() if seconds is not None} for times in since]
        known = [times for times in known if times]
        if not known:
            return {}
        found = {"ddp/waiting": math.fsum(times["waiting"] for times in known), "ddp/exposed": known[-1]["late"]}
        if (hidden := _hidden(known)) is not None:
            found["ddp/hidden"] = hidden
        return found
