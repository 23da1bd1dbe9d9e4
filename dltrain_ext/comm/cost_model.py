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
    if not isinstance(levels, int) or levels not in (1, 2):
        raise ValueError(f"levels: expected 1 or 2, got {levels!r}")
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
    speed = network.speed(codec)
    found = _ops.simulate(
        collective,
        algorithm,
        world_size,
        numel,
        codec=codec,
        segments=segments,
        latency=network.latency,
        bandwidth=network.bandwidth,
        ranks_per_host=network.ranks_per_host,
        inside_latency=network.inside_latency,
        inside_bandwidth=network.inside_bandwidth,
        burst=network.burst,
        overhead=network.overhead,
        copy=network.copy,
        cores=network.cores,
        encode=1 / speed.encode,
        decode=1 / speed.decode,
        late=list(late),
    )
    return Estimate(found.seconds, found.wire_bytes, found.algorithm, found.segments, found.rounds)


def _in_two_levels(
    algorithm: str, world_size: int, numel: int, codec: str, network: Network, segments: int, late: Sequence[float]
) -> Estimate:
    """Pieces go through the three stages one after another, so that both levels are busy at the same time."""
    per_host = network.ranks_per_host
    if not 1 < per_host < world_size:
        raise ValueError(
            f"levels: expected 1 where there are not several hosts of several ranks, got 2 for {world_size} ranks, "
            f"{per_host} per host"
        )
    pieces = _ops.two_level_pieces(numel)
    length = numel // pieces
    hosts = math.ceil(world_size / per_host)
    shards = world_size - (hosts - 1) * per_host  # the number of ranks of the last host, which may be smaller
    # That many ranks of a host each work on a shard of the piece, and share the host's link.
    shared = replace(network, bandwidth=network.bandwidth / shards, burst=network.burst / shards, ranks_per_host=1)
    intra_host = [
        _in_one_level("direct", per_host, length * per_host // shards, "raw", network, 1, (), half).seconds
        for half in ("reduce_scatter", "all_gather")
    ]
    inter_host, later = (
        _in_one_level(algorithm, hosts, length // shards, codec, link, segments, ())
        for link in (shared, replace(shared, burst=0))  # the first piece has used up the burst
    )
    slowest = max(sum(intra_host), later.seconds)
    seconds = max(late, default=0.0) + sum(intra_host) + inter_host.seconds + (pieces - 1) * slowest
    return replace(inter_host, seconds=seconds, wire_bytes=inter_host.wire_bytes * pieces)


def _check_positive(given: object, *names: str, zero: bool = False) -> None:
    for name in names:
        value = getattr(given, name)
        if not isinstance(value, int | float):
            raise TypeError(f"{name}: expected a number, got {value!r}")
        if not (value > 0 or (zero and value == 0)):
            raise ValueError(f"{name}: expected a number {'of at least' if zero else 'above'} 0, got {value!r}")
