"""Statistics of the buckets of a backward pass."""

import math
from typing import Any

from torch import Tensor

from dltrain_ext.compress.feedback import Feedback
from dltrain_ext.ddp.buckets import Bucket, square_sum


def stats_of(buckets: list[Bucket], feedback: Feedback[Tensor] | None, scale: float) -> dict[str, Any]:
    """Returns ``ratio``, ``hidden`` and ``per_bucket`` of AllReduceState.stats. Waits for the device."""
    per_bucket = [_stats_of(bucket, feedback, scale) for bucket in buckets]
    busy = [stats["busy"] for stats in per_bucket]
    hidden = None
    if busy and None not in busy and (total := math.fsum(busy)) > 0:
        hidden = max(0.0, 1 - per_bucket[-1]["late"] / total)
    sent = sum(bucket.layout.message_bytes for bucket in buckets)
    numel = sum(p.numel() for bucket in buckets for p in bucket.parameters)
    return {"ratio": 4 * numel / sent if sent else None, "hidden": hidden, "per_bucket": per_bucket}


def _stats_of(bucket: Bucket, feedback: Feedback[Tensor] | None, scale: float) -> dict[str, Any]:
    layout = bucket.layout
    stats = layout.handle.stats()
    calls = int(stats["calls"])
    on_cpu = bucket.parameters[0].device.type == "cpu"
    times = {
        name: stats[name] / calls if calls and on_cpu else None
        for name in ("queued", "encoding", "sending", "waiting", "busy", "late")
    }
    error = None
    if layout.has_feedback and feedback is not None:
        lost = _square_norm([feedback.of(p) for p in bucket.parameters])
        gradients = [p.grad for p in bucket.parameters]
        total = _square_norm(gradients) if layout.squares is None else float(layout.squares.sum())
        error = math.sqrt(lost / total) * scale if total > 0 else None
    return {
        "numel": layout.numel,
        "wire_bytes": int(stats["wire_bytes"]),
        "ratio": 4 * sum(p.numel() for p in bucket.parameters) / layout.message_bytes,
        "codec_error": error,
        **times,
    }


def _square_norm(tensors: list[Tensor | None]) -> float:
    return math.fsum(float(square_sum(tensor)) for tensor in tensors if tensor is not None)
