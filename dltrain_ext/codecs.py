"""Codecs: what the messages of an all-reduce carry.

``CODECS`` lists their names. ``raw`` sends fp32 partial sums and loses nothing.
"""

from dltrain_ext import _ops

CODECS: tuple[str, ...] = tuple(_ops.codecs())

__all__ = ["CODECS"]
