"""Training at sites behind slow links: the share of time in which they compute, and what they send."""

from dataclasses import dataclass

from benchmarks.harness import Progress
from benchmarks.simulation import Cell, Section
from dltrain_ext import sim

GBIT = 1e9 / 8
LINKS = (0.1, 1.0, 10.0)  # Gbit/s
CODECS = ("raw", "int4")
LATENCY = 50e-3  # s, one way, about that between continents
MEMORY = 100e9  # bytes/s of a site's processors, which encode: DiLoCo's copies are in the CPU's memory


@dataclass(frozen=True)
class Schedule:
    sync_every: int
    fragments: int = 1
    delay: int = 0


EVERY_STEP = Schedule(1)
SCHEDULES = (EVERY_STEP, Schedule(100), Schedule(100, 10, 5), Schedule(500), Schedule(500, 10, 5))


def compare(sites: int, parameters: int, compute: float, progress: Progress) -> Section:
    rows: list[dict[str, Cell]] = []
    for schedule in SCHEDULES:
        progress(f"slow links, every {schedule.sync_every} steps", 0.0)
        for codec in CODECS:
            for link in LINKS:
                found = sim.local_sgd(
                    sites,
                    4 * parameters,
                    sync_every=schedule.sync_every,
                    compute=compute,
                    fragments=schedule.fragments,
                    delay=schedule.delay,
                    codec=codec,
                    network=sim.Network(bandwidth=link * GBIT, latency=LATENCY, memory_bandwidth=MEMORY),
                )
                rows.append(
                    {
                        "sync every": schedule.sync_every,
                        "fragments": schedule.fragments,
                        "delay": schedule.delay,
                        "codec": codec,
                        "Gbit/s": link,
                        "computing %": 100 * found.efficiency,
                        "step s": found.seconds,
                        "all-reduce s": found.all_reduce,
                        "stands still s": found.standstill,
                        "MB/step": found.wire_bytes / 1e6,
                        "burst GB": found.burst / 1e9,
                        "mean Gbit/s": found.mean_bandwidth / GBIT,
                        "peak Gbit/s": found.peak_bandwidth / GBIT if schedule.delay else None,
                    }
                )
    by = ["sync every", "fragments", "delay", "codec", "MB/step", "burst GB", "peak Gbit/s"]
    return Section(rows, by=by, across="Gbit/s", value="computing %")
