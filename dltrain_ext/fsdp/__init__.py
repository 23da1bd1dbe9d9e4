"""FSDP2 (``fully_shard``): gradients compressed on their way across the replicas, or on their way to the shards."""

from dltrain_ext.fsdp.registration import register
from dltrain_ext.fsdp.state import ShardedState

__all__ = ["ShardedState", "register"]
