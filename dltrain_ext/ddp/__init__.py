"""The DDP comm hook averages gradient buckets by plans, in any codec, while backward runs."""

from dltrain_ext.ddp.hook import AllReduceState, allreduce_hook
from dltrain_ext.ddp.registration import register
from dltrain_ext.ddp.sharded import ShardedOptimizerState

__all__ = ["AllReduceState", "ShardedOptimizerState", "allreduce_hook", "register"]
