"""The cost model of collectives on a modelled network."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from dltrain_ext import _ops
from dltrain_ext._arguments import check_number
from dltrain_ext.comm.arguments import check_names


@dataclass(frozen=True)
class Speed:
    """The speed of a codec on one rank, in fp32 elements per second: ``encode`` of encoding, and ``decode`` of decoding
    and adding. For raw ``encode`` is infinite."""

    encode: float
    decode: float

    def __post_init__(self) -> None:
        _check_positive(self, "encode", "decode")

    def to_list(self) -> list[float | None]:
        """Returns both numbers for JSON, with None for infinity."""
        return [None if math.isinf(speed) else speed for speed in (self.encode, self.decode)]

    @classmethod
    def from_list(cls, plain: Sequence[float | None]) -> "Speed":
        encode, decode = (math.inf if speed is None else speed for speed in plain)
        return cls(encode, decode)


@dataclass(frozen=True, kw_only=True)
class Network:
    """Hosts with equal links, and the speed of their ranks. The defaults are single GPUs on a 10 Gbit/s Ethernet.

    Args:
        latency: seconds until the first byte of a message arrives at another host.
        bandwidth: bytes per second of a host's link, in each direction.
        ranks_per_host: the number of consecutive ranks that share a host and its link; the last host may have fewer.
        inside_latency, inside_bandwidth: the same between ranks of a host; each rank has this bandwidth for itself.
        burst: bytes that a host's link transmits at once after a pause, as token buckets do (``tc tbf``; many cloud
            instances). Each all-reduce begins after a pause.
        memory_bandwidth: bytes per second that a rank's codecs and sums read and write, for codecs not in ``speeds``.
        speeds: the :class:`Speed` of codecs that have been measured, by name.
        overhead: seconds of a rank's own time for each message, at both ends.
        copy: seconds of a processor core per byte that a rank sends or receives, in addition to its other work.
        cores: the number of cores that all ranks share if hosts are emulated on one machine; 0 is no limit.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
    """

    latency: float = 30e-6
    bandwidth: float = 10e9 / 8
    ranks_per_host: int = 1
    inside_latency: float = 10e-6
    inside_bandwidth: float = 100e9
    burst: float = 0.0
    memory_bandwidth: float = 1e12
    speeds: Mapping[str, Speed] = field(default_factory=dict)
    overhead: float = 0.0
    copy: float = 0.0
    cores: int = 0

    def __post_init__(self) -> None:
        _check_positive(self, "bandwidth", "inside_bandwidth", "memory_bandwidth")
        _check_positive(self, "latency", "inside_latency", "burst", "overhead", "copy", zero=True)
        check_number(self.ranks_per_host, "ranks_per_host", 2**31)
        check_number(self.cores, "cores", 2**16)
        if self.ranks_per_host == 0:
            raise ValueError("ranks_per_host: expected at least 1, got 0")
        if not isinstance(self.speeds, Mapping):
            raise TypeError(f"speeds: expected a mapping of Speed by codec, got {self.speeds!r}")
        for codec, speed in self.speeds.items():
            if not isinstance(codec, str) or not isinstance(speed, Speed):
                raise TypeError(f"speeds: expected a mapping of Speed by codec, got {codec!r}: {speed!r}")
            _ops.find_codec(codec)

    def speed(self, codec: str) -> Speed:
        """Returns the entry of ``speeds``, or the speed at which memory is read and written: each element and its code
        once."""
        check_names("auto", codec)
        if codec in self.speeds:
            return self.speeds[codec]
        wire = _ops.find_codec(codec).bytes(2**20) / 2**20
        encode = math.inf if codec == "raw" else self.memory_bandwidth / (4 + wire)
        return Speed(encode, self.memory_bandwidth / (wire + 8))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain numbers, for JSON."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        return plain | {"speeds": {name: speed.to_list() for name, speed in self.speeds.items()}}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Network":
        return cls(**{**plain, "speeds": {name: Speed.from_list(speed) for name, speed in plain["speeds"].items()}})


@dataclass(frozen=True)
class Estimate:
    """The estimate of one collective.

    Attributes:
        seconds: from when the first rank begins until the last rank has the result.
        wire_bytes: bytes sent by one rank, in two levels between hosts; the largest over the ranks.
        algorithm: the plan that ran, which was selected if that was asked for.
        segments: the number of segments, likewise.
        rounds: the number of rounds of the plan.
    """

    seconds: float
    wire_bytes: int
    algorithm: str
    segments: int
    rounds: int


def simulate(
    algorithm: str,
    world_size: int,
    nbytes: int,
    *,
    codec: str = "raw",
    network: Network | None = None,
    segments: int | None = None,
    levels: int = 1,
    late: Sequence[float] = (),
    collective: str = "all_reduce",
) -> Estimate:
    """Returns an estimate of the time of a collective on a modelled network.

    The programs of the executor are followed with a clock for each rank, link and core instead of messages and kernels:
    this is the alpha-beta-gamma model (Thakur, Rabenseifner, Gropp 2005) with contention.

    Args:
        algorithm: one of ``comm.COLLECTIVES[collective]``, ``"auto"`` or, for an all-reduce, ``"butterfly"``.
        world_size: the number of ranks, at least 1; thousands take seconds at most.
        nbytes: size of the tensor in fp32; if each rank has a shard, of all shards.
        codec: one of ``codecs.CODECS``.
        network: the network; ``Network()`` if None.
        segments: as for ``comm.all_reduce``; selected if None.
        levels: 2 for a sum within each host, and ``algorithm`` between hosts, as in ``comm.Communicator``.
        late: seconds by which each rank begins later; empty if all begin together. Each rank is then followed on its
            own, which takes time and memory for thousands of ranks.
        collective: one of ``comm.COLLECTIVES``; the root of those that have one is rank 0.

    Returns:
        An :class:`Estimate`.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
    """
    network = network_of(network)
    check_number(nbytes, "nbytes", 2**48)
    check_number(world_size, "world_size", 2**16 + 1)
    if segments is not None:
        check_number(segments, "segments", 2**16)
    check_names(algorithm, codec, collective)
    if not isinstance(late, Sequence) or not all(isinstance(seconds, int | float) for seconds in late):
        raise TypeError(f"late: expected a sequence of seconds, got {late!r}")
    if algorithm == "native":
        raise ValueError("algorithm: expected one that is a plan, got 'native'")
    _check_levels(levels, world_size, network)
    if levels == 2 and collective != "all_reduce":
        raise ValueError(f"levels: expected 1 for {collective}, got 2")
    numel = (nbytes + 3) // 4
    if levels == 2:
        return _in_two_levels(algorithm, world_size, numel, codec, network, segments or 0, late)
    return _in_one_level(algorithm, world_size, numel, codec, network, segments or 0, late, collective)


def network_of(given: Network | None) -> Network:
    if given is not None and not isinstance(given, Network):
        raise TypeError(f"network: expected a Network or None, got {given!r}")
    return given or Network()


def _in_one_level(
    algorithm: str,
    world_size: int,
    numel: int,
    codec: str,
    network: Network,
    segments: int,
    late: Sequence[float],
    collective: str = "all_reduce",
) -> Estimate:
    found = _ops.simulate(
        collective,
        algorithm,
        world_size,
        numel,
        codec=codec,
        segments=segments,
        late=list(late),
        **_costs(network, codec),
    )
    return Estimate(found.seconds, found.wire_bytes, found.algorithm, found.segments, found.rounds)


def _costs(network: Network, codec: str) -> dict[str, Any]:
    speed = network.speed(codec)
    names = [each.name for each in fields(network) if each.name not in ("memory_bandwidth", "speeds")]
    costs = {name: getattr(network, name) for name in names}
    return {**costs, "encode": 1 / speed.encode, "decode": 1 / speed.decode}


def parameter_server(
    world_size: int,
    nbytes: int,
    *,
    servers: int | None = None,
    codec: str = "raw",
    network: Network | None = None,
    segments: int | None = None,
    levels: int = 1,
) -> Estimate:
    """Returns an estimate of the time in which all workers push gradients to a parameter server and pull the result.

    Each piece of the tensor is pushed to the server that holds it, which adds up the messages of all workers and then
    sends the piece to all of them. Pushes and pulls of different pieces overlap. The servers' links are the bottleneck:
    ``world_size * nbytes / servers`` pass each of them, in each direction (Li et al., OSDI 2014). The time of the
    optimizer, which runs on the servers, is not included.

    Args:
        world_size: the number of workers, at least 1.
        nbytes: size of the gradients, and of what is pulled, in fp32.
        servers: the number of hosts that only serve, in addition to those of the workers; 1 is the all-to-one server.
            None: every worker also serves its share, which is the all-reduce ``"direct"``.
        codec: the codec of pushes and pulls, one of ``codecs.CODECS``.
        network: the network; ``Network()`` if None. A server has a link of its own.
        segments: the number of pieces of each server. None: pieces of about 1 MiB, at most 64 of them. If all workers
            serve, as for :func:`simulate`.
        levels: 2 if the ranks of a host first add up their gradients, and one of them pushes and pulls.

    Returns:
        An :class:`Estimate`. ``algorithm`` is ``"parameter_server"``, or ``"direct"`` if every worker serves;
        ``wire_bytes`` is sent by a worker or by a server, whichever sends more.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
    """
    if servers is None:
        return simulate("direct", world_size, nbytes, codec=codec, network=network, segments=segments, levels=levels)
    network = network_of(network)
    check_number(nbytes, "nbytes", 2**48)
    check_number(world_size, "world_size", 2**16 + 1)
    check_number(servers, "servers", 2**16 + 1)
    if segments is not None:
        check_number(segments, "segments", 2**16)
    check_names("auto", codec)
    _check_levels(levels, world_size, network)
    numel = (nbytes + 3) // 4
    workers = math.ceil(world_size / network.ranks_per_host) if levels == 2 else world_size
    link = replace(network, ranks_per_host=1) if levels == 2 else network
    found = _ops.simulate_servers(workers, servers, numel, codec=codec, segments=segments or 0, **_costs(link, codec))
    seconds = found.seconds
    if levels == 2:
        pieces = _ops.two_level_pieces(numel)
        inside = _inside_hosts(network, numel // pieces)
        between = seconds / pieces
        seconds = inside + between + (pieces - 1) * max(inside, between)
    return Estimate(seconds, found.wire_bytes, found.algorithm, found.segments, found.rounds)


def _in_two_levels(
    algorithm: str, world_size: int, numel: int, codec: str, network: Network, segments: int, late: Sequence[float]
) -> Estimate:
    """Pieces go through the three stages one after another, so that both levels are busy at the same time."""
    per_host = network.ranks_per_host
    pieces = _ops.two_level_pieces(numel)
    length = numel // pieces
    hosts = math.ceil(world_size / per_host)
    shards = world_size - (hosts - 1) * per_host  # the number of ranks of the last host, which may be smaller
    # That many ranks of a host each work on a shard of the piece, and share the host's link.
    shared = replace(network, bandwidth=network.bandwidth / shards, burst=network.burst / shards, ranks_per_host=1)
    intra_host = _inside_hosts(network, length * per_host // shards)
    inter_host, later = (
        _in_one_level(algorithm, hosts, length // shards, codec, link, segments, ())
        for link in (shared, replace(shared, burst=0))  # the first piece has used up the burst
    )
    slowest = max(intra_host, later.seconds)
    seconds = max(late, default=0.0) + intra_host + inter_host.seconds + (pieces - 1) * slowest
    return replace(inter_host, seconds=seconds, wire_bytes=inter_host.wire_bytes * pieces)


def _inside_hosts(network: Network, numel: int) -> float:
    """Returns the seconds in which the ranks of a host add up their tensors, and later hand on the result."""
    return sum(
        _in_one_level("direct", network.ranks_per_host, numel, "raw", network, 1, (), half).seconds
        for half in ("reduce_scatter", "all_gather")
    )


def _check_levels(levels: int, world_size: int, network: Network) -> None:
    if not isinstance(levels, int) or levels not in (1, 2):
        raise ValueError(f"levels: expected 1 or 2, got {levels!r}")
    if levels == 2 and not 1 < network.ranks_per_host < world_size:
        raise ValueError(
            f"levels: expected 1 where there are not several hosts of several ranks, got 2 for {world_size} ranks, "
            f"{network.ranks_per_host} per host"
        )


def _check_positive(given: object, *names: str, zero: bool = False) -> None:
    for name in names:
        value = getattr(given, name)
        if not isinstance(value, int | float):
            raise TypeError(f"{name}: expected a number, got {value!r}")
        if not (value > 0 or (zero and value == 0)):
            raise ValueError(f"{name}: expected a number {'of at least' if zero else 'above'} 0, got {value!r}")
