"""A slow and lossy network in user space, where the kernel has no emulation of one: a process that passes packets on.

    python -m benchmarks.wire RATE DELAY LOSS NAMESPACE ...

Each network namespace gets a TUN device; "ready" is printed when all are there, and they are gone when standard input
ends. RATE, in bit/s, is that of each host's link, each way; DELAY, in seconds, is added from any host to any other;
LOSS is the share of packets that do not arrive. Python passes some thousand packets a second.
"""

import contextlib
import ctypes
import fcntl
import heapq
import ipaddress
import itertools
import os
import random
import select
import struct
import sys
import time

from benchmarks.hosts import LINK, NETWORK

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_LONGEST = 0.4  # seconds of a link's time that may wait before it: a packet more is lost
_PACKET = 1 << 16


class Link:
    """One way of a host's link."""

    def __init__(self, rate: float):
        self._rate, self._free = rate, 0.0

    def passes(self, arrival: float, nbytes: int) -> float | None:
        """When a packet has passed that arrives then; None where too many wait already."""
        start = max(arrival, self._free)
        if start - arrival > _LONGEST:
            return None
        self._free = start + 8 * nbytes / self._rate
        return self._free


def device_in(namespace: str) -> int:
    """A TUN device there; this process is left in that namespace."""
    with open(f"/var/run/netns/{namespace}") as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", LINK.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def host_of(packet: bytes) -> int:
    """To whom it goes; -1 for what is not IPv4 between hosts."""
    if packet[0] >> 4 != 4:
        return -1
    return int(ipaddress.IPv4Address(packet[16:20])) - int(NETWORK[1])


def relay(devices: list[int], rate: float, delay: float, loss: float) -> None:
    """Until standard input ends."""
    sources = {device: (Link(rate), Link(rate)) for device in devices}  # out of the host, and into it
    under_way: list[tuple[float, int, int, bytes]] = []  # when it arrives, its number, where, and the packet
    numbers, chance = itertools.count(), random.Random(0)
    poll = select.epoll()
    for descriptor in (0, *devices):
        poll.register(descriptor, select.EPOLLIN)
    while True:
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, device, packet = heapq.heappop(under_way)
            with contextlib.suppress(OSError):  # its namespace is about to go
                os.write(device, packet)
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else -1
        for source, _ in poll.poll(wait):
            if source == 0:
                return
            with contextlib.suppress(OSError):  # there is no more
                while packet := os.read(source, _PACKET):
                    if not 0 <= (host := host_of(packet)) < len(devices):
                        continue
                    left = sources[source][0].passes(time.monotonic(), len(packet))
                    if left is None or chance.random() < loss:
                        continue
                    arrived = sources[devices[host]][1].passes(left + delay, len(packet))
                    if arrived is not None:
                        heapq.heappush(under_way, (arrived, next(numbers), devices[host], packet))


def main() -> None:
    rate, delay, loss = map(float, sys.argv[1:4])
    with open("/proc/self/ns/net") as own:
        devices = [device_in(namespace) for namespace in sys.argv[4:]]
        ctypes.CDLL(None).setns(own.fileno(), _CLONE_NEWNET)
    print("ready", flush=True)
    relay(devices, rate, delay, loss)


if __name__ == "__main__":
    main()
