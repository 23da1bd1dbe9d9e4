"""Run the commands that the documented figures are from, and write the files and plots in benchmarks/results anew."""

import argparse
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import plots, report, saved_results
from benchmarks.harness import Failure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SHOWN = 20  # last lines of the output of a command that has failed

LARGE = (
    "allreduce -b 16M -e 16M --codecs raw,fp16,int8,int4,sign --algorithms ring,halving_doubling,direct,double_tree "
    "-n 12 -w 3"
)
IN_TWO_LEVELS = "allreduce -b 16M -e 16M --codecs raw,int8,int4 --algorithms ring,direct,halving_doubling --levels 1,2"
ALL_PLANS = (
    "allreduce -b 64K -e 16M -f 4 --codecs raw,fp16,int8,int4 -n 7 -w 2 "
    "--algorithms ring,tree,double_tree,recursive_doubling,halving_doubling,direct,oneshot"
)
# By link: the options of `hosts`, or none for this machine alone; then the case and its options by file.
FIGURES: dict[str, dict[str, str]] = {
    "": {
        "cpu/optim": "optim --seconds 15",
        "cpu/optim-more": "optim --optimizers nadam,radam,rmsprop,adadelta,adamax,lion,lamb,ftrl,adam,adagrad "
        "--workloads one,resnet50,many --no-compile",
        "cpu/optim-int8": "optim --optimizers adamw --workloads one,resnet50 "
        "--peers 'torch fused,ours int8 state,bitsandbytes 8-bit,torchao 8-bit'",
        "cpu/amp": "amp",
        "cpu/amp-rmsprop": "amp --optimizers rmsprop --no-compile",
        "cpu/masters": "masters",
        "cpu/muon": "muon",
        "cpu/codec": "codec",
        "techniques": "techniques -n 4",
        "kfac/exchange-resnet50-4-ranks": "kfac --parts factors,inverses --largest 4608 -n 3",
        "kfac/work-1200": "kfac --parts inverting,preconditioning -n 3",
        "allreduce/shm-2-ranks": "allreduce --ranks 2 --algorithms auto --burst 200 -b 4K -e 16M -f 4 -n 20",
        "allreduce/shm-2-ranks-codecs": "allreduce --ranks 2 --algorithms auto --codecs raw,int4,int8,bf16,fp16 "
        "-b 16M -e 16M -n 20",
        "allreduce/shm-2-ranks-tuned": "allreduce --ranks 2 --tune -b 4K -e 16M -f 4 -n 20 --burst 200",
        "allreduce/shm-2-ranks-tuned-again": "allreduce --ranks 2 --tune -b 4K -e 16M -f 4 -n 20 --burst 200",
        "allreduce/shm-4-ranks": "allreduce --ranks 4 --algorithms auto --burst 200 -b 4K -e 16M -f 4 -n 20",
        "allreduce/shm-4-ranks-tuned": "allreduce --ranks 4 --tune -b 4K -e 16M -f 4 -n 20 --burst 200",
        "allreduce/shm-4-ranks-tuned-again": "allreduce --ranks 4 --tune -b 4K -e 16M -f 4 -n 20 --burst 200",
        "allreduce/allreduce-loopback": "allreduce --transport gloo",
        "allreduce/tuned-loopback": "allreduce --ranks 4 --transport gloo --tune -b 1K -e 64M -f 4 -n 25 -w 2",
        "collectives/broadcast-loopback": "broadcast -b 4K -f 4 --codecs raw,int8 --algorithms tree,direct",
        "collectives/reduce-loopback": "reduce -b 4K -f 4 --codecs raw,int8 --algorithms tree,direct",
        "collectives/reduce_scatter-loopback": "reduce_scatter -b 4K -f 4 --codecs raw,int8 --algorithms direct,ring",
        "collectives/all_gather-loopback": "all_gather -b 4K -f 4 --codecs raw,int8 --algorithms direct,ring",
        "ddp/ddp-2-ranks": "ddp --ranks 2 -n 40",
        "ddp/one-host-2-ranks": "ddp --ranks 2 --codecs raw,fp16,int8 -n 20",
        "ddp/metrics-2-ranks": "ddp --codecs int8 -n 8",
        "ddp/budget-2-ranks": "ddp --workloads backward --codecs int8,int4 --max-error 0.2,0.02,0.000001 -n 60",
        "sharded/zero-loopback-2-ranks": "sharded --workloads zero --ranks 2 -n 10",
        "sharded/zero-loopback-4-ranks": "sharded --workloads zero --ranks 4 -n 8",
        "store/step-loopback-2-ranks": "store --workloads step --ranks 2",
        "store/step-loopback-4-ranks": "store --workloads step --ranks 4",
        "store/exchange-loopback-2-ranks": "store --workloads exchange --ranks 2",
        "store/exchange-loopback-3-ranks": "store --workloads exchange --ranks 3",
        "store/stragglers-4-ranks": "store --workloads stragglers --ranks 4",
        "store/update": "store --workloads update",
        "local_sgd/share": "local_sgd --only share,bytes,burst --rate 100mbit,10mbit --turns 1 --rounds 1 --delay 20 "
        "--codecs int4",
        "local_sgd/share-10mbit": "local_sgd --only share --rate 10mbit --turns 1 --rounds 2 --delay 24 --codecs int4",
        "local_sgd/work": "local_sgd --only work --rounds 20",
        "local_sgd/faults": "local_sgd --only faults --rate 100mbit --turns 2 --sync-every 12",
        "local_sgd/slow-site": "local_sgd --only slow_site",
        "local_sgd/peers": "local_sgd --only peers --rate 100mbit",
        "membership/loopback": "membership --elements 13000",
        "population/copy-loopback": "population",
        "ddp/sweep-4-hosts": "sweep",
        "simulate/simulated-scaling": "simulate --parts all-reduce,training",
        "simulate/simulate-published": "simulate --parts published",
        "simulate/simulate-slow-links": "simulate --parts slow-links",
    },
    "--hosts 2 --rate 1gbit": {
        "ddp/ddp-2-hosts-1gbit": "ddp -n 20 --codecs raw,int8,int4",
        "population/copy-1gbit": "population -n 3",
        "store/step-2-hosts-1gbit": "store --workloads step -b 16M",
        "simulate/simulate-2-hosts-1gbit": ALL_PLANS,
    },
    "--hosts 2 --per-host 2 --rate 1gbit": {"allreduce/allreduce-2-hosts-x-2-1gbit": f"{IN_TWO_LEVELS} -n 12 -w 3"},
    "--hosts 2 --per-host 3 --rate 1gbit": {"allreduce/allreduce-2-hosts-x-3-1gbit": f"{IN_TWO_LEVELS} -n 10 -w 3"},
    "--hosts 2 --rate 10gbit": {"store/step-2-hosts-10gbit": "store --workloads step -b 16M"},
    "--hosts 3 --rate 1gbit": {
        "store/exchange-3-hosts-1gbit-1M": "store --workloads exchange -b 1M",
        "store/exchange-3-hosts-1gbit-16M": "store --workloads exchange -b 16M",
        "simulate/simulate-3-hosts-1gbit": ALL_PLANS,
    },
    "--hosts 4 --rate 1gbit": {
        "allreduce/allreduce-4-hosts-1gbit": LARGE,
        "allreduce/tuned-4-hosts-1gbit-to-4MiB": "allreduce --tune -b 1K -e 4M -f 4 -n 21 -w 2",
        "allreduce/tuned-4-hosts-1gbit-from-16MiB": "allreduce --tune -b 16M -e 64M -f 4 -n 7 -w 1",
        "collectives/broadcast-4-hosts-1gbit": "broadcast -b 64K -f 16 -n 8 --codecs raw,int8 --algorithms tree,direct",
        "collectives/reduce-4-hosts-1gbit": "reduce -b 64K -f 16 -n 8 --codecs raw,int8 --algorithms tree,direct",
        "collectives/reduce_scatter-4-hosts-1gbit": "reduce_scatter -b 64K -f 16 -n 8 --codecs raw,int8 "
        "--algorithms direct,ring",
        "collectives/all_gather-4-hosts-1gbit": "all_gather -b 64K -f 16 -n 8 --codecs raw,int8 "
        "--algorithms direct,ring",
        "ddp/ddp-4-hosts-1gbit": "ddp -n 14",
        "ddp/budget-4-hosts-1gbit": "ddp --workloads backward --codecs int8,int4 --max-error 0.2,0.02,0.000001 -n 60",
        "sharded/gather-4-hosts-1gbit": "sharded --workloads gather --layers 3 --width 2048 -n 10",
        "sharded/gather-4-hosts-1gbit-1024": "sharded --workloads gather -n 10",
        "sharded/fsdp-4-hosts-1gbit": "sharded --workloads fsdp --layers 3 --width 2048 -n 6",
        "sharded/zero-4-hosts-1gbit": "sharded --workloads zero -n 6",
        "membership/store-1gbit": "membership --only store --kills 4",
        "simulate/simulate-4-hosts-1gbit": ALL_PLANS,
    },
    "--hosts 4 --rate 100mbit": {"membership/diloco-100mbit": "membership --only diloco"},
    "--hosts 4 --rate 10gbit": {
        "allreduce/allreduce-4-hosts-10gbit": LARGE,
        "ddp/ddp-4-hosts-10gbit": "ddp -n 14",
    },
}

