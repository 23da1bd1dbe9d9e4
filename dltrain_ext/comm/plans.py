"""Plans say what one rank does in a collective, as data."""

from collections.abc import Sequence

from dltrain_ext._arguments import check_number
from dltrain_ext._ops import Plan, Step, algorithms, collectives, make_plan
from dltrain_ext._ops import verify as _verify
from dltrain_ext.codecs import CODECS

__all__ = ["ALGORITHMS", "COLLECTIVES", "Plan", "Step", "algorithms_for", "plan", "verify", "verify_plans"]

COLLECTIVES: dict[str, tuple[str, ...]] = {name: tuple(algorithms(name)) for name in collectives()}
"""The algorithms of each collective."""

ALGORITHMS: tuple[str, ...] = COLLECTIVES["all_reduce"]


def plan(algorithm: str, rank: int, world_size: int, *, collective: str = "all_reduce", root: int = 0) -> Plan:
    """Returns the plan of one rank: ``.rounds`` of :class:`Step`. ``print()`` draws it, and ``.to_json()`` returns it
    as text.

    Args:
        algorithm: one of ``COLLECTIVES[collective]``.
        rank: 0 to ``world_size - 1``.
        world_size: the number of ranks, at least 1.
        collective: ``"all_reduce"``, ``"reduce_scatter"``, ``"all_gather"``, ``"broadcast"`` or ``"reduce"``.
        root: the rank that has the tensor of a broadcast, or that gets the sum of a reduce.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
    """
    if not isinstance(collective, str) or collective not in COLLECTIVES:
        raise ValueError(f"collective: expected one of {', '.join(COLLECTIVES)}, got {collective!r}")
    if not isinstance(algorithm, str) or not algorithm.isprintable():
        raise TypeError(f"algorithm: expected one of {', '.join(COLLECTIVES[collective])}, got {algorithm!r}")
    check_number(world_size, "world_size", 2**31)
    check_number(rank, "rank", max(world_size, 1))
    check_number(root, "root", max(world_size, 1))
    return make_plan(collective, algorithm, rank, world_size, root)


def algorithms_for(codec: str) -> tuple[str, ...]:
    """Returns those of ``ALGORITHMS`` that accept a codec: plans that encode more than once accept only ``"raw"``."""
    if not isinstance(codec, str) or codec not in CODECS:
        raise ValueError(f"codec: expected one of {', '.join(CODECS)}, got {codec!r}")
    return tuple(name for name in ALGORITHMS if codec == "raw" or not plan(name, 0, 1).exact)


def verify(algorithm: str, world_size: int, *, collective: str = "all_reduce", root: int = 0) -> None:
    """Proves symbolically that the plans of all ranks together perform the collective, for up to 2048 ranks.

    Raises:
        ValueError: a rule is broken; the message says which one and where. R1: the sends of each round match its
            receives. R2: every final chunk contains each contribution that there is exactly once. R3: all ranks that
            are to have a chunk end with the same bits. R4: nothing is used before it has arrived, and each rank encodes
            each chunk of which it has a part exactly once, unless the sum stays on that rank.
    """
    check_number(world_size, "world_size", 2048 + 1)
    if world_size == 0:
        raise ValueError("world_size: expected at least 1, got 0")
    verify_plans([plan(algorithm, r, world_size, collective=collective, root=root) for r in range(world_size)])


def verify_plans(plans: Sequence[Plan]) -> None:
    """Does what :func:`verify` does for plans made by hand; ``plans[r]`` is that of rank r."""
    if not isinstance(plans, Sequence) or not all(isinstance(each, Plan) for each in plans):
        raise TypeError(f"plans: expected a sequence of Plan, got {plans!r}")
    _verify(list(plans))
