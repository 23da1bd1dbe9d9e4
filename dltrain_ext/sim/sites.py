"""Sites that train on their own, and average over slow links what they have moved."""

import math
from dataclasses import dataclass

from dltrain_ext._arguments import check_number, check_schedule
from dltrain_ext.comm.cost_model import Network, simulate
from dltrain_ext.sim.arguments import check_seconds

_ALGORITHM = "direct"  # that of local_sgd.DiLoCo


@dataclass(frozen=True)
class LocalSGDEstimate:
    """The estimated progress of sites that average their models every so many steps.

    Attributes:
        seconds: time of a step in seconds, the mean over all steps, and the sum of the next two.
        compute: computing of a step, in seconds.
        exposed: time per step for which training stands still, in seconds, the mean over all steps.
        all_reduce: time of the all-reduce of the largest fragment, in seconds.
        standstill: the part of it for which training stands still, each time, in seconds.
        wire_bytes: bytes that a site sends per step, the mean over all steps. It receives as many.
        burst: bytes that a site sends at a time, for the largest fragment.
        peak_bandwidth: bytes per second that a link must carry in each direction if training is not to stand still:
            ``burst`` over the time of ``delay`` steps. Latency and encoding take a part of that time, so that a link
            needs somewhat more. Without ``delay`` it is infinite, since training stands still at any bandwidth.
    """

    seconds: float
    compute: float
    exposed: float
    all_reduce: float
    standstill: float
    wire_bytes: float
    burst: int
    peak_bandwidth: float

    @property
    def efficiency(self) -> float:
        """The share of the time in which a site computes."""
        return self.compute / self.seconds

    @property
    def mean_bandwidth(self) -> float:
        """Bytes per second that a site sends, the mean over the whole time."""
        return self.wire_bytes / self.seconds


def local_sgd(
    world_size: int,
    nbytes: int,
    *,
    sync_every: int,
    compute: float,
    fragments: int = 1,
    delay: int = 0,
    codec: str = "int4",
    network: Network | None = None,
    largest: int | None = None,
) -> LocalSGDEstimate:
    """Estimates training at several sites by DiLoCo (Douillard et al. 2023, arXiv 2311.08105), in fragments and with a
    delay by Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512), as ``local_sgd.DiLoCo`` does it.

    Every ``sync_every / fragments`` steps the next fragment is all-reduced, by the plan ``"direct"``. Its mean is used
    ``delay`` steps later, and training stands still until it is there. The next fragment follows only after that, so
    that one is under way at a time: an all-reduce that takes longer than the steps between two fragments delays all
    later ones, by its time except for that of ``delay`` steps.

    The time in which a fragment is encoded, summed and decoded is included; it follows from the network's ``speeds`` or
    ``memory_bandwidth``. Not included are the outer steps, what encoding and sending take from the cores that compute,
    and waiting for slower sites.

    Args:
        world_size: the number of sites. A site of several ranks sends as much as one rank.
        nbytes: size of the trained parameters in fp32, in which they are averaged.
        sync_every: the number of steps between two averages of a parameter; a multiple of ``fragments``.
        compute: seconds in which a site computes a step.
        fragments: the number of parts of the model.
        delay: the number of steps that sites go on while a fragment is under way, less than ``sync_every /
            fragments``.
        codec: one of ``codecs.CODECS``.
        network: the network between the sites; ``Network()`` if None.
        largest: size of the largest fragment in fp32; the others share the rest evenly. None: all have the same size.

    Returns:
        A :class:`LocalSGDEstimate`.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
    """
    check_number(nbytes, "nbytes", 2**48)
    check_schedule(sync_every, fragments, delay)
    check_seconds(compute=compute)
    if compute == 0:
        raise ValueError(f"compute: expected more than 0 s, got {compute!r}")
    even = -(-nbytes // fragments)
    first = even if largest is None else largest
    check_number(first, "largest", 2**48)
    most = nbytes if fragments > 1 else even
    if not even <= first <= most:
        raise ValueError(f"largest: expected {even} to {most} bytes, got {largest}")

    others = fragments - 1
    sizes = [(first, 1), ((nbytes - first) // max(others, 1), others)]
    each = [(simulate(_ALGORITHM, world_size, size, codec=codec, network=network), count) for size, count in sizes]
    hidden = delay * compute
    exposed = sum(count * max(0.0, found.seconds - hidden) for found, count in each) / sync_every
    sent = sum(count * found.wire_bytes for found, count in each)
    longest = each[0][0]
    return LocalSGDEstimate(
        seconds=compute + exposed,
        compute=compute,
        exposed=exposed,
        all_reduce=longest.seconds,
        standstill=max(0.0, longest.seconds - hidden),
        wire_bytes=sent / sync_every,
        burst=longest.wire_bytes,
        peak_bandwidth=_over(longest.wire_bytes, hidden),
    )


def _over(nbytes: int, seconds: float) -> float:
    if nbytes == 0:
        return 0.0
    return nbytes / seconds if seconds else math.inf
