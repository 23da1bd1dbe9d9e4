"""Optimizers with the interface and behaviour of torch.optim, whose step is one pass over memory; and Muon."""

from dltrain_ext.optim.adadelta import Adadelta
from dltrain_ext.optim.adagrad import Adagrad
from dltrain_ext.optim.adam import Adam
from dltrain_ext.optim.adamax import Adamax
from dltrain_ext.optim.adamw import AdamW
from dltrain_ext.optim.ftrl import FTRL
from dltrain_ext.optim.lamb import LAMB
from dltrain_ext.optim.lars import LARS
from dltrain_ext.optim.lion import Lion
from dltrain_ext.optim.muon import Muon
from dltrain_ext.optim.nadam import NAdam
from dltrain_ext.optim.radam import RAdam
from dltrain_ext.optim.rmsprop import RMSprop
from dltrain_ext.optim.sgd import SGD
from dltrain_ext.optim.sgld import SGLD

__all__ = [
    "FTRL",
    "LAMB",
    "LARS",
    "SGD",
    "SGLD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Lion",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
]