# The plots that the documents show, by figure.
DRAWN = {
    "allreduce/shm-4-ranks": ["allreduce.png"],
    "cpu/optim": ["optim.png"],
    "ddp/sweep-4-hosts": ["sweep.png"],
    "simulate/simulated-scaling": ["simulated-efficiency.png", "simulated-topologies.png"],
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Each figure is a run of one case; a file is replaced when its run has ended without an error. Figures of "
        "emulated hosts need root and iproute2."
    )
    parser.add_argument("--commands", action="store_true", help="print the commands, and run nothing")
    parser.add_argument("--quick", action="store_true", help="measure less, as a test of the commands")
    parser.add_argument("--to", type=Path, default=RESULTS, metavar="DIR", help="where to write (default: %(default)s)")
    parser.add_argument("names", metavar="NAME", nargs="*", help="the beginning of names, such as cpu/ (default: all)")


def commands(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the arguments of `python -m benchmarks` by the names of the figures that begin with one of these."""
    python = [sys.executable, "-m", "benchmarks"]
    found = {}
    for link, figures in FIGURES.items():
        before = ["hosts", *link.split(), "--", *python] if link else []
        for name, case in figures.items():
            if name.startswith(tuple(names)) or not names:
                found[name] = [*before, *shlex.split(case)]
    if unknown := [name for name in names if not any(figure.startswith(name) for figure in found)]:
        raise Failure(f"figures: expected the beginning of the name of a figure, got {unknown[0]!r}")
    return found


def run(options: argparse.Namespace) -> int:
    """Run the commands one after another; return 1 if one of them has failed."""
    chosen, console = commands(options.names), report.make_console()
    if "dirty" in (commit := report.provenance()["commit"]) and not options.commands:
        raise Failure(f"figures: expected a build of a commit, got {commit}: commit, and build again")
    failed = []
    for name, arguments in chosen.items():
        console.print(f"{name}: {shlex.join(arguments)}", soft_wrap=True, markup=False)
        if options.commands:
            continue
        began, status = time.monotonic(), measure(name, arguments, options.to, options.quick)
        console.print(f"  {'failed' if status else 'done'} after {time.monotonic() - began:.0f} s")
        failed += [name] if status else []
    if failed:
        console.print(f"failed: {', '.join(failed)}", style="bold red")
    return int(bool(failed))


def measure(name: str, arguments: list[str], folder: Path, quick: bool) -> int:
    """Run a command of this program, write its file and plots, and show the end of its output if it fails."""
    with tempfile.TemporaryDirectory() as scratch:
        written, path = Path(scratch, "figures.json"), folder / f"{name}.json"
        command = [sys.executable, "-m", "benchmarks", *arguments, *["--quick"] * quick, "--json", str(written)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            print(*done.stdout.splitlines()[-SHOWN:], sep="\n", file=sys.stderr)
            return done.returncode
        measured = saved_results.load(written, "--json")
        saved_results.write(path, measured)
        for case, table in measured.tables.items() if name in DRAWN else ():
            for plot in plots.draw(Path(scratch), case, table):
                if plot.name in DRAWN[name]:
                    shutil.copy(plot, path.parent)
    return 0
