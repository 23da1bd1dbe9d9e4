"""Skips tests whose requirements are missing: a GPU, or packages that only some tests import.

The imports of a test module are detected; the mark `needs` names the packages that child processes need. A test with
the fixture `device` runs on the CPU and, marked gpu, on a CUDA device. Without arguments all tests run,
in several processes.
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dltrain_ext import _ops

OPTIONAL = {"expecttest", "hypothesis", "matplotlib", "numpy", "rich", "sklearn", "yaml"}


# torch looks up the name of each client of a store. Where no name server answers, that is 5 s in which the store serves
# nobody, and communicators of other tests miss their deadlines.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run all tests in several processes, two per core since many tests wait; not if the command line selects tests."""
    option = config.option
    if "PYTEST_XDIST_WORKER" in os.environ:
        option.loadgroup = True  # a worker only sees the command line
        return
    told = config.args_source is not pytest.Config.ArgsSource.TESTPATHS or option.keyword or option.usepdb
    counts = getattr(option, "cov_source", None)  # pytest-cov has already checked whether there are several processes
    if told or counts or option.collectonly or not config.pluginmanager.hasplugin("xdist"):
        return
    if option.numprocesses is None and option.dist == "no":
        option.numprocesses, option.dist = min(8, 2 * len(os.sched_getaffinity(0))), "loadgroup"
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # the processes share the cores


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop() -> Any:
    """End the idle worker processes before pytest-cov sums up the coverage."""
    try:
        return (yield)
    finally:
        if "benchmarks.machine.processes" in sys.modules:
            sys.modules["benchmarks.machine.processes"].end()


class Module(pytest.Module):
    """A test module that is skipped, with the name of the package, if it imports a missing optional package."""

    def collect(self) -> Any:
        try:
            return super().collect()
        except self.CollectError as error:
            cause = error.__cause__
            package = (cause.name or "").split(".")[0] if isinstance(cause, ModuleNotFoundError) else ""
            if package in OPTIONAL:
                pytest.skip(f"{package} is not installed", allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return Module.from_parent(parent, path=module_path)


def no_gpu() -> str | None:
    """Return why tests marked gpu cannot run; None if they can."""
    if not _ops.built_with_cuda:
        return "this build of dltrain_ext is without CUDA"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make a default group of this process alone."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    without_gpu = no_gpu()
    for item in items:
        reasons = [
            f"{package} is not installed"
            for needs in item.iter_markers("needs")
            for package in needs.args
            if not _is_installed(package)
        ]
        if without_gpu and item.get_closest_marker("gpu"):
            reasons.append(without_gpu)
        if reasons:
            item.add_marker(pytest.mark.skip(reason=", ".join(reasons)))


@functools.cache
def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
