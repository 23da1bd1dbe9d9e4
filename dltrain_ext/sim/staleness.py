"""Synchronous, bounded and asynchronous steps with a parameter server."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from dltrain_ext._arguments import check_number
from dltrain_ext.sim.arguments import check_seconds, check_stragglers


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
    probability, delay = check_stragglers(stragglers)
    check_seconds(exchange=exchange, serving=serving)
    each = [compute] * world_size if isinstance(compute, int | float) else compute
    if not isinstance(each, Sequence) or len(each) != world_size:
        raise TypeError(f"compute: expected seconds, or one number for each of {world_size} workers, got {compute!r}")
    for seconds in each:
        check_seconds(compute=seconds)
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
