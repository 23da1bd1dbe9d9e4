"""Training over slow links: sites take many steps on their own, then average what they have moved."""

from dltrain_ext.local_sgd.diloco import DiLoCo, LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]
