"""Runs commands as a user types them in a shell, in this process, which has already imported torch."""

import contextlib
import importlib.abc
import io
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ranks import ROOT

from benchmarks.__main__ import main
from benchmarks.machine import namespaces


class Done(NamedTuple):
    """The result of a command, as a shell sees it."""

    returncode: int
    stdout: str
    stderr: str


def python(*arguments: object, cwd: Path | None = None, **environment: str) -> Done:
    """Run Python in a process of its own, for tests of its start."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)
    return Done(done.returncode, done.stdout, done.stderr)


def torchrun(ranks: int, *arguments: object, cwd: Path | None = None, **environment: str) -> Done:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    return python(*launcher, *arguments, cwd=cwd, **environment)


def benchmarks(*arguments: object, **environment: str) -> Done:
    """Run python -m benchmarks."""
    argv = [*map(str, arguments)]
    return _done(partial(main, argv), [str(ROOT / "benchmarks" / "__main__.py"), *argv], environment)


def interruptible(*arguments: object, executable: str = sys.executable) -> Done:
    """Run the benchmarks in a process of its own, with the signal handlers of a process that a shell has started.

    This function is in this module because importing a test module would check for emulated hosts.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.executable = executable
    return benchmarks(*arguments)


def hosts(*arguments: object) -> int:
    """Run python -m benchmarks hosts, whose ranks write to this process's output; return the exit status."""
    try:
        return main(["hosts", *map(str, arguments)])
    except SystemExit as exit:
        return int(exit.code or 0)


def on_hosts(*arguments: object, script: str) -> int:
    return hosts(*arguments, "--", sys.executable, "-c", script)


def example(name: str, *arguments: object, **environment: str) -> Done:
    """Run an example as a single rank, without a launcher."""
    script = ROOT / "examples" / name
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(script.parent)
        patch.delenv("RANK", raising=False)
        run = partial(runpy.run_path, str(script), run_name="__main__")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Unable to enable fault handler")  # torch's record() cannot, under pytest
            return _done(run, [str(script), *map(str, arguments)], environment)


def _done(call: Callable[[], Any], argv: list[str], environment: dict[str, str]) -> Done:
    threads = torch.get_num_threads()
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        torch.set_num_threads(1)  # on a busy machine two threads would wait for each other
        patch.setattr(sys, "argv", argv)
        for variable, value in ({"COLUMNS": "200"} | environment).items():
            patch.setenv(variable, value)
        try:
            status = call()
        except SystemExit as end:
            status = end.code
        finally:
            torch.set_num_threads(threads)
    if isinstance(status, str):  # the interpreter would print it
        return Done(1, out.getvalue(), f"{err.getvalue()}{status}\n")
    return Done(status if isinstance(status, int) else 0, out.getvalue(), err.getvalue())


def hide(patch: pytest.MonkeyPatch, package: str) -> None:
    """Make a package appear to be missing, even if it has already been imported."""

    class Missing(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name.split(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        patch.delitem(sys.modules, name)
    patch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])


@cache
def why_no_hosts() -> str | None:
    """Return why this machine cannot emulate hosts; None if it can."""
    if missing := [tool for tool in ("ip", "tc") if not shutil.which(tool)]:
        return f"no {' and no '.join(missing)} (apt install iproute2)"
    if os.geteuid():
        return "not root"
    name = f"dltrain-{os.getpid()}-switch"
    try:
        for command in (
            f"ip netns add {name}",
            f"ip -n {name} link add bridge type bridge",
            f"ip -n {name} link add type veth",
            f"tc -n {name} qdisc add dev lo root tbf rate 1gbit burst 64kb latency 400ms",
        ):
            done = subprocess.run(command.split(), capture_output=True, text=True)
            if done.returncode:
                return f"{command}: {done.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return None


def skip_without_hosts() -> None:
    if reason := why_no_hosts():
        pytest.skip(f"needs network namespaces: {reason}")


class Cluster(NamedTuple):
    """Emulated hosts, on each of which a process runs."""

    spaces: list[str]
    ranks: list["subprocess.Popen[bytes]"]

    def set_link(self, host: int, state: str) -> None:
        """Set the link of a host "up" or "down"."""
        switch = self.spaces[0].removesuffix("0") + "switch"
        namespaces.call("ip", "-n", switch, "link", "set", f"host{host}", state)


@contextlib.contextmanager
def cluster(hosts: int, code: str) -> Iterator[Cluster]:
    """Run Python code as one rank of torch's default group on each of some emulated hosts."""
    skip_without_hosts()
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    with namespaces.cluster(hosts, "none") as spaces:
        ranks = []
        for rank, space in enumerate(spaces):
            environment = os.environ | namespaces.variables(rank, len(spaces), 1) | path
            ranks.append(subprocess.Popen(["ip", "netns", "exec", space, sys.executable, "-c", code], env=environment))
        yield Cluster(spaces, ranks)


def wait_for(*paths: Path, within: float = 120) -> None:
    """Wait until these files exist."""
    until = time.monotonic() + within
    while missing := [path.name for path in paths if not path.exists()]:
        assert time.monotonic() < until, f"no {', '.join(missing)} after {within} s"
        time.sleep(0.05)
