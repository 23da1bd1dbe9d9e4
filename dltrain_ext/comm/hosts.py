"""Which ranks share a host, and which of them exchange the same shard in all-reduces in two levels."""

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple


class Layout(NamedTuple):
    """The two levels, as one member of the group sees them.

    Attributes:
        neighbours: the members on its host.
        counterparts: the members with the same shard on all hosts; only itself if it has no shard.
        hosts: the number of hosts.
        shards: the number of shards: that of the members on the smallest host. The first members of a host have one
            each.
        largest: the number of members on the largest host.
    """

    neighbours: list[int]
    counterparts: list[int]
    hosts: int
    shards: int
    largest: int


def layout(hosts: Sequence[str], rank: int, ranks_per_host: int | None) -> Layout | None:
    """Returns None for one level: if there is one host, or one member on each.

    hosts: the host of each member.
    """
    if ranks_per_host is not None:
        if len(hosts) % ranks_per_host:
            raise ValueError(
                f"ranks_per_host: expected a divisor of the group's size, {len(hosts)}, got {ranks_per_host}"
            )
        hosts = [str(member // ranks_per_host) for member in range(len(hosts))]
    members = {host: [m for m, its in enumerate(hosts) if its == host] for host in dict.fromkeys(hosts)}
    sizes = [len(some) for some in members.values()]
    shards, largest = min(sizes), max(sizes)
    if len(members) == 1 or largest == 1:
        return None
    neighbours = members[hosts[rank]]
    index = neighbours.index(rank)
    counterparts = [some[index] for some in members.values()] if index < shards else [rank]
    return Layout(neighbours, counterparts, len(members), shards, largest)


def host_id() -> str:
    """Returns an id that is the same for processes that share a machine and its network interfaces."""
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
