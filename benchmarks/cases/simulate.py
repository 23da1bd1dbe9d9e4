"""SIMULATED, not timed: all-reduces, servers and training on modelled networks, beside published figures."""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.cases.allreduce import RAW_ALONE, size
from benchmarks.harness import Failure, Keep, Progress, at_least, choices
from benchmarks.simulated import literature, measured, slow_links, topologies
from benchmarks.simulated.workloads import BACKWARD, RESNET50, TRANSFORMER, Workload, transformer_compute
from benchmarks.simulation import Cell, Section, Simulation
from dltrain_ext import codecs, comm, sim

ALL_REDUCE, TOPOLOGIES, BREAK_EVEN, TRAINING, SLOW_LINKS, PUBLISHED, MEASURED = PARTS = (
    "all-reduce",
    "topologies",
    "break-even",
    "training",
    "slow-links",
    "published",
    "measured",
)
OVERVIEW = ["--max-ranks", "64"]
GBIT, US = 1e9 / 8, 1e-6


def positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def several(text: str) -> list[float]:
    return [positive(part) for part in text.split(",")]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", type=choices(PARTS), default=list(PARTS), help=f"names out of {', '.join(PARTS)}")
    parser.add_argument(
        "--measured",
        type=lambda text: [Path(part) for part in text.split(",")],
        default=measured.SAVED,
        metavar="FILES",
        help="files that `allreduce --json` wrote on `hosts`, for 2 ranks and for others (default: the saved ones)",
    )
    parser.add_argument("--nbytes", type=size, default=10**8, help="size of an all-reduce, in fp32 (default: 100 MB)")
    parser.add_argument("--max-ranks", type=at_least(2), help="largest world size (default: 4096, --quick: 64)")
    parser.add_argument("--ranks-per-host", type=at_least(1), default=8, help="ranks per link (default: %(default)s)")
    parser.add_argument(
        "--bandwidth", type=positive, default=100.0, help="bandwidth of links for all-reduces, Gbit/s (default: 100)"
    )
    parser.add_argument(
        "--links", type=several, help="bandwidths of the links for training steps, Gbit/s (default: 10,25,100,400)"
    )
    parser.add_argument(
        "--latency", type=positive, default=30.0, help="latency between hosts, microseconds (default: 30)"
    )
    parser.add_argument(
        "--memory-bandwidth",
        type=several,
        default=[1000.0, 10.0],
        help="memory bandwidths of a rank for codecs and sums, GB/s; break-even uses all, the other parts the first "
        "(default: 1000,10, about those of a GPU and of a slow CPU)",
    )
    parser.add_argument("--codecs", type=choices(codecs.CODECS), help="codecs (default: raw,bf16,int8,int4)")
    parser.add_argument(
        "--algorithms", type=choices(comm.ALGORITHMS), default=list(comm.ALGORITHMS), help="algorithms (default: all)"
    )
    parser.add_argument(
        "--resnet-step", type=positive, default=0.1, help="seconds that a GPU computes for 256 images (default: 0.1)"
    )
    parser.add_argument(
        "--tokens", type=at_least(1), default=16384, help="tokens of a GPU in a transformer step (default: %(default)s)"
    )
    parser.add_argument(
        "--tflops", type=positive, default=150.0, help="TFLOP/s of a GPU in a transformer step (default: %(default)s)"
    )
    parser.add_argument("--sites", type=at_least(1), default=64, help="sites behind slow links (default: %(default)s)")
    parser.add_argument(
        "--site-parameters", type=at_least(1), default=10**10, help="parameters that sites average (default: 10^10)"
    )
    parser.add_argument(
        "--site-step", type=positive, default=10.0, help="seconds that a site computes for a step (default: 10)"
    )


