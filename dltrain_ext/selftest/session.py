"""One run of the checks on every rank: all ranks make each check, and then exchange its outcomes."""

import argparse
import faulthandler
import os
import time
import traceback
from dataclasses import asdict

import torch
import torch.distributed as dist

from dltrain_ext import _ops, info
from dltrain_ext.selftest import checks, faults, links, ranks, together
from dltrain_ext.selftest.report import FAILED, PASSED, SKIPPED, Check, Found, Outcome, Report, Site, Skip

HANGS = 120  # seconds after which a check is ended


def without_cuda() -> str | None:
    """Returns why there are no checks on CUDA, or None if there are."""
    if not _ops.built_with_cuda:
        return f"this build is without CUDA ({info.collect()['CUDA']})"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def run(options: argparse.Namespace) -> int:
    """Runs all checks. Every rank returns the same status."""
    rank = dist.get_rank()
    reasons = ranks.exchange("without CUDA", without_cuda())
    missing = next((f"{reason} (rank {rank})" for rank, reason in enumerate(reasons) if reason), None)
    devices = [torch.device("cpu")] if options.device != "cuda" else []
    if options.device != "cpu" and not missing:
        ranks.take_gpu()
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    gpus = [str(torch.cuda.get_device_name(device)) for device in devices if device.type == "cuda"]
    hosts = ranks.exchange("hosts", [os.uname().nodename, *gpus])
    facts = {**info.collect(), "ranks": hosts, "quick": options.quick}
    report = Report(facts, options.json, is_rank_0=rank == 0)
    if rank == 0:
        print("\n".join(f"{name:<16}{value}" for name, value in facts.items()), flush=True)
    for device in devices:
        for check in chosen(options.faults, options.only):
            outcome = attempt(check, Site(device, rank, len(hosts), options.quick))
            outcomes = ranks.exchange(f"{check.name} on {device.type}", asdict(outcome))
            report.add(Outcome.of_all([Outcome(**each) for each in outcomes]))
    if options.device is None and missing:
        report.skip("cuda", missing)
    report.close()
    return int(report.failed > 0 or not devices)


def chosen(with_faults: bool = True, only: str | None = None) -> list[Check]:
    """Returns the check of that name, or all checks in their order."""
    everything = [*checks.CHECKS, *together.CHECKS, *links.CHECKS, *faults.CHECKS, *together.LAST]
    if only:
        return [check for check in everything if check.name == only]
    return [check for check in everything if with_faults or check not in faults.CHECKS]


def attempt(check: Check, site: Site) -> Outcome:
    start = time.monotonic()
    # A kernel that hangs cannot be interrupted: the stacks are printed, and the process ends.
    faulthandler.dump_traceback_later(HANGS, exit=True)
    found, trace = Found(""), ""
    try:
        found, outcome = check.run(site), PASSED
    except Skip as skip:
        found, outcome = Found(str(skip)), SKIPPED
    except Exception as error:
        found, outcome = Found(" ".join(f"{type(error).__name__}: {error}".split())[:300]), FAILED
        trace = traceback.format_exc()
    finally:
        faulthandler.cancel_dump_traceback_later()
    return Outcome(check.name, site.device.type, outcome, time.monotonic() - start, *found, trace)
