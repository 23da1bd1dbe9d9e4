"""python -m benchmarks [CASE] [options]: time dltrain_ext and its peers, or simulate. Without a case, run all cases."""

import argparse
import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.harness import Table
    from benchmarks.simulation import Simulation

INTERRUPTED = 130


def other_commands() -> dict[str, ModuleType]:
    """Return the modules of the commands that are no case."""
    from benchmarks import figures, plots, sweep
    from benchmarks.machine import namespaces

    return {"hosts": namespaces, "sweep": sweep, "figures": figures, "plot": plots}


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, argparse.Namespace]]:
    """Return the options that all cases share, and the options of each case to run; none if the command is no case."""
    from benchmarks.cases import CASES
    from benchmarks.harness import at_least

    output = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    output.add_argument("--quick", action="store_true", help="measure less, for CI: all cases in two minutes")
    output.add_argument("--json", type=Path, metavar="FILE", help="write all samples to FILE, with their provenance")
    output.add_argument("--plot", type=Path, metavar="DIR", help="write the plots of each case to DIR, as PNG and SVG")
    shared = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS, parents=[output])
    shared.add_argument("--device", choices=["cpu", "cuda"], help="device of the tensors (default: cpu)")
    shared.add_argument(
        "--ranks",
        type=at_least(1),
        help="number of processes, in the cases that start some (default: WORLD_SIZE, else 4; ddp, sharded: 2)",
    )
    shared.add_argument("--list", action="store_true", help="list the cases and exit")
    shared.add_argument("--compare", type=Path, metavar="OLD.json", help="compare the results with a saved run")
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, parents=[shared])
    commands = parser.add_subparsers(dest="case", metavar="CASE", title="cases (CASE --help lists their options)")
    for name, case in CASES.items():
        summary = case.__doc__.splitlines()[0]
        case.add_options(commands.add_parser(name, help=summary, description=summary, parents=[shared]))
    for name, module in other_commands().items():
        summary = module.__doc__.splitlines()[0]
        parents = [output] if name == "sweep" else []
        module.add_options(commands.add_parser(name, help=summary, description=summary, parents=parents))

    defaults = {"quick": False, "device": "cpu", "ranks": None, "list": False}
    defaults |= dict.fromkeys(("json", "plot", "compare"))
    given = parser.parse_args(argv, argparse.Namespace(**defaults))
    if given.case in other_commands():
        return given, {}
    if given.case:
        return given, {given.case: given}
    return given, {
        name: parser.parse_args([*argv, name, *(() if given.quick else case.OVERVIEW)], argparse.Namespace(**defaults))
        for name, case in CASES.items()
    }


def main(argv: list[str]) -> int:
    try:
        from benchmarks import compare, plots, report, saved_results, summary
        from benchmarks.cases import CASES
        from benchmarks.harness import Failure, check_device

        others = other_commands()
    except ImportError as error:
        reason = " ".join(str(error).split())
        if error.name:  # otherwise the error is from dltrain_ext, and its text says what to run
            reason += ". Run, in the root of the repository: pip install torch && pip install '.[benchmarks]'"
        print(f"benchmarks: {reason}", file=sys.stderr)
        return 2

    shared, chosen = parse(argv)
    reports = os.environ.get("RANK", "0") == "0"  # under torchrun, only rank 0 reports
    console = report.make_console(quiet=not reports)
    if shared.list:
        for name, case in CASES.items():
            console.print(f"{name:16}{case.__doc__.splitlines()[0]}", soft_wrap=True)
        return 0
    try:
        if command := others.get(shared.case):
            return command.run(shared)
        check_device(shared.device)
        old = saved_results.load(shared.compare, "--compare") if shared.compare else None
    except Failure as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    origin = report.provenance()
    console.print(report.headline(origin), style="dim", markup=False)
    tables, status = run(console, chosen)
    measured = saved_results.Run(origin, tables, interrupted=status == INTERRUPTED)
    if shared.case:
        for table in tables.values():
            report.show(console, table)
    else:
        summary.show(console, tables)
    if old:
        compare.show(console, shared.compare, old, measured)
    if shared.json and reports:
        saved_results.write(shared.json, measured)
    for name, table in tables.items() if shared.plot and reports else ():
        for path in plots.draw(shared.plot, name, table):
            console.print(f"wrote {path}")
    return status or int(not all(table.correct for table in tables.values()))


def run(console: "Console", chosen: dict[str, argparse.Namespace]) -> tuple[dict[str, "Table | Simulation"], int]:
    """Run the cases. Return their tables, also that of an interrupted case, and the exit status (0: none has failed).

    After an interrupt, Ctrl-C has no effect: all that is left to do is to show the results.
    """
    from benchmarks import report
    from benchmarks.cases import CASES
    from benchmarks.harness import Failure

    tables: dict[str, Table | Simulation] = {}
    status = 0
    with report.live(console, list(chosen)) as begin:
        try:
            for name, options in chosen.items():
                try:
                    CASES[name].run(options, begin(name), partial(tables.__setitem__, name))
                except Failure as error:
                    status = 1
                    console.print(f"{name} failed: {error}", style="bold red", markup=False, soft_wrap=True)
                    if console.quiet:
                        print(f"benchmarks: {name} failed: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            status = INTERRUPTED
            console.print("[bold red]interrupted:[/] these are the results so far")
    return tables, status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
