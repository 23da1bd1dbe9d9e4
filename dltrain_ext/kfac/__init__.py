"""K-FAC: preconditions gradients by Kronecker factors of the Fisher matrix, whose inverses are shared out to ranks."""

from dltrain_ext.kfac.preconditioner import KFAC

__all__ = ["KFAC"]
