"""python -m benchmarks [CASE] [options]: times dltrain_ext against its peers, or simulates; without a case, all."""

import argparse
import os
import sys
from pathlib import Path


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, argparse.Namespace]]:
    """The options that all cases share, and those of each case that shall run: none for `hosts`, which is no case."""
    from benchmarks import hosts
    from benchmarks.cases import CASES

    shared = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    shared.add_argument("--quick", action="store_true", help="smaller and fewer, for CI: well under a minute in all")
    shared.add_argument("--device", choices=["cpu", "cuda"], help="where the tensors are (default cpu)")
    shared.add_argument("--list", action="store_true", help="list the cases and stop")
    shared.add_argument("--json", type=Path, metavar="FILE", help="write everything, with provenance")
    shared.add_argument("--plot", type=Path, metavar="DIR", help="write a PNG per case, or several")
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, parents=[shared])
    commands = parser.add_subparsers(dest="case", metavar="CASE", title="cases (CASE --help lists the options of one)")
    for name, case in CASES.items():
        summary = case.__doc__.splitlines()[0]
        case.add_options(commands.add_parser(name, help=summary, description=summary, parents=[shared]))
    summary = hosts.__doc__.splitlines()[0]
    hosts.add_options(commands.add_parser("hosts", help=summary, description=summary))

    defaults = {"quick": False, "device": "cpu", "list": False, "json": None, "plot": None}
    given = parser.parse_args(argv, argparse.Namespace(**defaults))
    if given.case == "hosts":
        return given, {}
    if given.case:
        return given, {given.case: given}
    return given, {name: parser.parse_args([*argv, name], argparse.Namespace(**defaults)) for name in CASES}


def main(argv: list[str]) -> int:
    try:
        from benchmarks import hosts, report
        from benchmarks.cases import CASES
        from benchmarks.harness import Failure, check_device
    except ImportError as error:
        reason = " ".join(str(error).split())
        if error.name:  # else it is dltrain_ext that speaks, and says what to run
            reason += ". Run, in the root of the repository: pip install torch && pip install '.[benchmarks]'"
        print(f"benchmarks: {reason}", file=sys.stderr)
        return 2

    shared, chosen = parse(argv)
    reports = os.environ.get("RANK", "0") == "0"  # of torchrun's ranks the first
    console = report.make_console(quiet=not reports)
    if shared.list:
        for name, case in CASES.items():
            console.print(f"{name:16}{case.__doc__.splitlines()[0]}", soft_wrap=True)
        return 0
    try:
        if shared.case == "hosts":
            return hosts.run(shared)
        check_device(shared.device)
    except Failure as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    origin = report.provenance()
    console.print(report.headline(origin), style="dim", markup=False)
    tables, status = {}, 0
    try:
        for name, options in chosen.items():
            try:
                with report.live(console, name) as progress:
                    tables[name] = CASES[name].run(options, progress)
            except Failure as error:
                status = 1
                console.print(f"{name} failed: {error}", style="bold red", markup=False, soft_wrap=True)
                if not reports:
                    print(f"benchmarks: {name} failed: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        status = 130
        console.print("[bold red]interrupted[/]")
    for table in tables.values():
        report.show(console, table)
    if shared.json and reports:
        report.write_json(shared.json, origin, tables)
    for name, table in tables.items() if shared.plot and reports else ():
        draw = getattr(CASES[name], "plot", report.plot)
        for path in draw(shared.plot, name, table):
            console.print(f"wrote {path}")
    return status or int(not all(table.correct for table in tables.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
