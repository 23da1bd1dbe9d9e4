"""Compares all-reduces measured on emulated hosts with a cost model that is fitted to some of them."""

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import saved_results
from benchmarks.harness import Failure, Table
from benchmarks.machine.namespaces import BURST
from benchmarks.simulation import Cell, Section
from dltrain_ext import comm, sim
from dltrain_ext.comm import tuner

RESULTS = Path(__file__).parents[1] / "results" / "simulate"
SAVED = [RESULTS / f"simulate-{hosts}-hosts-1gbit.json" for hosts in (2, 3, 4)]
FITTED_TO = 1 << 20  # bytes; the model is fitted to this size on 2 ranks
FREE = ("latency", "bandwidth", "overhead")
MEMORY = 10e9  # bytes/s, for codecs on a CPU; times on a slow network do not determine it


def load(path: Path) -> tuple[int, int, dict[tuple[str, str, int], float]]:
    """Read a JSON of the case allreduce; return ranks, cores of the machine, and seconds by (plan, codec, bytes)."""
    run = saved_results.load(path, "--measured")
    table = run.tables.get("allreduce")
    if not isinstance(table, Table) or not (found := re.search(r"(\d+) ranks", table.title)):
        raise Failure(f"--measured {path}: expected a run of allreduce, got {', '.join(run.tables) or 'nothing'}")
    seconds = {}
    for row in table.rows:
        algorithm, _, codec = row.side.partition(" ")
        if row.ours and algorithm in comm.ALGORITHMS and row.time and row.x:
            seconds[algorithm, codec or "raw", int(row.x)] = row.time.median
    return int(found[1]), int(run.origin["cores"]), seconds


def compare(paths: Sequence[Path]) -> tuple[Section, str]:
    """Return the errors of the model where it was not fitted, and a note on the fitted values."""
    runs: dict[int, dict[tuple[str, str, int], float]] = {}
    cores = 1
    for path in paths:
        ranks, cores, seconds = load(path)
        runs[ranks] = seconds
    fitted = {key: seconds for key, seconds in runs.get(2, {}).items() if key[2] == FITTED_TO}
    if not fitted:
        raise Failure(f"--measured: expected a run of 2 ranks with messages of {FITTED_TO} bytes to fit the model to")
    network = fit(fitted, cores)
    errors = {
        (ranks, *key): predict(network, ranks, key) / seconds - 1
        for ranks, run in runs.items()
        for key, seconds in run.items()
        if (ranks, key[2]) != (2, FITTED_TO)
    }
    note = (
        f"fitted only to 2 ranks and {FITTED_TO >> 20} MiB: latency {network.latency * 1e6:.0f} us, bandwidth "
        f"{network.bandwidth * 8e-9:.3g} Gbit/s, {network.overhead * 1e6:.0f} us per message; given: codecs at "
        f"{MEMORY * 1e-9:g} GB/s, {cores} cores that all ranks share, links with a burst of {BURST}"
    )
    return Section(list(rows(errors)), by=["what", "figures", "median off %", "worst off %"]), note


def fit(times: Mapping[tuple[str, str, int], float], cores: int) -> sim.Network:
    start = sim.Network(
        latency=1e-4, bandwidth=1.1e8, overhead=2e-5, memory_bandwidth=MEMORY, cores=cores, burst=bytes_of(BURST)
    )
    trials = {tuner.Trial(codec, nbytes, plan, 0): seconds for (plan, codec, nbytes), seconds in times.items()}
    return tuner.fit(start, 2, 1, trials, FREE)


def bytes_of(burst: str) -> int:
    return int(burst.removesuffix("kb")) * 1024


def predict(network: sim.Network, ranks: int, key: tuple[str, str, int]) -> float:
    algorithm, codec, nbytes = key
    return sim.simulate(algorithm, ranks, nbytes, codec=codec, network=network).seconds


def rows(errors: Mapping[tuple[int, str, str, int], float]) -> list[dict[str, Cell]]:
    """Return a summary of all errors, and one for each value of ranks, plan, codec and size."""
    out = [summary("all", list(errors.values()))]
    for position, label in enumerate(("{} ranks", "{}", "{}", "{} KiB")):
        for value in sorted({key[position] for key in errors}, key=lambda value: (str(type(value)), value)):
            shown = label.format(value >> 10 if position == 3 else value)  # type: ignore[operator]
            out.append(summary(shown, [error for key, error in errors.items() if key[position] == value]))
    return out


def summary(what: str, errors: Sequence[float]) -> dict[str, Cell]:
    worst = max(errors, key=abs)
    return {
        "what": what,
        "figures": len(errors),
        "median off %": 100 * statistics.median(map(abs, errors)),
        "worst off %": 100 * worst,
    }
