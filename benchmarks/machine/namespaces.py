"""Run a command on emulated hosts: network namespaces connected by links of a limited rate, one process per rank."""

import argparse
import contextlib
import ipaddress
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from benchmarks.harness import Failure, at_least
from benchmarks.machine.signals import catch_signals

ROOT = Path(__file__).parents[2]
LINK = "eth0"
PORT = 29500
NETWORK = ipaddress.ip_network("10.0.0.0/16")
RATE = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)bit")
NAME = re.compile(r"dltrain-(\d+)-(\d+)-(switch|\d+)")  # process id of the run, and its start time, as ids are reused
BURST = "64kb"
OFFLOAD = "60000"  # bytes of an offloaded packet; one larger than the burst is segmented, which halves the rate
TAIL = 20


def rate(text: str) -> str:
    """An argparse type: a rate in the format of tc, or none."""
    if text != "none" and not RATE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate: expected, for example, 1gbit, 2.5gbit, or none")
    return text


def seconds(text: str) -> float:
    """An argparse type: milliseconds, which it converts to seconds."""
    return _bounded(text, 10_000, "milliseconds") / 1e3


def share(text: str) -> float:
    """An argparse type: a percentage, which it converts to a fraction."""
    return _bounded(text, 100, "percent") / 1e2


