"""A slow and lossy network in user space, for kernels that cannot emulate one: a process that forwards packets.

    python -m benchmarks.machine.wire RATE DELAY LOSS NAMESPACE ...

Each network namespace gets a TUN device; "ready" is printed when all exist, and they are removed when standard input
ends. RATE is the rate of each host's link in each direction, in bit/s; DELAY is added between any two hosts, in
seconds; LOSS is the fraction of packets that are lost. Python forwards some thousand packets per second.
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

from benchmarks.machine.namespaces import LINK, NETWORK

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_LONGEST = 0.4  # s; the longest queue of a link, in time: packets beyond it are lost
_PACKET = 1 << 16


class Link:
    """One direction of a host's link."""

    def __init__(self, rate: float):
        self._rate, self._free = rate, 0.0

    def passes(self, arrival: float, nbytes: int) -> float | None:
        """Return when a packet that arrives at `arrival` has passed; None if the queue is full."""
        start = max(arrival, self._free)
        if start - arrival > _LONGEST:
            return None
        self._free = start + 8 * nbytes / self._rate
        return self._free


class Wire:
    """Forwards packets between the devices of the hosts."""

    def __init__(self, devices: list[int], rate: float, delay: float, loss: float):
        self._devices, self._delay, self._loss = devices, delay, loss
        self._out, self._into = ({device: Link(rate) for device in devices} for _ in range(2))
        self._under_way: list[tuple[float, int, int, bytes]] = []  # time of arrival, number, target, packet
        self._numbers, self._chance = itertools.count(), random.Random(0)

    def take(self, source: int) -> None:
        """Read and forward all packets that a host has sent."""
        with contextlib.suppress(BlockingIOError):
            while packet := os.read(source, _PACKET):
                host = host_of(packet)
                if 0 <= host < len(self._devices):
                    self._send(source, self._devices[host], packet)

    def _send(self, source: int, target: int, packet: bytes) -> None:
        left = self._out[source].passes(time.monotonic(), len(packet))
        if left is None or self._chance.random() < self._loss:
            return
        arrived = self._into[target].passes(left + self._delay, len(packet))
        if arrived is not None:
            heapq.heappush(self._under_way, (arrived, next(self._numbers), target, packet))

    def deliver(self) -> float:
        """Deliver the packets whose time has come. Return the seconds until the next one; -1 if there is none."""
        while self._under_way:
            wait = self._under_way[0][0] - time.monotonic()
            if wait > 0:
                return wait
            _, _, target, packet = heapq.heappop(self._under_way)
            with contextlib.suppress(OSError):  # its namespace is being removed
                os.write(target, packet)
        return -1


def host_of(packet: bytes) -> int:
    """Return the number of the host to which a packet is addressed; a negative one if it is not IPv4."""
    if packet[0] >> 4 != 4:
        return -1
    return int(ipaddress.IPv4Address(packet[16:20])) - int(NETWORK[1])


def device_in(namespace: str) -> int:
    """Make a TUN device in the namespace."""
    enter(f"/var/run/netns/{namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", LINK.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def enter(namespace: str) -> None:
    with open(namespace) as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


def main() -> None:
    rate, delay, loss = map(float, sys.argv[1:4])
    devices = [device_in(namespace) for namespace in sys.argv[4:]]
    enter(f"/proc/{os.getppid()}/ns/net")  # otherwise this process would stay in the namespace of the last host
    print("ready", flush=True)
    wire, poll, standard_input = Wire(devices, rate, delay, loss), select.epoll(), sys.stdin.fileno()
    for descriptor in (standard_input, *devices):
        poll.register(descriptor, select.EPOLLIN)
    while True:
        for source, _ in poll.poll(wire.deliver()):
            if source == standard_input:
                return
            wire.take(source)


if __name__ == "__main__":
    main()
