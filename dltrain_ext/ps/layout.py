"""Which server has which elements of which key."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

LARGEST = 1 << 17  # elements of a block: one block is sent while another one is encoded
_ALIGNMENT = 16  # elements
_UNIT = 512  # elements: tensors are cut at multiples of it, so that the blocks of codecs are those of the whole tensor


class Key(NamedTuple):
    """A tensor of the store, by its name; ``group`` is the number of its options."""

    name: str
    shape: tuple[int, ...]
    group: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


class Block(NamedTuple):
    """Elements ``first`` to ``first + numel`` of the key with this number, in memory order. A server has all of it."""

    key: int
    first: int
    numel: int
    server: int


def first_blocks(blocks: Sequence[Block]) -> list[int]:
    """Returns the number of the first block of each message in which these blocks of one server are pushed."""
    firsts: list[int] = []
    numel = 0
    for number, block in enumerate(blocks):
        more = -(-block.numel // _ALIGNMENT) * _ALIGNMENT
        if not firsts or numel + more > LARGEST:
            firsts.append(number)
            numel = 0
        numel += more
    return firsts


def lay_out(keys: Sequence[Key], servers: int, whole: Sequence[bool]) -> list[Block]:
    """Returns the blocks of all keys, in their order, so that each server has about as many elements.

    whole: for each group, whether its keys are not divided, because a step needs their norms.
    """
    total = sum(key.numel for key in keys)
    largest = min(LARGEST, -(-total // (servers * _UNIT)) * _UNIT)
    pieces: list[tuple[int, int, int]] = []
    for number, key in enumerate(keys):
        step = key.numel if whole[key.group] else max(largest, _UNIT)
        pieces += [(number, first, min(step, key.numel - first)) for first in range(0, key.numel, max(step, 1))]
    # Neighbouring pieces have the same server: the one in whose part of all elements their middle is.
    blocks, done = [], 0
    for number, first, numel in pieces:
        blocks.append(Block(number, first, numel, (2 * done + numel) * servers // (2 * total)))
        done += numel
    return blocks
