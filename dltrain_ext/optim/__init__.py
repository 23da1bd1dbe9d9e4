"""Optimizers with torch.optim's manners whose step is one pass over memory."""

from dltrain_ext.optim.adamw import AdamW

__all__ = ["AdamW"]
