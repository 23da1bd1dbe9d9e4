"""The addresses at which this process is reached over Gloo, and whether they are those of private networks."""

import contextlib
import ipaddress
import os
import socket
import struct
from pathlib import Path

import torch.distributed as dist

from dltrain_ext.comm.groups import Members
from dltrain_ext.comm.rendezvous import Rendezvous

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


def addresses() -> list[str]:
    """Returns the addresses that Gloo may listen at: those of the interfaces in ``GLOO_SOCKET_IFNAME`` or, without it,
    of this host's name, as far as they are this host's."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if names:
        return [address for name in names for address in _of_interface(name)]
    with contextlib.suppress(OSError):
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)}
        return sorted(filter(_is_own, found))
    return []


def _of_interface(name: str) -> list[str]:
    import fcntl  # not on every system

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
        found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, interface = line.split()
            if interface == name:
                found.append(str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return found


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
        probe.bind((address, 0))
        return True
    return False


def is_public(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_global


def check_private(members: Members, allowed_by: str) -> None:
    """Raises on all ranks if one of them is reached at a public address. ``allowed_by``: the argument that allows it.

    This is a collective call. Raises PermissionError that names the rank and its address.
    """
    own = " ".join(address for address in addresses() if is_public(address))
    store = dist.PrefixStore("addresses", members.store)
    found = Rendezvous(store, members.ranks, members.index, members.timeout, members.beats).exchange(own)
    for rank, public in zip(members.ranks, found, strict=True):
        if public:
            raise PermissionError(
                f"{allowed_by}: expected private addresses, since what is sent is neither encrypted nor "
                f"authenticated, got {public.split()[0]} on rank {rank}. Connect the sites by a VPN, name its "
                f"interface in GLOO_SOCKET_IFNAME, or pass {allowed_by}=True"
            )
