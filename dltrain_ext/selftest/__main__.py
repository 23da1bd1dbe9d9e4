"""python -m dltrain_ext.selftest: checks in two minutes whether this installation is right, and how fast the links are.

Run alone it starts its ranks on this machine; with torchrun, also on several hosts, it is one of those ranks. The exit
status is 0 if no check failed. With --json FILE all results are written for a bug report, again after each check, so
that the file is of use after a crash too.
"""

import argparse
import os
import sys
from pathlib import Path

import torch.multiprocessing as mp

from dltrain_ext.selftest import ranks
from dltrain_ext.selftest.session import chosen, run, without_cuda


def main(argv: list[str]) -> int:
    under_torchrun = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    options = parse(argv, int(os.environ["WORLD_SIZE"]) if under_torchrun else None)
    if under_torchrun:
        with ranks.joined():
            return run(options)
    try:
        return ranks.launch(options.ranks, run, options)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        print(f"selftest: a rank crashed in the check after the last line: {error}", file=sys.stderr)
        return 1


def parse(argv: list[str], given: int | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dltrain_ext.selftest", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="processes to start here (default 2), or those that torchrun started")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller checks: about half a minute")
    parser.add_argument("--faults", action="store_true", help="also kill a rank, in processes started for this")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], help="check only this device (default: the CPU, and CUDA if available)"
    )
    names = [check.name for check in chosen()]
    parser.add_argument("--only", metavar="CHECK", choices=names, help=f"run only this check: {', '.join(names)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE, for a bug report")
    options = parser.parse_args(argv)
    if given and options.ranks not in (None, given):
        parser.error(f"--ranks: expected {given}, as torchrun has started, got {options.ranks}")
    options.ranks = given or (2 if options.ranks is None else options.ranks)
    if options.ranks < 1:
        parser.error(f"--ranks: expected at least 1, got {options.ranks}")
    if options.device == "cuda" and (reason := without_cuda()):
        parser.error(f"--device: expected cpu, since {reason}, got cuda")
    writes = options.json is not None and os.environ.get("RANK", "0") == "0"
    if writes and (options.json.is_dir() or not options.json.absolute().parent.is_dir()):
        parser.error(f"--json: expected a file in a folder that exists, got {options.json}")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
