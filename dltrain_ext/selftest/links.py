"""Measures the links between the ranks, and the gain of codecs on them, as predicted by the model and as measured."""

import statistics
import time

import torch

from dltrain_ext import comm, sim
from dltrain_ext.comm import Tuning
from dltrain_ext.selftest import ranks
from dltrain_ext.selftest.report import Check, Found, Site, Skip

GAINS = ("fp16", "int8", "int4")
ROUNDS = 7


def gains(site: Site) -> Found:
    """Measures the group, then times raw, the backend's own all-reduce and some codecs with the best plans found."""
    if site.world_size == 1:
        raise Skip("needs two ranks: --ranks 2")
    nbytes = (4 if site.quick else 25) << 20
    with ranks.communicator(site.device) as communicator:
        return _measured(communicator, nbytes, site)


def _measured(communicator: comm.Communicator, nbytes: int, site: Site) -> Found:
    tuning = communicator.tune(seconds=2.0 if site.quick else 10.0, codecs=GAINS)
    samples: dict[str, list[float]] = {codec: [] for codec in ("raw", "native", *GAINS)}
    tensor = torch.ones(nbytes // 4, device=site.device)
    for turn in range(-1, 3 if site.quick else ROUNDS):
        for codec, kept in samples.items():
            choice = tuning.choose(codec, nbytes)
            start = time.perf_counter()
            communicator.all_reduce(
                tensor,
                "avg",
                algorithm=choice.algorithm,
                codec="raw" if codec == "native" else codec,
                segments=choice.segments,
            )
            if site.device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= 0:
                kept.append(time.perf_counter() - start)
    medians = {codec: statistics.median(kept) for codec, kept in samples.items()}
    of_all = ranks.exchange(f"medians on {site.device.type}", medians)
    seconds = {codec: max(one[codec] for one in of_all) for codec in samples}
    predicted = {codec: _predict(tuning, codec, nbytes) for codec in ("raw", *GAINS)}
    network = tuning.network
    words = [
        f"{codec} {predicted['raw'] / predicted[codec]:.2f}x ({seconds['raw'] / seconds[codec]:.2f}x measured)"
        for codec in GAINS
    ]
    return Found(
        f"{network.bandwidth * 8e-9:.3g} Gbit/s, {network.latency * 1e6:.0f} us; over raw at {nbytes >> 20} MiB: "
        f"{', '.join(words)}; backend's own {seconds['raw'] / seconds['native']:.2f}x",
        {"nbytes": nbytes, "seconds": seconds, "predicted": predicted, "network": network.to_dict()},
    )


def _predict(tuning: Tuning, codec: str, nbytes: int) -> float:
    choice = tuning.choose(codec, nbytes)
    estimate = sim.simulate(
        choice.algorithm,
        tuning.world_size,
        nbytes,
        codec=codec,
        network=tuning.network,
        segments=choice.segments,
        levels=1 if tuning.network.ranks_per_host == 1 else 2,
    )
    return estimate.seconds


CHECKS = [Check("links and gains", gains)]
