"""Measures a live group, fits the cost model to it, and times the plans that are the fastest by the model."""

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dltrain_ext import _ops, codecs
from dltrain_ext.comm.cost_model import Network, Speed, simulate
from dltrain_ext.comm.plans import algorithms_for
from dltrain_ext.comm.timing import Group, Trial, synchronize, timer
from dltrain_ext.comm.tuning import Choice, Tuning

SIZES = tuple(4**power for power in range(5, 14))  # bytes: 1 KiB to 64 MiB
_TRIED_SIZES = {"raw": SIZES[:-1], "native": SIZES[:-1]}  # up to 16 MiB; for lossy codecs:
_TRIED_LOSSY_SIZES = (4**8, 4**10, 4**12)
_CALIBRATING_SIZES = (4**6, 4**9, 4**11)
_REPEATS = (5, 40)  # the least and the most turns of a trial
_PER_TRIAL = 0.08  # seconds for which a trial is repeated, within these limits
_SHORT = 4**9  # bytes up to which the model is too inaccurate to leave a plan out


def tune(group: Group, start: Network, levels: int, names: Sequence[str], seconds: float, segment_bytes: int) -> Tuning:
    """Is a collective call in which rank 0 decides. start: what is known about the network. names: those of codecs.
    segment_bytes: the size of segments that suits the transport; 0 if that is for the trials to find."""
    if len(set(group.exchange(json.dumps([seconds, *names])))) > 1:
        raise ValueError("seconds, codecs: expected the same on all ranks")
    names = ("raw", *names)
    speeds = _slowest(group, {codec: speed_of(codec, group.device) for codec in names})
    times = _time(group, list(_calibrating()))
    trials: list[Trial] = []
    if group.rank == 0:
        network = fit(replace(start, speeds=speeds), group.world_size, levels, times)
        model = Model(network, group.world_size, levels, segment_bytes)
        trials = list(_worth_trying(model, names, seconds))
    times = _time(group, [Trial(*fields) for fields in json.loads(group.exchange(json.dumps(trials))[0])])
    tuning = ""
    if group.rank == 0:
        tuning = Tuning(group.world_size, network, tabulate(model, names, times)).to_json()
    return Tuning.from_json(group.exchange(tuning)[0])


def _slowest(group: Group, speeds: Mapping[str, Speed]) -> dict[str, Speed]:
    """Returns the lowest speeds over all ranks."""
    texts = group.exchange(json.dumps({codec: speed.to_list() for codec, speed in speeds.items()}))
    of_all_ranks = [{codec: Speed.from_list(plain) for codec, plain in json.loads(text).items()} for text in texts]
    return {
        codec: Speed(min(each[codec].encode for each in of_all_ranks), min(each[codec].decode for each in of_all_ranks))
        for codec in speeds
    }


def speed_of(codec: str, device: torch.device, numel: int = 1 << 20) -> Speed:
    """Returns the speed of this rank alone, on elements that fit into the next level of memory."""
    values, out = torch.randn(numel, device=device), torch.zeros(numel, device=device)
    if codec == "raw":
        return Speed(math.inf, numel / _fastest(lambda: out.add_(values), device))
    encoded = codecs.encode(values, codec)
    encode = _fastest(lambda: codecs.encode(values, codec), device)
    decode = _fastest(lambda: codecs.decode(encoded, out=out), device)
    return Speed(numel / encode, numel / decode)


def _fastest(call: Callable[[], object], device: torch.device) -> float:
    def once() -> float:
        began = time.perf_counter()
        call()
        synchronize(device)
        return time.perf_counter() - began

    once()
    return min(once() for _ in range(_REPEATS[0]))


def _calibrating() -> Iterator[Trial]:
    for nbytes in _CALIBRATING_SIZES:
        for algorithm in ("ring", "direct", "recursive_doubling", "halving_doubling"):
            yield Trial("raw", nbytes, algorithm, 1)
    yield Trial("raw", _CALIBRATING_SIZES[-1], "ring", 8)


def _time(group: Group, trials: Sequence[Trial]) -> dict[Trial, float]:
    """Returns the seconds of each trial, the same on all ranks: the median over turns of the slowest rank's time."""
    by_size: dict[int, list[Trial]] = {}
    for trial in trials:
        by_size.setdefault(trial.nbytes, []).append(trial)
    own = [_take_turns(group, nbytes, some) for nbytes, some in by_size.items()]
    of_all_ranks = [json.loads(text) for text in group.exchange(json.dumps([s for samples in own for s in samples]))]
    ordered = [trial for some in by_size.values() for trial in some]
    return {
        trial: statistics.median(map(max, zip(*samples, strict=True)))
        for trial, samples in zip(ordered, zip(*of_all_ranks, strict=True), strict=True)
    }


def _take_turns(group: Group, nbytes: int, trials: Sequence[Trial]) -> list[list[float]]:
    once = timer(group, nbytes)
    first = [once(trial) for trial in trials]
    shortest = [float(text) for text in group.exchange(str(min(first)))]
    turns = int(min(max(_PER_TRIAL / max(shortest), _REPEATS[0]), _REPEATS[1]))
    columns = [[once(trial) for trial in trials] for _ in range(turns)]
    return [list(samples) for samples in zip(*columns, strict=True)]


