"""Compares the topologies in which ranks exchange gradients: parameter servers, tree, ring, butterfly, asynchronous."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.harness import Progress
from benchmarks.simulation import Cell, Section
from dltrain_ext import sim

RANKS = (4, 16, 64, 256, 1024)
HOSTS = 16
LATE, FACTOR = 0.1, 5  # this share of a rank's steps takes this many times as long
ONE, SOME, ALL, ASYNCHRONOUS = "one server", f"up to {HOSTS} servers", "every rank serves", "asynchronous"
TOPOLOGIES = (ONE, SOME, ALL, "tree", "ring", "butterfly", ASYNCHRONOUS)


@dataclass(frozen=True)
class Group:
    """Ranks on hosts with one link each, and ``servers`` more hosts for SOME and ASYNCHRONOUS."""

    layout: str
    ranks: int
    network: sim.Network
    nbytes: int
    compute: float

    @property
    def hosts(self) -> int:
        return self.ranks // self.network.ranks_per_host

    @property
    def servers(self) -> int:
        return min(self.hosts, HOSTS)

    @property
    def levels(self) -> tuple[int, ...]:
        return (1, 2) if 1 < self.hosts < self.ranks else (1,)


def groups(network: sim.Network, largest: int, nbytes: int, compute: float) -> Iterator[Group]:
    for layout in (f"up to {HOSTS}", "one per rank"):
        for ranks in RANKS:
            if ranks <= largest:
                per_host = max(1, ranks // HOSTS) if layout != "one per rank" else 1
                yield Group(layout, ranks, replace(network, ranks_per_host=per_host), nbytes, compute)


def exchange(topology: str, group: Group, levels: int) -> float:
    """Return the seconds in which all ranks have exchanged their gradients, if they begin together."""
    options = {"network": group.network, "levels": levels}
    if topology in (ONE, SOME, ALL):
        servers = {ONE: 1, SOME: group.servers, ALL: None}[topology]
        return sim.parameter_server(group.ranks, group.nbytes, servers=servers, **options).seconds
    return sim.simulate(topology, group.ranks, group.nbytes, **options).seconds


def late(ranks: int) -> float:
    """Return the probability that at least one of the ranks is late."""
    return 1 - (1 - LATE) ** ranks


def synchronous(topology: str, group: Group) -> tuple[float, float]:
    """Return the seconds of an exchange and of a step."""
    seconds = min(exchange(topology, group, levels) for levels in group.levels)
    return seconds, group.compute * (1 + (FACTOR - 1) * late(group.ranks)) + seconds


def asynchronous(group: Group) -> tuple[float, float]:
    """Return the seconds of an exchange if no other worker has one at that time, and those of a step."""
    return min((_asynchronous(group, levels) for levels in group.levels), key=lambda times: times[1])


def _asynchronous(group: Group, levels: int) -> tuple[float, float]:
    """In two levels the workers are the hosts, whose ranks wait for each other."""
    workers, each = (group.hosts, group.network.ranks_per_host) if levels == 2 else (group.ranks, 1)
    network = replace(group.network, ranks_per_host=1) if levels == 2 else group.network
    alone, together = (
        sim.parameter_server(count, group.nbytes, servers=group.servers, network=network).seconds
        for count in (1, workers)
    )
    serving = together / workers
    inside = exchange(SOME, group, 2) - together if levels == 2 else 0.0
    step = sim.bounded_staleness(
        workers,
        staleness=None,
        compute=group.compute,
        stragglers=(late(each), (FACTOR - 1) * group.compute),
        exchange=inside + max(0.0, alone - serving),
        serving=serving,
    )
    return inside + alone, step.seconds


def compare(network: sim.Network, largest: int, nbytes: int, compute: float, progress: Progress) -> Section:
    rows: list[dict[str, Cell]] = []
    for group in groups(network, largest, nbytes, compute):
        progress(f"topologies, {group.ranks} ranks", group.ranks / largest)
        for topology in TOPOLOGIES:
            times = asynchronous(group) if topology == ASYNCHRONOUS else synchronous(topology, group)
            rows += [
                {"hosts": group.layout, "what": what, "topology": topology, "ranks": group.ranks, "ms": 1e3 * seconds}
                for what, seconds in zip(("exchange", "step"), times, strict=True)
            ]
    rows.sort(key=lambda row: (row["hosts"] == "one per rank", row["what"] == "step"))
    return Section(rows, by=["hosts", "what", "topology"], across="ranks", value="ms")
