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
from dltrain_ext.comm.tuning import Choice, Tuning, interpolated

SIZES = tuple(4**power for power in range(5, 14))  # bytes: 1 KiB to 64 MiB
_TRIED_SIZES = {"raw": SIZES[:-1], "native": SIZES[:-1]}  # up to 16 MiB; for lossy codecs:
_TRIED_LOSSY_SIZES = (4**8, 4**10, 4**12)
_CALIBRATING_SIZES = (4**6, 4**9, 4**11)
_REPEATS = (5, 40)  # the least and the most turns of a trial
_PER_TRIAL = 0.03  # seconds for which a trial is repeated, within these limits
_BURST = 5e-3, 50  # a turn is calls for so many seconds, but not more than so many: ranks do not begin at the same time
_CLOSE = 1.5  # up to this factor of the fastest time, which plan is faster is for a second timing to decide
_LONG, _LEFT_OUT = 4**9, 3.0  # above so many bytes, plans are left out that are so much slower by the model


def tune(group: Group, start: Network, levels: int, names: Sequence[str], seconds: float, segment_bytes: int) -> Tuning:
    """Is a collective call in which rank 0 decides. start: what is known about the network. names: those of codecs.
    segment_bytes: the size of segments that suits the transport; 0 if that is for the trials to find."""
    if len(set(group.exchange(json.dumps([seconds, *names])))) > 1:
        raise ValueError("seconds, codecs: expected the same on all ranks")
    names = ("raw", *names)
    speeds = _slowest(group, {codec: speed_of(codec, group.device) for codec in names})
    times = _time(group, list(_calibrating()), _PER_TRIAL)
    trials: list[Trial] = []
    if group.rank == 0:
        network = fit(replace(start, speeds=speeds), group.world_size, levels, times)
        model = Model(network, group.world_size, levels, segment_bytes)
        trials = list(_worth_trying(model, names, seconds / 2))
    times = _time(group, _of_rank_0(group, trials), _PER_TRIAL)
    close = list(_close(times))
    times |= _time(group, close, seconds / 2 / max(1, len(close)))
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


def _of_rank_0(group: Group, trials: Sequence[Trial]) -> list[Trial]:
    return [Trial(*fields) for fields in json.loads(group.exchange(json.dumps(trials))[0])]


def _time(group: Group, trials: Sequence[Trial], seconds: float) -> dict[Trial, float]:
    """Returns the seconds of each trial, the same on all ranks: the median over turns of the slowest rank's time. A
    trial is repeated for so many seconds, within limits."""
    by_size: dict[int, list[Trial]] = {}
    for trial in trials:
        by_size.setdefault(trial.nbytes, []).append(trial)
    own = [_take_turns(group, nbytes, some, seconds) for nbytes, some in by_size.items()]
    of_all_ranks = [json.loads(text) for text in group.exchange(json.dumps([s for samples in own for s in samples]))]
    ordered = [trial for some in by_size.values() for trial in some]
    return {
        trial: statistics.median(map(max, zip(*samples, strict=True)))
        for trial, samples in zip(ordered, zip(*of_all_ranks, strict=True), strict=True)
    }


def _take_turns(group: Group, nbytes: int, trials: Sequence[Trial], seconds: float) -> list[list[float]]:
    once = timer(group, nbytes)
    first = json.dumps([once(trial, 1) for trial in trials])
    slowest = [max(times) for times in zip(*map(json.loads, group.exchange(first)), strict=True)]
    duration, most = _BURST
    calls = [int(min(max(duration / each, 1), most)) for each in slowest]
    shortest = min(each * count for each, count in zip(slowest, calls, strict=True))
    turns = int(min(max(seconds / shortest, _REPEATS[0]), _REPEATS[1]))
    columns = [[once(trial, count) for trial, count in zip(trials, calls, strict=True)] for _ in range(turns)]
    return [list(samples) for samples in zip(*columns, strict=True)]


def _close(times: Mapping[Trial, float]) -> Iterator[Trial]:
    """Yields the trials of which one may be the fastest of its codec and size, if there are several."""
    alike: dict[tuple[str, int], list[Trial]] = {}
    for trial in times:
        alike.setdefault((trial.codec, trial.nbytes), []).append(trial)
    for trials in alike.values():
        fastest = min(times[trial] for trial in trials)
        close = [trial for trial in trials if times[trial] <= _CLOSE * fastest]
        if len(close) > 1:
            yield from close


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
    """Yields the trials that could be the fastest, as the time permits: first the likeliest of each codec and size, and
    then the others, by how much slower than these they are by the model."""
    likeliest, others = [], []
    for nbytes in SIZES:
        for codec in ("native", *names):
            if nbytes not in _TRIED_SIZES.get(codec, _TRIED_LOSSY_SIZES):
                continue
            ranking = model.ranking("raw" if codec == "native" else codec, nbytes)
            fastest, trial = ranking[0]
            if codec == "native":
                likeliest.append((fastest, Trial("native", nbytes, "native", 1)))
                continue
            likeliest.append((fastest, trial))
            others += [(expected / fastest, (expected, trial)) for expected, trial in ranking[1:]]
    less_likely = [pair for factor, pair in sorted(others) if factor <= _LEFT_OUT or pair[1].nbytes <= _LONG]
    left = seconds
    for expected, trial in likeliest + less_likely:
        cost = max((1 + _REPEATS[0]) * (expected + 1e-3), _PER_TRIAL)
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
        seconds = interpolated((below, best[below][1]), (above, best[above][1]), nbytes)
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
