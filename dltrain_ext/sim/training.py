"""The fastest plan, a step of data-parallel training, and the bandwidth at which a codec breaks even."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dltrain_ext._arguments import check_number
from dltrain_ext.codecs import CODECS
from dltrain_ext.comm import algorithms_for
from dltrain_ext.comm.cost_model import Estimate, Network, network_of, simulate
from dltrain_ext.sim.arguments import check_seconds, check_stragglers


def best(world_size: int, nbytes: int, *, codec: str = "raw", network: Network | None = None) -> Estimate:
    """Returns the estimate of the fastest plan, in one level or, if hosts have several ranks, in one or two levels. The
    arguments are those of :func:`simulate`."""
    network = network_of(network)
    algorithms = algorithms_for(codec)
    check_number(world_size, "world_size", 2**16 + 1)
    per_host = network.ranks_per_host
    two_levels = 1 < per_host < world_size
    return min(
        (
            simulate(algorithm, world_size, nbytes, codec=codec, network=network, levels=levels)
            for algorithm in algorithms
            for levels in ((1, 2) if two_levels else (1,))
        ),
        key=lambda estimate: estimate.seconds,
    )


@dataclass(frozen=True)
class StepEstimate:
    """The estimated time of one step of data-parallel training.

    Attributes:
        seconds: time of the step in seconds, the sum of the next three.
        compute: forward, backward and optimizer on a single rank, in seconds.
        exposed: communication that does not overlap with backward, in seconds.
        straggling: mean wait for the slowest rank, in seconds.
        efficiency: throughput relative to as many ranks that do not communicate, ``compute / seconds``.
    """

    seconds: float
    compute: float
    exposed: float
    straggling: float

    @property
    def efficiency(self) -> float:
        return self.compute / self.seconds if self.seconds else 1.0


def training_step(
    world_size: int,
    buckets: Sequence[int],
    *,
    backward: float,
    other: float = 0.0,
    codec: str = "raw",
    algorithm: str | None = None,
    network: Network | None = None,
    stragglers: tuple[float, float] = (0.0, 0.0),
) -> StepEstimate:
    """Estimates a step whose gradients are all-reduced in buckets, one after another, while backward runs.

    Args:
        world_size: the number of ranks.
        buckets: the size of each bucket in bytes of fp32, in the order in which backward fills them.
        backward: duration of backward in seconds. Buckets are filled at a constant rate.
        other: duration of forward and optimizer in seconds, in which nothing is sent.
        codec, network: as for :func:`simulate`.
        algorithm: one of ``comm.ALGORITHMS``; None selects the fastest one for each bucket.
        stragglers: the probability that a rank is late for a step, and its delay in seconds.

    Returns:
        A :class:`StepEstimate`.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
    """
    if not isinstance(buckets, Sequence):
        raise TypeError(f"buckets: expected a sequence of bytes, got {buckets!r}")
    if not buckets:
        raise ValueError("buckets: expected at least one, got none")
    for nbytes in buckets:
        check_number(nbytes, "buckets", 2**48)
    check_number(world_size, "world_size", 2**16 + 1)
    check_seconds(backward=backward, other=other)
    probability, delay = check_stragglers(stragglers)

    def reduce(nbytes: int) -> float:
        if algorithm is None:
            return best(world_size, nbytes, codec=codec, network=network).seconds
        return simulate(algorithm, world_size, nbytes, codec=codec, network=network).seconds

    each = {nbytes: reduce(nbytes) if world_size > 1 else 0.0 for nbytes in set(buckets)}
    compute = backward + other
    straggling = delay * (1 - (1 - probability) ** world_size)
    exposed = exposed_seconds(buckets, [each[nbytes] for nbytes in buckets], backward)
    return StepEstimate(compute + exposed + straggling, compute, exposed, straggling)


def exposed_seconds(buckets: Sequence[int], each: Sequence[float], backward: float) -> float:
    """Returns by how many seconds the all-reduces of buckets, which take ``each``, end after backward: they run one
    after another, each when backward, at a constant rate, has filled its bucket."""
    total, full, done = sum(buckets), 0.0, 0.0
    for nbytes, seconds in zip(buckets, each, strict=True):
        full += backward * nbytes / max(total, 1)
        done = max(done, full) + seconds
    return max(0.0, done - backward)


def break_even(
    codec: str, world_size: int, nbytes: int, *, against: str = "raw", network: Network | None = None
) -> float | None:
    """Returns the bandwidth of the hosts' links, in bytes per second, below which ``codec`` is faster than ``against``,
    each with its fastest plan. It is None if ``codec`` is faster even at 1 Tbit/s, and 0 if it is slower even at 1
    Mbit/s. All other properties are those of ``network``."""
    for name, given in (("codec", codec), ("against", against)):
        if not isinstance(given, str) or given not in CODECS:
            raise ValueError(f"{name}: expected one of {', '.join(CODECS)}, got {given!r}")
    network = network_of(network)

    def wins(bandwidth: float) -> bool:
        there = replace(network, bandwidth=bandwidth)
        ours, theirs = (best(world_size, nbytes, codec=name, network=there).seconds for name in (codec, against))
        return ours < theirs

    slow, fast = 1e6 / 8, 1e12 / 8
    if wins(fast):
        return None
    if not wins(slow):
        return 0.0
    return _bisect(wins, slow, fast)


def _bisect(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Returns the bandwidth, to 1 %, at which ``holds`` changes; the bisection is logarithmic."""
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return math.sqrt(low * high)
