"""Estimates the time of all-reduces, parameter servers and training steps on a modelled network, by plan and codec."""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from dltrain_ext._arguments import check_number
from dltrain_ext.codecs import CODECS
from dltrain_ext.comm import algorithms_for
from dltrain_ext.comm.cost_model import Estimate, Network, Speed, network_of, parameter_server, simulate

__all__ = [
    "Estimate",
    "Network",
    "Speed",
    "StalenessEstimate",
    "StepEstimate",
    "best",
    "bounded_staleness",
    "break_even",
    "parameter_server",
    "simulate",
    "training_step",
]


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
    _check_seconds(backward=backward, other=other)
    probability, delay = _check_stragglers(stragglers)

    def reduce(nbytes: int) -> float:
        if algorithm is None:
            return best(world_size, nbytes, codec=codec, network=network).seconds
        return simulate(algorithm, world_size, nbytes, codec=codec, network=network).seconds

    each = {nbytes: reduce(nbytes) if world_size > 1 else 0.0 for nbytes in set(buckets)}
    total, full, done = sum(buckets), 0.0, 0.0
    for nbytes in buckets:
        full += backward * nbytes / max(total, 1)
        done = max(done, full) + each[nbytes]
    compute = backward + other
    straggling = delay * (1 - (1 - probability) ** world_size)
    exposed = max(0.0, done - backward)
    return StepEstimate(compute + exposed + straggling, compute, exposed, straggling)


@dataclass(frozen=True)
class StalenessEstimate:
    """The estimated progress of workers that may be some steps apart.

    Attributes:
        seconds: time of a step of a worker in seconds, the mean over all workers.
        waiting: the share of a worker's time in which it waits for others until it may read.
        reads: the share of the reads of each staleness from 0 on. It is the number of steps by which the slowest worker
            is behind the reader. If it is not bounded, it grows with ``pushes``.
    """

    seconds: float
    waiting: float
    reads: tuple[float, ...]


def bounded_staleness(
    world_size: int,
    *,
    staleness: int | None,
    compute: float | Sequence[float],
    stragglers: tuple[float, float] = (0.0, 0.0),
    exchange: float = 0.0,
    serving: float = 0.0,
    pushes: int = 100_000,
    seed: int = 0,
) -> StalenessEstimate:
    """Estimates steps of synchronous, bounded (SSP) and asynchronous SGD with a parameter server.

    A worker reads the parameters, computes a gradient, pushes it, and reads again. After ``c`` pushes it may read if
    every worker has made at least ``c - staleness`` (Ho et al., NIPS 2013). A bound hides stragglers that change from
    step to step; a worker that is always slow sets the pace at any bound.

    Args:
        world_size: the number of workers.
        staleness: 0 is synchronous, and None is asynchronous.
        compute: seconds in which a worker computes a gradient; or a sequence, with one number for each worker.
        stragglers: the probability that a worker is late for a step, and its delay in seconds.
        exchange: seconds of a read and of the push after it, except ``serving``.
        serving: seconds for which a push occupies the servers, which serve one push after another.
        pushes: the number of pushes to simulate, of all workers together; at most 10 million, which take a minute.
        seed: selects the steps in which workers are late. They do not depend on ``staleness``.

    Returns:
        A :class:`StalenessEstimate`.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
    """
    for name, number, bound in (("world_size", world_size, 2**16 + 1), ("pushes", pushes, 10**7 + 1)):
        check_number(number, name, bound)
        if number == 0:
            raise ValueError(f"{name}: expected at least 1, got 0")
    if staleness is not None:
        check_number(staleness, "staleness", 2**31)
    check_number(seed, "seed", 2**64)
    probability, delay = _check_stragglers(stragglers)
    _check_seconds(exchange=exchange, serving=serving)
    each = [compute] * world_size if isinstance(compute, int | float) else compute
    if not isinstance(each, Sequence) or len(each) != world_size:
        raise TypeError(f"compute: expected seconds, or one number for each of {world_size} workers, got {compute!r}")
    for seconds in each:
        _check_seconds(compute=seconds)
    if not all(each):
        raise ValueError(f"compute: expected more than 0 s, got {compute!r}")

    random = [Random(f"{seed}, {worker}") for worker in range(world_size)]
    clocks = [0] * world_size  # the number of pushes of each worker
    workers_at = Counter({0: world_size})  # by clock
    slowest = made = 0
    free = waited = now = 0.0
    arrivals: list[tuple[float, int]] = []
    applied: list[tuple[float, int]] = []
    reads: Counter[int] = Counter()
    waiting: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)  # workers, and since when, by clock

    def read(worker: int) -> None:
        reads[clocks[worker] - slowest] += 1
        late = delay if random[worker].random() < probability else 0.0
        heapq.heappush(arrivals, (now + exchange + each[worker] + late, worker))

    for worker in range(world_size):
        read(worker)
    while made < pushes:
        # Pushes queue in the order of their arrival; those that are applied at the same time all count for the reads.
        while arrivals and (not applied or arrivals[0][0] <= applied[0][0]):
            arrival, worker = heapq.heappop(arrivals)
            free = max(free, arrival) + serving
            heapq.heappush(applied, (free, worker))
        now = applied[0][0]
        done = []
        while applied and applied[0][0] == now:
            done.append(heapq.heappop(applied)[1])
        made += len(done)
        for worker in done:
            workers_at[clocks[worker]] -= 1
            clocks[worker] += 1
            workers_at[clocks[worker]] += 1
            waiting[clocks[worker]].append((worker, now))
        while not workers_at[slowest]:
            del workers_at[slowest]
            slowest += 1
        for clock in [clock for clock in waiting if staleness is None or clock <= slowest + staleness]:
            for worker, since in waiting.pop(clock):
                waited += now - since
                read(worker)
    return StalenessEstimate(
        seconds=now * world_size / made,
        waiting=waited / (now * world_size),
        reads=tuple(reads[lag] / reads.total() for lag in range(max(reads) + 1)),
    )


def _check_seconds(**given: float) -> None:
    for name, seconds in given.items():
        if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise ValueError(f"{name}: expected at least 0 s, got {seconds!r}")


def _check_stragglers(stragglers: tuple[float, float]) -> tuple[float, float]:
    if not isinstance(stragglers, tuple) or [isinstance(x, int | float) for x in stragglers] != [True, True]:
        raise TypeError(f"stragglers: expected a probability and seconds, got {stragglers!r}")
    probability, delay = stragglers
    if not (0 <= probability <= 1 and 0 <= delay < math.inf):
        raise ValueError(f"stragglers: expected a probability and seconds, got {stragglers!r}")
    return probability, delay


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