def _bounded(text: str, most: float, unit: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (number := float(text)) <= most:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of {unit} from 0 to {most:g}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] -- COMMAND ..."
    parser.epilog = (
        "COMMAND runs once per rank, with the variables that torchrun sets. The output of rank 0 is shown, and the "
        f"last {TAIL} lines of another rank if it fails. The exit status is that of the first rank that fails. The "
        "ranks share the cores of this machine: OMP_NUM_THREADS is 1 unless it is set. When a run ends, its ranks, "
        "their child processes and the network are removed; if a run is killed by SIGKILL, the next run, or --clean, "
        "removes them. With --delay or --loss a process forwards the packets; it can forward some thousand packets "
        "per second, which is enough for links of up to about 20 Mbit/s. Needs root and iproute2."
    )
    parser.add_argument("--hosts", type=at_least(1), default=4, help="number of hosts (default: %(default)s)")
    parser.add_argument("--per-host", type=at_least(1), default=1, help="ranks on each host (default: %(default)s)")
    parser.add_argument(
        "--rate",
        type=rate,
        default="1gbit",
        help="rate of each host's link in each direction, or none (default: %(default)s)",
    )
    parser.add_argument(
        "--delay", type=seconds, default=0.0, metavar="MS", help="delay of packets between hosts (default: no delay)"
    )
    parser.add_argument(
        "--loss", type=share, default=0.0, metavar="PERCENT", help="packets lost at random (default: no loss)"
    )
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="write the output of each rank to a file named by its host and rank"
    )
    parser.add_argument("--clean", action="store_true", help="remove what killed runs have left, and run nothing")
    parser.add_argument("command", metavar="COMMAND", nargs="*", help="the command that each rank runs")


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status. The ranks and the network are always removed."""
    if options.clean == bool(options.command):
        raise Failure("hosts: expected either -- COMMAND or --clean")
    check_tools()
    with catch_signals() as caught:
        if options.clean:
            return clean()
        show = show_output if options.logs else None
        with cluster(options.hosts, options.rate, options.delay, options.loss) as hosts:
            return launch(options.command, hosts, options.per_host, caught, logs=options.logs, show=show)


def check_tools() -> None:
    """Raise Failure if this machine cannot emulate hosts."""
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if os.geteuid() or missing:
        found = f"no {' and no '.join(missing)} on the path" if missing else "not root"
        raise Failure(f"hosts: needs root and iproute2 (apt install iproute2): {found}")


def clean() -> int:
    """Remove the namespaces of killed runs, and print their names; return the exit status."""
    orphaned = orphaned_spaces()
    remove(orphaned)
    in_use = [name for name in existing() if NAME.fullmatch(name) and name not in orphaned]
    for what, names in (("removed", orphaned), ("not removed, in use", in_use)):
        print(f"{what}: {', '.join(names) or 'none'}")
    return 0


@contextlib.contextmanager
def cluster(hosts: int, rate: str, delay: float = 0.0, loss: float = 0.0) -> Iterator[list[str]]:
    """Yield the namespaces of the hosts, with links of that rate; remove them and their processes afterwards."""
    if hosts + 2 > NETWORK.num_addresses:
        raise Failure(f"--hosts {hosts}: {NETWORK} has too few addresses")
    remove(orphaned_spaces())
    owner = f"dltrain-{os.getpid()}-{started(os.getpid())}"
    spaces = [f"{owner}-{name}" for name in ("switch", *range(hosts))]
    with contextlib.ExitStack() as network:
        network.callback(remove, spaces)
        for space in spaces:
            call("ip", "netns", "add", space)
            call("ip", "-n", space, "link", "set", "lo", "up")
        if delay or loss:
            network.enter_context(wired(spaces[1:], rate, delay, loss))
        else:
            connect(spaces[0], spaces[1:], rate)
        yield spaces[1:]


def show_output(output: bytes) -> None:
    sys.stdout.buffer.write(output)
    sys.stdout.flush()


def connect(switch: str, hosts: list[str], rate: str) -> None:
    """Connect the hosts by a bridge, in a namespace of its own without the machine's addresses and firewall."""
    call("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    call("ip", "-n", switch, "link", "set", "bridge", "up")
    for number, host in enumerate(hosts):
        port = f"host{number}"
        call("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", LINK, "netns", host)
        if rate != "none":
            for space, end in ((switch, port), (host, LINK)):  # limits what the host receives, and what it sends
                call("ip", "-n", space, "link", "set", end, "gso_max_size", OFFLOAD)
                limit = ("tbf", "rate", rate, "burst", BURST, "latency", "400ms")
                call("tc", "-n", space, "qdisc", "add", "dev", end, "root", *limit)
        call("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
        bring_up(host, number)


@contextlib.contextmanager
def wired(hosts: list[str], rate: str, delay: float, loss: float) -> Iterator[None]:
    """Connect the hosts by a process that forwards packets, and that ends with this process."""
    command = [sys.executable, "-m", "benchmarks.machine.wire", str(bits(rate)), str(delay), str(loss), *hosts]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as wire:
        assert wire.stdin and wire.stdout
        if wire.stdout.readline() != b"ready\n":
            raise Failure("hosts: --delay and --loss need /dev/net/tun")
        for number, host in enumerate(hosts):
            bring_up(host, number)
        yield


def bring_up(host: str, number: int) -> None:
    call("ip", "-n", host, "address", "add", f"{address(number)}/{NETWORK.prefixlen}", "dev", LINK)
    call("ip", "-n", host, "link", "set", LINK, "up")


def bits(rate: str) -> float:
    """Return the bits per second of a rate in the format of tc."""
    if rate == "none":
        return math.inf
    read = RATE.fullmatch(rate)
    assert read
    return float(read[1]) * 1000.0 ** " kmgt".index(read[2] or " ")


def address(host: int) -> str:
    return str(NETWORK[host + 1])


def launch(
    command: list[str],
    hosts: list[str],
    per_host: int,
    caught: list[int],
    *,
    logs: Path | None = None,
    show: Callable[[bytes], None] | None = None,
) -> int:
    """Run the command as every rank. Return the status of the first that fails, or 128 + the signal that is caught.

    Rank 0 writes to the output of this process; with `show`, show() is called repeatedly with its new output instead.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    outputs: list[IO[bytes] | None] = []
    shown = 0
    with contextlib.ExitStack() as files:
        try:
            for rank in range(0 if caught else len(hosts) * per_host):
                host = rank // per_host
                outputs.append(files.enter_context(output_file(logs, host, rank)) if rank or show else None)
                ranks.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", hosts[host], *command],
                        env={"OMP_NUM_THREADS": "1"} | os.environ | variables(rank, len(hosts), per_host),
                        stdin=subprocess.DEVNULL,
                        stdout=outputs[rank],
                        stderr=subprocess.STDOUT if outputs[rank] else None,
                        start_new_session=True,  # Ctrl-C reaches only this process
                    )
                )
            while not caught:
                statuses = {rank: process.poll() for rank, process in enumerate(ranks)}
                if show and outputs[0]:
                    new = written(outputs[0], shown)
                    shown += len(new)
                    show(new)
                if failed := {rank: status for rank, status in statuses.items() if status}:
                    for rank, status in failed.items():
                        report_failure(rank, status, outputs[rank] if rank else None)
                    first = next(iter(failed.values()))
                    return first if first > 0 else 128 - first
                if None not in statuses.values():
                    return 0
                time.sleep(0.05)
            print(f"benchmarks: hosts: {signal.Signals(caught[0]).name}, all ranks are ended", file=sys.stderr)
            return 128 + caught[0]
        finally:
            end(ranks, hosts)


def output_file(logs: Path | None, host: int, rank: int) -> IO[bytes]:
    """Open a file for the output of a rank; without `logs` it is a temporary file."""
    if not logs:
        return tempfile.TemporaryFile()
    try:
        logs.mkdir(parents=True, exist_ok=True)
        return (logs / f"host{host}-rank{rank}.log").open("wb+")
    except OSError as error:
        raise Failure(f"--logs {logs}: {error}") from None


def written(output: IO[bytes], start: int = 0) -> bytes:
    """Read the output from `start` on, without a seek, because the writing rank shares the file offset."""
    return os.pread(output.fileno(), os.fstat(output.fileno()).st_size - start, start)


def variables(rank: int, hosts: int, per_host: int) -> dict[str, str]:
    """Return torchrun's variables and the network interface, as Gloo would look up the host name that all share."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(hosts * per_host),
        "LOCAL_RANK": str(rank % per_host),
        "LOCAL_WORLD_SIZE": str(per_host),
        "GROUP_RANK": str(rank // per_host),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": LINK,
        "NCCL_SOCKET_IFNAME": LINK,
    }


def report_failure(rank: int, status: int, output: IO[bytes] | None) -> None:
    how = f"failed with exit status {status}" if status > 0 else f"was ended by {signal.Signals(-status).name}"
    lines = []
    if output:
        lines = written(output).decode(errors="replace").splitlines()[-TAIL:]
    print(f"benchmarks: hosts: rank {rank} {how}", *lines, sep="\n  ", file=sys.stderr)


def end(ranks: list[subprocess.Popen[bytes]], spaces: list[str]) -> None:
    """End the ranks and all processes in their namespaces, by SIGTERM and then by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline, signalled = time.monotonic() + 3, set[int]()
        while left := {rank.pid for rank in ranks if rank.poll() is None} | processes_in(spaces):
            for pid in left - signalled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            signalled |= left
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)


def processes_in(spaces: list[str]) -> set[int]:
    """Return the ids of the processes in the namespaces."""
    return {int(pid) for space in spaces for pid in call("ip", "netns", "pids", space, check=False).split()}


def remove(spaces: list[str]) -> None:
    """Remove the namespaces with their processes, links and bridge."""
    there = existing()
    spaces = [space for space in spaces if space in there]
    end([], spaces)
    for space in spaces:
        call("ip", "netns", "delete", space, check=False)


def orphaned_spaces() -> list[str]:
    """Return the namespaces of runs that were killed by SIGKILL."""
    owners = {name: match for name in existing() if (match := NAME.fullmatch(name))}
    return [name for name, owner in owners.items() if started(int(owner[1])) != int(owner[2])]


def started(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if it has ended, also if it is a zombie."""
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(numbers[18])


def existing() -> list[str]:
    return [line.split()[0] for line in call("ip", "netns", "list").splitlines()]


def call(*command: str, check: bool = True) -> str:
    # The new session keeps Ctrl-C from interrupting a command that makes or removes something.
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if check and done.returncode:
        raise Failure(f"hosts: {' '.join(command)}: {' '.join(done.stderr.split()) or done.returncode}")
    return done.stdout
