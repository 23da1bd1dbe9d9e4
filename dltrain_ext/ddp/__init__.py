"""The DDP comm hook: buckets are averaged by our plans, in any codec, while backward goes on."""

from dltrain_ext.ddp.hook import AllReduceState, allreduce_hook
from dltrain_ext.ddp.registration import register

__all__ = ["AllReduceState", "allreduce_hook", "register"]