def fit(
    start: Network,
    world_size: int,
    levels: int,
    times: Mapping[Trial, float],
    free: Sequence[str] | None = None,
) -> Network:
    """Returns the network with which the cost model is closest to the measured times, by the mean difference of
    logarithms: one or two of the ``free`` attributes are changed at a time, by ever smaller factors."""
    if free is None:
        intra_host = ("inside_latency", "inside_bandwidth") if levels == 2 else ()
        free = ("latency", "bandwidth", "overhead", "copy", *intra_host)

    def distance(network: Network) -> float:
        model = Model(network, world_size, levels)
        return statistics.fmean(abs(math.log(model.seconds(trial) / seconds)) for trial, seconds in times.items())

    moves = [move for move in itertools.product((-1, 0, 1), repeat=len(free)) if 1 <= sum(map(abs, move)) <= 2]
    best, network, step = distance(start), start, 4.0
    while step > 1.02:
        factors = [{name: step**way for name, way in zip(free, move, strict=True)} for move in moves]
        neighbours = [replace(network, **{n: getattr(network, n) * f for n, f in each.items()}) for each in factors]
        closest, neighbour = min(((distance(each), each) for each in neighbours), key=lambda pair: pair[0])
        if closest < best:
            best, network = closest, neighbour
        else:
            step = math.sqrt(step)
    return network


@dataclass(frozen=True)
class Model:
    network: Network
    world_size: int
    levels: int
    segment_bytes: int = 0  # as for tune()

    def seconds(self, trial: Trial) -> float:
        estimate = simulate(
            trial.algorithm,
            self.world_size,
            trial.nbytes,
            codec=trial.codec,
            network=self.network,
            segments=trial.segments,
            levels=self.levels,
        )
        return max(estimate.seconds, 1e-9)

    def ranking(self, codec: str, nbytes: int) -> list[tuple[float, Trial]]:
        """Returns the plans, each with its best number of segments, the fastest first."""
        counts = self._segments(codec, nbytes)
        found = []
        for algorithm in algorithms_for(codec):
            trials = [Trial(codec, nbytes, algorithm, count) for count in counts]
            found.append(min(((self.seconds(trial), trial) for trial in trials), key=lambda pair: pair[0]))
        return sorted(found, key=lambda pair: pair[0])

    def _segments(self, codec: str, nbytes: int) -> list[int]:
        if self.segment_bytes:
            return [_ops.segments_of(_ops.find_codec(codec).bytes(nbytes // 4), self.segment_bytes)]
        most = 16 if self.world_size <= 64 else 1
        return [count for count in (1, 2, 4, 8, 16) if count <= min(most, max(1, nbytes >> 18))]


def _worth_trying(model: Model, names: Sequence[str], seconds: float) -> Iterator[Trial]:
    """Yields the trials that could be the fastest, as the time permits: first the likeliest of each codec and size."""
    candidates = []
    for nbytes in SIZES:
        for codec in ("native", *names):
            if nbytes not in _TRIED_SIZES.get(codec, _TRIED_LOSSY_SIZES):
                continue
            ranking = model.ranking("raw" if codec == "native" else codec, nbytes)
            if codec == "native":
                candidates.append([(ranking[0][0], Trial("native", nbytes, "native", 1))])
                continue
            promising = [pair for pair in ranking if pair[0] <= 1.5 * ranking[0][0]][: 3 if codec == "raw" else 2]
            candidates.append(ranking if nbytes <= _SHORT else promising)
    likeliest = [pairs[0] for pairs in candidates]
    others = [pair for pairs in candidates for pair in pairs[1:]]
    left = seconds
    for expected, trial in likeliest + others:
        cost = (1 + _REPEATS[0]) * (expected + 1e-3)
        if cost <= left:
            left -= cost
            yield trial


def tabulate(model: Model, names: Sequence[str], times: Mapping[Trial, float]) -> dict[str, list[Choice]]:
    """Returns the fastest measured trial of each size. Up to the largest measured size the times of other sizes are
    interpolated in the logarithm, or are those of the smallest size. Above it the model selects the plan, and its time
    is scaled by how far the model was off at the largest measured size."""
    table = {}
    for codec in (*names, "native"):
        best: dict[int, tuple[Trial, float]] = {}
        for trial, seconds in times.items():
            if trial.codec == codec and seconds < best.get(trial.nbytes, (trial, math.inf))[1]:
                best[trial.nbytes] = trial, seconds
        if best or codec != "native":
            largest = max(best, default=0)
            within = [_between(best, nbytes) for nbytes in SIZES if nbytes <= largest]
            table[codec] = within + [_beyond(model, best, codec, nbytes) for nbytes in SIZES if nbytes > largest]
    return table


def _between(best: Mapping[int, tuple[Trial, float]], nbytes: int) -> Choice:
    near = min(best, key=lambda size: abs(math.log(size / nbytes)))
    trial, seconds = best[near]
    below, above = (max((s for s in best if s < nbytes), default=0), min(s for s in best if s >= nbytes))
    if near != nbytes and below:
        part = math.log(nbytes / below) / math.log(above / below)
        seconds = best[below][1] ** (1 - part) * best[above][1] ** part
    return Choice(nbytes, trial.algorithm, trial.segments, seconds, near == nbytes)


def _beyond(model: Model, best: Mapping[int, tuple[Trial, float]], codec: str, nbytes: int) -> Choice:
    if not best:
        expected, trial = model.ranking(codec, nbytes)[0]
        return Choice(nbytes, trial.algorithm, trial.segments, expected, False)
    largest = max(best)
    last, seconds = best[largest]
    if codec == "native":
        return Choice(nbytes, "native", 1, seconds * nbytes / largest, False)
    expected, trial = model.ranking(codec, nbytes)[0]
    return Choice(nbytes, trial.algorithm, trial.segments, expected * seconds / model.seconds(last), False)
