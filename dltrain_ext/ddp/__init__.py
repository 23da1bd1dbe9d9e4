"""The DDP comm hook averages gradient buckets by plans, in any codec, while backward runs."""

from dltrain_ext.ddp.hook import AllReduceState, allreduce_hook
from dltrain_ext.ddp.registration import register

__all__ = ["AllReduceState", "allreduce_hook", "register"]
