"""A parameter server: a sharded key-value store with clocks, and optimizers whose update runs on its servers."""

from dltrain_ext.ps.optimizer import Optimizer
from dltrain_ext.ps.replaying import Record, replay
from dltrain_ext.ps.server import serve
from dltrain_ext.ps.store import Store
from dltrain_ext.ps.work import Versions, Work

__all__ = ["Optimizer", "Record", "Store", "Versions", "Work", "replay", "serve"]