def run(options: argparse.Namespace, progress: Progress, keep: Keep) -> None:
    names = options.codecs or (["raw", "int8"] if options.quick else ["raw", "bf16", "int8", "int4"])
    if "raw" not in names and all(name in RAW_ALONE for name in options.algorithms):
        raise Failure(f"--algorithms: these only take the codec raw: {', '.join(options.algorithms)}")
    largest = options.max_ranks or (64 if options.quick else 4096)
    if TRAINING in options.parts and largest < options.ranks_per_host:
        raise Failure(f"--max-ranks: expected at least one host of {options.ranks_per_host} ranks, got {largest}")
    network = sim.Network(
        bandwidth=options.bandwidth * GBIT,
        latency=options.latency * US,
        ranks_per_host=options.ranks_per_host,
        memory_bandwidth=options.memory_bandwidth[0] * 1e9,
    )
    parts = {
        ALL_REDUCE: lambda: all_reduces(options, names, largest, network, progress),
        TOPOLOGIES: lambda: topologies.compare(network, largest, options.nbytes, options.resnet_step, progress),
        BREAK_EVEN: lambda: break_evens(options, names, largest, network, progress),
        TRAINING: lambda: training(options, names, largest, network, progress),
        SLOW_LINKS: lambda: slow_links.compare(options.sites, options.site_parameters, options.site_step, progress),
        PUBLISHED: literature.compare,
    }
    title = "SIMULATED on a modelled network: nothing was timed, and no model covers all effects of a real network"
    simulation = Simulation(title, {}, make_notes(options, network))
    keep(simulation)
    for part in options.parts:
        progress(part, 0.0)
        if part == MEASURED:
            simulation.sections[part], note = measured.compare(options.measured)
            simulation.notes.append(f"{MEASURED}: off % is simulated time over measured time, minus 1; {note}")
        else:
            simulation.sections[part] = parts[part]()


