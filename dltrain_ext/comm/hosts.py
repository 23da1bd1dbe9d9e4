"""Which ranks share a host, and what each stands for where all-reduces go in two levels."""

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple


class Layout(NamedTuple):
    """Of two levels, as one member of the group sees it.

    Attributes:
        neighbours: the members on its host.
        counterparts: those that stand for the same share of each host; itself alone where it has no share.
        hosts: how many there are.
        shares: of each host: as many as the smallest has members. The first members have one each.
        largest: how many members are on the largest host.
    """

    neighbours: list[int]
    counterparts: list[int]
    hosts: int
    shares: int
    largest: int


def layout(hosts: Sequence[str], rank: int, ranks_per_host: int | None) -> Layout | None:
    """None for one level: where there is one host, or one member on each.

    hosts: where each member is.
    """
    if ranks_per_host is not None:
        if len(hosts) % ranks_per_host:
            raise ValueError(
                f"ranks_per_host: expected a divisor of the group's size, {len(hosts)}, got {ranks_per_host}"
            )
        hosts = [str(member // ranks_per_host) for member in range(len(hosts))]
    members = {host: [m for m, its in enumerate(hosts) if its == host] for host in dict.fromkeys(hosts)}
    sizes = [len(some) for some in members.values()]
    shares, largest = min(sizes), max(sizes)
    if len(members) == 1 or largest == 1:
        return None
    neighbours = members[hosts[rank]]
    place = neighbours.index(rank)
    counterparts = [some[place] for some in members.values()] if place < shares else [rank]
    return Layout(neighbours, counterparts, len(members), shares, largest)


def host_id() -> str:
    """The same for processes that share a machine and its network interfaces."""
    parts = (
        socket.gethostname(),
        _read(lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip()),
        _read(lambda: os.readlink("/proc/self/ns/net")),
    )
    return " ".join(parts)


def _read(source: Callable[[], str]) -> str:
    try:
        return source()
    except OSError:
        return ""
