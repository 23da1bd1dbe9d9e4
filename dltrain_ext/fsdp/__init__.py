"""FSDP2 (``fully_shard``) with compressed gradients, between the replicas or in the reduce-scatter to the shards."""

from dltrain_ext.fsdp.registration import register
from dltrain_ext.fsdp.state import ShardedState

__all__ = ["ShardedState", "register"]
