"""Gives all sites what all should have after the last outer step."""

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

from torch.optim import Optimizer

from dltrain_ext.local_sgd.fragments import Fragment
from dltrain_ext.local_sgd.link import Link


class Standing(NamedTuple):
    """Where a site is.

    Attributes:
        outer_steps: that it has taken.
        due_in: the steps of its inner optimizer until the next average.
    """

    outer_steps: int
    due_in: int


def hashed(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


def digest(fragments: Sequence[Fragment], outer_steps: int) -> int:
    """Returns a number, not 0, in which sites agree if they have taken the same outer steps of these fragments."""
    sums = [fragment.digest() for fragment in fragments]
    return hashed(struct.pack(f"<{len(sums) + 1}q", outer_steps, *sums)) | 1


def equalize(link: Link, fragments: Sequence[Fragment], inner: Optimizer) -> None:
    """Gives all sites the parameters of the first one, if they differ."""
    if not link.agree(digest(fragments, 0)):
        for fragment in fragments:
            link.give(fragment.backup, 0)
            fragment.restore(inner)


def catch_up(
    link: Link, fragments: Sequence[Fragment], inner: Optimizer, own: Standing, has_state: bool
) -> tuple[Standing, list[int]]:
    """Gives what the last outer steps have made to the sites that do not have it. If no site has a state, all get the
    parameters of the first one.

    Args:
        own: where this site is.
        has_state: whether it has taken outer steps with the others.

    Returns:
        Where the site is that is furthest, or this one if it has taken nothing from that; and the indices of the
        fragments that this site has taken.
    """
    several = len(fragments)
    steps = own.outer_steps if has_state else -several  # so that it lacks all fragments
    counts, dues = link.gather(steps), link.gather(own.due_in)
    most = max(counts)
    if most < 0:
        equalize(link, fragments, inner)
        return own, []
    source, taken = counts.index(most), []
    for behind in range(min(most - min(counts), several)):
        index = (most - 1 - behind) % several
        fragment = fragments[index]
        for flat in (fragment.backup, fragment.momentum):
            if flat is not None:
                link.give(flat, source)
        if behind < most - steps:
            fragment.restore(inner)
            taken.append(index)
            if not has_state:
                fragment.forget()
    return Standing(most, dues[source]) if taken else own, taken
