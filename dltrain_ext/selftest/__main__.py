"""python -m dltrain_ext.selftest: checks in two minutes whether this installation is right, and how fast the links are.

Run alone it starts its ranks on this machine; with torchrun, also on several hosts, it is one of those ranks. The exit
status is 0 if no check failed. With --json FILE all results are written for a bug report, again after each check, so
that the file is of use after a crash too.
"""

import argparse
import sys

from dltrain_ext.selftest import command
from dltrain_ext.selftest.session import chosen, run


def main(argv: list[str]) -> int:
    return command.on_ranks("selftest", run, parse(argv, command.given_ranks()))


def parse(argv: list[str], given: int | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dltrain_ext.selftest", description=__doc__.splitlines()[0])
    command.add_options(parser)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller checks: about half a minute")
    parser.add_argument("--faults", action="store_true", help="also kill a rank, in processes started for this")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], help="check only this device (default: the CPU, and CUDA if available)"
    )
    names = [check.name for check in chosen()]
    parser.add_argument("--only", metavar="CHECK", choices=names, help=f"run only this check: {', '.join(names)}")
    options = parser.parse_args(argv)
    command.check_options(parser, options, given)
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