def doubling(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


def all_reduces(
    options: argparse.Namespace, names: list[str], largest: int, network: sim.Network, progress: Progress
) -> Section:
    rows: list[dict[str, Cell]] = []
    for ranks in doubling(2, largest):
        progress(f"all-reduces, {ranks} ranks", ranks / largest)
        hosts = ranks / options.ranks_per_host
        for codec in names:
            for algorithm in options.algorithms:
                if codec != "raw" and algorithm in RAW_ALONE:
                    continue
                levels = (1, 2) if 1 < hosts == int(hosts) < ranks else (1,)
                each = {
                    n: sim.simulate(algorithm, ranks, options.nbytes, codec=codec, network=network, levels=n)
                    for n in levels
                }
                best = min(each, key=lambda n: each[n].seconds)
                rows.append(
                    {
                        "codec": codec,
                        "plan": algorithm,
                        "ranks": ranks,
                        "levels": best,
                        "ms": 1e3 * each[best].seconds,
                        "wire bytes": each[best].wire_bytes,
                    }
                )
    rows.sort(key=lambda row: names.index(str(row["codec"])))
    return Section(rows, by=["codec", "plan"], across="ranks", value="ms")


def break_evens(
    options: argparse.Namespace, names: list[str], largest: int, network: sim.Network, progress: Progress
) -> Section:
    sizes = [options.nbytes] if options.quick else sorted({10**6, options.nbytes})
    rows: list[dict[str, Cell]] = []
    for memory in options.memory_bandwidth:
        modelled = replace(network, memory_bandwidth=memory * 1e9, ranks_per_host=1)
        for against in ("raw", "bf16"):
            for ranks in sorted({min(n, largest) for n in ((4,) if options.quick else (4, 64, 512))}):
                progress(f"break-even, {memory:g} GB/s, against {against}, {ranks} ranks", 0.0)
                for nbytes in sizes:
                    for codec in names:
                        if codec in ("raw", against):
                            continue
                        found = sim.break_even(codec, ranks, nbytes, against=against, network=modelled)
                        rows.append(
                            {
                                "against": against,
                                "codec": codec,
                                "memory GB/s": memory,
                                "ranks": ranks,
                                "MB": nbytes / 1e6,
                                "Gbit/s": "> 1,000" if found is None else found / GBIT,
                            }
                        )
    return Section(rows, by=["memory GB/s", "against", "ranks", "MB"], across="codec", value="Gbit/s")


def training(
    options: argparse.Namespace, names: list[str], largest: int, network: sim.Network, progress: Progress
) -> Section:
    links = options.links or ([10.0, 100.0] if options.quick else [10.0, 25.0, 100.0, 400.0])
    rows: list[dict[str, Cell]] = []
    for workload in workloads(options):
        for link in links:
            modelled = replace(network, bandwidth=link * GBIT)
            for codec in names:
                progress(f"{workload.name}, {link:g} Gbit/s, {codec}", 0.0)
                for ranks in doubling(options.ranks_per_host, largest):
                    step = sim.training_step(
                        ranks,
                        workload.buckets,
                        backward=workload.backward,
                        other=workload.other,
                        codec=codec,
                        network=modelled,
                    )
                    rows.append(
                        {
                            "model": workload.name,
                            "link, Gbit/s": link,
                            "codec": codec,
                            "ranks": ranks,
                            "efficiency %": 100 * step.efficiency,
                            "steps/s": 1 / step.seconds,
                            "step ms": 1e3 * step.seconds,
                            "exposed ms": 1e3 * step.exposed,
                        }
                    )
    return Section(rows, by=["model", "link, Gbit/s", "codec"], across="ranks", value="efficiency %")


def workloads(options: argparse.Namespace) -> list[Workload]:
    return [
        Workload("ResNet-50", RESNET50, options.resnet_step),
        Workload("transformer, 1.3B", TRANSFORMER, transformer_compute(options.tokens, options.tflops * 1e12)),
    ]


def make_notes(options: argparse.Namespace, network: sim.Network) -> list[str]:
    resnet, transformer = workloads(options)
    notes = [
        f"network: {options.ranks_per_host} ranks per host share its link; latency {options.latency:g} us; within a "
        f"host {network.inside_latency / US:g} us and {network.inside_bandwidth / 1e9:g} GB/s; codecs and sums have a "
        f"memory bandwidth of {options.memory_bandwidth[0]:g} GB/s",
    ]
    if ALL_REDUCE in options.parts:
        notes.append(
            f"{ALL_REDUCE}: ms for {options.nbytes / 1e6:g} MB in fp32, links of {options.bandwidth:g} Gbit/s, with "
            "one level or with two (within and between hosts), whichever is faster"
        )
    if TOPOLOGIES in options.parts:
        notes.append(
            f"{TOPOLOGIES}: ms for {options.nbytes / 1e6:g} MB in fp32, raw, links of {options.bandwidth:g} Gbit/s, "
            f"with one level or two, whichever is faster; ranks on up to {topologies.HOSTS} hosts or on one each, and "
            f"servers on more hosts. A step computes for {resnet.compute:g} s, or {topologies.FACTOR} times as long "
            f"with a probability of {topologies.LATE:.0%}, and then exchanges. {topologies.ASYNCHRONOUS.capitalize()}: "
            f"up to {topologies.HOSTS} servers; the exchange of one worker alone, and a step of one among all"
        )
    if BREAK_EVEN in options.parts:
        notes.append(
            f"{BREAK_EVEN}: Gbit/s below which a codec is faster than raw fp32 or bf16, each with its best plan and "
            "one rank per host; a codec takes the time to read and write its bytes at this memory bandwidth; > 1,000: "
            "still faster at 1 Tbit/s; 0: slower even at 1 Mbit/s"
        )
    if TRAINING in options.parts:
        notes += [
            f"{TRAINING}: efficiency %: throughput relative to as many ranks without communication; buckets of 1 and "
            f"25 MiB use the best plan for each, and overlap with backward, which is {BACKWARD:.0%} of the compute",
            f"ASSUMED, not measured: a GPU computes {resnet.compute:g} s per step of 256 images ({resnet.name}, "
            f"{resnet.parameters / 1e6:.3g}M parameters), and {transformer.compute:.3g} s per step of "
            f"{options.tokens:,} tokens ({transformer.name}: 6 x parameters x tokens, at {options.tflops:g} TFLOP/s)",
        ]
    if SLOW_LINKS in options.parts:
        notes.append(
            f"{SLOW_LINKS}: share of time in which {options.sites} sites, each behind a link of its own, compute; "
            f"ASSUMED: {options.site_parameters:,} parameters in fp32, {options.site_step:g} s of computing per step, "
            f"{slow_links.LATENCY / US / 1e3:g} ms from site to site, and a memory bandwidth of "
            f"{slow_links.MEMORY / 1e9:g} GB/s for codecs and sums. MB/step and burst: sent by a site; peak: what a "
            "link must carry if training is not to stand still, none is enough without a delay"
        )
    if PUBLISHED in options.parts:
        notes.append(
            f"{PUBLISHED}: off % is simulated over reported, minus 1; --json also writes the inputs and the assumptions"
        )
    return notes
