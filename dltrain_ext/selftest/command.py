"""What commands have in common that run on ranks: torchrun's, of which the process is one, or some that they start."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch.multiprocessing as mp

from dltrain_ext.selftest import ranks
from dltrain_ext.selftest.session import without_cuda

Run = Callable[[argparse.Namespace], int]


def given_ranks() -> int | None:
    """Returns how many ranks torchrun has started; None without it."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else None


def on_ranks(name: str, run: Run, options: argparse.Namespace) -> int:
    """Calls ``run(options)`` on each rank, and returns what rank 0 returns; 1 after a crash."""
    if given_ranks() is not None:
        with ranks.joined():
            return run(options)
    try:
        return ranks.launch(options.ranks, run, options)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        print(f"{name}: a rank crashed after the last line: {error}", file=sys.stderr)
        return 1


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, help="processes to start here (default 2), or those that torchrun started")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE, for a bug report")


def check_options(
    parser: argparse.ArgumentParser, options: argparse.Namespace, given: int | None, least: int = 1
) -> None:
    """Completes and checks these options, and ``device``."""
    if given and options.ranks not in (None, given):
        parser.error(f"--ranks: expected {given}, as torchrun has started, got {options.ranks}")
    options.ranks = given or (2 if options.ranks is None else options.ranks)
    if options.ranks < least:
        parser.error(f"--ranks: expected at least {least}, got {options.ranks}")
    if options.device == "cuda" and (reason := without_cuda()):
        parser.error(f"--device: expected cpu, since {reason}, got cuda")
    writes = options.json is not None and os.environ.get("RANK", "0") == "0"
    if writes and (options.json.is_dir() or not options.json.absolute().parent.is_dir()):
        parser.error(f"--json: expected a file in a folder that exists, got {options.json}")
