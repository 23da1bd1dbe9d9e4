"""Muon: its iterations on Gram matrices, and how ranks share them."""

from dltrain_ext.optim.muon.optimizer import Muon

__all__ = ["Muon"]
