"""Plans: what one rank does in an all-reduce, as data."""

from collections.abc import Sequence

from dltrain_ext._ops import Plan, Step, algorithms, make_plan
from dltrain_ext._ops import verify as _verify

__all__ = ["ALGORITHMS", "Plan", "Step", "algorithms_for", "plan", "verify", "verify_plans"]

ALGORITHMS: tuple[str, ...] = tuple(algorithms())


def plan(algorithm: str, rank: int, world_size: int) -> Plan:
    """The plan of one rank: ``.rounds`` of :class:`Step`, ``print()`` draws it, ``.to_json()`` writes it.

    Args:
        algorithm: one of ``ALGORITHMS``.
        rank: 0 to ``world_size - 1``.
        world_size: at least 1.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    return make_plan(algorithm, rank, world_size)


def algorithms_for(codec: str) -> tuple[str, ...]:
    """Those of ``ALGORITHMS`` that take a codec: who encodes more than once takes ``"raw"`` alone."""
    return tuple(name for name in ALGORITHMS if codec == "raw" or not plan(name, 0, 1).exact)


def verify(algorithm: str, world_size: int) -> None:
    """Proves, symbolically, that the plans of all ranks together are an all-reduce.

    Raises:
        ValueError: with the rule that is broken and where. R1: the sends of each round match its receives. R2: every
            final chunk counts every contribution exactly once. R3: all ranks end with the same bits. R4: nothing is
            used before it came, and each rank encodes each chunk exactly once.
    """
    verify_plans([plan(algorithm, rank, world_size) for rank in range(world_size)])


def verify_plans(plans: Sequence[Plan]) -> None:
    """:func:`verify` for plans made by hand; ``plans[r]`` is rank r's."""
    _verify(list(plans))
