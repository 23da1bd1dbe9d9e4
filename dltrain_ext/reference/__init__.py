"""Defines every op in plain torch, as the reference of the tests. The precision is that of the arguments."""

from dltrain_ext.reference.clipping import sum_squares, unscale_and_clip
from dltrain_ext.reference.codecs import decode_, encode_sum_, philox
from dltrain_ext.reference.optimizers import (
    adadelta_,
    adagrad_,
    adam_,
    adamax_,
    adamw_,
    ftrl_,
    lamb_,
    lars_,
    lion_,
    nadam_,
    radam_,
    rmsprop_,
    sgd_,
    sgld_,
)

__all__ = [
    "adadelta_",
    "adagrad_",
    "adam_",
    "adamax_",
    "adamw_",
    "decode_",
    "encode_sum_",
    "ftrl_",
    "lamb_",
    "lars_",
    "lion_",
    "nadam_",
    "philox",
    "radam_",
    "rmsprop_",
    "sgd_",
    "sgld_",
    "sum_squares",
    "unscale_and_clip",
]
