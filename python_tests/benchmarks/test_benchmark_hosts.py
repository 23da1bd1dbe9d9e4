"""Emulated hosts: the environment of their ranks, how they end, and that they are removed."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import commands
import pytest

from benchmarks.machine import processes
from benchmarks.machine.namespaces import started

pytestmark = [pytest.mark.xdist_group("machine"), pytest.mark.needs("matplotlib", "rich")]


@pytest.fixture(autouse=True)
def hosts() -> None:
    commands.skip_without_hosts()


def spaces(pid: int | str = r"\d+") -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return re.findall(rf"^dltrain-{pid}-\S+", listed, re.MULTILINE)


class Hosts:
    """A run of `hosts` in a process of its own."""

    def __init__(self, team: processes.Team) -> None:
        self.team, (self.pid,) = team, team.pids

    def done(self) -> commands.Done:
        event = self.team.next(timeout=300)
        assert event and event.kind == "returned", event
        return event.value

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 300
        while not condition():
            assert self.team.next(timeout=0.02) is None and time.monotonic() < deadline, "the condition was not met"


@contextlib.contextmanager
def running(*arguments: object) -> Iterator[Hosts]:
    with processes.calling([partial(commands.interruptible, "hosts", *arguments)], fresh=True) as team:
        yield Hosts(team)


SLEEPING = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(300)
"""


@contextlib.contextmanager
def sleeping(tmp_path: Path) -> Iterator[Hosts]:
    """Yield two hosts whose ranks sleep and ignore SIGTERM, after all ranks have written their pid."""
    with running("--hosts", 2, "--", sys.executable, "-c", SLEEPING, tmp_path) as hosts:
        hosts.wait_until(lambda: len(pids(tmp_path)) == 2)
        assert len(spaces(hosts.pid)) == 3
        yield hosts


def pids(tmp_path: Path) -> list[int]:
    return [int(text) for file in tmp_path.iterdir() if (text := file.read_text())]


def is_alive(pid: int) -> bool:
    return started(pid) is not None


def assert_gone(pid: int, ranks: list[int]) -> None:
    assert spaces(pid) == []
    deadline = time.monotonic() + 60  # the system may take some time to remove ended processes
    while any(map(is_alive, ranks)):
        assert time.monotonic() < deadline, "a rank is still alive"
        time.sleep(0.02)


def test_ranks_have_the_variables_of_torchrun_and_reach_the_first(capfd: pytest.CaptureFixture[str]) -> None:
    """That ranks rendezvous by these variables is tested with the benchmark allreduce and with the sweep."""
    script = """
import os, socket, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
own = " ".join(os.environ[name] for name in names)
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    server = socket.create_server(address)
    print(sorted([own, *(server.accept()[0].makefile().read() for _ in range(3))]))
while own[0] != "0":
    try:
        socket.create_connection(address).sendall(own.encode())
        break
    except ConnectionRefusedError:
        time.sleep(0.02)
"""
    assert commands.on_hosts("--hosts", 2, "--per-host", 2, script=script) == 0
    # Only the output of rank 0 is shown.
    assert capfd.readouterr().out == "['0 4 0 2 0', '1 4 1 2 0', '2 4 0 2 1', '3 4 1 2 1']\n"


def test_a_failing_rank_ends_the_others_and_its_output_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    script = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("what went before\\n" * 100 + "no more memory")
    sys.exit(7)
time.sleep(300)
"""
    assert commands.on_hosts("--hosts", 2, script=script) == 7
    errors = capfd.readouterr().err
    assert "rank 1 failed with exit status 7" in errors and "no more memory" in errors
    assert errors.count("what went before") == 19
    assert_gone(os.getpid(), [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_ranks(number: signal.Signals, tmp_path: Path) -> None:
    with sleeping(tmp_path) as hosts:
        os.kill(hosts.pid, number)
        done = hosts.done()
    assert done.returncode == 128 + number
    assert number.name in done.stderr and "Traceback" not in done.stderr
    assert_gone(hosts.pid, pids(tmp_path))


def test_the_next_run_removes_the_namespaces_of_a_killed_run(tmp_path: Path) -> None:
    """This also has to work if the killed run is a zombie; for this reason it is a child of this process."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            commands.hosts("--hosts", 2, "--", sys.executable, "-c", SLEEPING, tmp_path)
        os._exit(1)
    deadline = time.monotonic() + 300
    while len(pids(tmp_path)) < 2:
        assert started(pid) is not None and time.monotonic() < deadline, "no rank came"
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert len(spaces(pid)) == 3 and all(map(is_alive, pids(tmp_path)))

    assert commands.on_hosts("--hosts", 1, script="pass") == 0
    assert_gone(pid, pids(tmp_path))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_clean_removes_the_namespaces_of_a_killed_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with sleeping(tmp_path) as hosts:
        os.kill(hosts.pid, signal.SIGKILL)
        event = hosts.team.next(timeout=300)
        assert event and (event.kind, event.value) == ("ended", -signal.SIGKILL)
    left = spaces(hosts.pid)
    assert len(left) == 3 and all(map(is_alive, pids(tmp_path)))

    assert commands.hosts("--clean") == 0
    (removed,) = re.findall("^removed: (.*)", capfd.readouterr().out, re.MULTILINE)
    assert set(left) <= set(removed.split(", "))
    assert_gone(hosts.pid, pids(tmp_path))


def test_namespaces_of_a_reused_process_id_are_removed() -> None:
    name = f"dltrain-{os.getpid()}-1-switch"  # this process started later than in the first tick
    subprocess.run(["ip", "netns", "add", name], check=True)
    assert commands.hosts("--clean") == 0
    assert name not in spaces(os.getpid())


def test_namespaces_of_a_running_run_are_not_removed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with sleeping(tmp_path) as hosts:
        assert commands.hosts("--clean") == 0
        (kept,) = re.findall("^not removed, in use: (.*)", capfd.readouterr().out, re.MULTILINE)
        assert commands.on_hosts("--hosts", 1, script="pass") == 0
        assert len(spaces(hosts.pid)) == 3 and hosts.team.next(timeout=0) is None
        assert set(spaces(hosts.pid)) <= set(kept.split(", "))
        os.kill(hosts.pid, signal.SIGTERM)
        hosts.done()
    assert_gone(hosts.pid, pids(tmp_path))


DAEMON = """
import os, pathlib, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:  # the parent of this process ends, and it is in a session of its own
        pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
        time.sleep(300)
    os._exit(0)
while not pathlib.Path(sys.argv[1], os.environ["RANK"]).exists():
    time.sleep(0.02)
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("status", [0, 3])
def test_daemons_of_the_ranks_are_ended(status: int, tmp_path: Path) -> None:
    assert commands.hosts("--hosts", 2, "--", sys.executable, "-c", DAEMON, tmp_path, status) == status
    assert_gone(os.getpid(), pids(tmp_path))


def tool(folder: Path, script: str) -> str:
    """Return a PATH on which tc is a script."""
    (folder / "tc").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "tc").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_a_partly_made_network_is_removed_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", tool(tmp_path, "echo no such qdisc >&2; exit 2"))
    assert commands.on_hosts("--hosts", 2, script="pass") == 2
    assert re.search("tc -n .*: no such qdisc", capfd.readouterr().err)
    assert_gone(os.getpid(), [])


def test_no_rank_starts_after_a_signal_during_setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    wait = f'touch {begun}; while [ ! -e {go} ]; do sleep 0.05; done; exec {shutil.which("tc")} "$@"'
    monkeypatch.setenv("PATH", tool(tmp_path, wait))
    script = f"open({str(tmp_path / 'ran')!r}, 'w')"
    with running("--hosts", 2, "--", sys.executable, "-c", script) as hosts:
        hosts.wait_until(begun.exists)
        os.kill(hosts.pid, signal.SIGTERM)
        go.touch()
        assert hosts.done().returncode == 128 + signal.SIGTERM
    assert not (tmp_path / "ran").exists()
    assert_gone(hosts.pid, [])


def test_logs_contain_the_output_of_each_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = """
import os, sys
print("rank", os.environ["RANK"], flush=True)
print("and its errors", file=sys.stderr, flush=True)
sys.exit(5 if os.environ["RANK"] == "3" else 0)
"""
    assert commands.on_hosts("--hosts", 2, "--per-host", 2, "--logs", tmp_path / "new", script=script) == 5
    assert "rank 3 failed with exit status 5\n  rank 3\n  and its errors" in capfd.readouterr().err
    names = {rank: f"host{rank // 2}-rank{rank}.log" for rank in range(4)}
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(names.values())
    assert (tmp_path / "new" / names[3]).read_text() == "rank 3\nand its errors\n"

    assert commands.on_hosts("--hosts", 2, "--logs", tmp_path, script=script) == 0
    assert capfd.readouterr().out == "rank 0\nand its errors\n"
    assert [(tmp_path / f"host{rank}-rank{rank}.log").read_text() for rank in range(2)] == [
        f"rank {rank}\nand its errors\n" for rank in range(2)
    ]


def test_logs_that_cannot_be_written_are_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert commands.on_hosts("--hosts", 1, "--logs", tmp_path / "file", script="pass") == 2
    assert f"--logs {tmp_path / 'file'}" in capfd.readouterr().err
    assert_gone(os.getpid(), [])


SEND = """
import os, socket, time
rank, size = int(os.environ["RANK"]), 4_000_000
if rank == 0:
    server = socket.create_server((os.environ["MASTER_ADDR"], 5000))
    connection, _ = server.accept()
    start, received = time.monotonic(), 0
    while received < size:
        received += len(connection.recv(2**16))
    print(time.monotonic() - start)
else:
    while True:
        try:
            connection = socket.create_connection((os.environ["MASTER_ADDR"], 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    connection.sendall(bytes(size))
"""


def test_the_rate_of_a_link_is_limited(capfd: pytest.CaptureFixture[str]) -> None:
    assert commands.on_hosts("--hosts", 2, "--rate", "100mbit", script=SEND) == 0
    assert float(capfd.readouterr().out) >= 0.25  # 32 Mbit take 0.32 s


def test_the_rate_limits_what_a_host_receives_from_several_hosts(capfd: pytest.CaptureFixture[str]) -> None:
    script = SEND.replace("connection, _ = server.accept()", "connections = [server.accept()[0] for _ in range(2)]")
    script = script.replace(
        "while received < size:\n        received += len(connection.recv(2**16))",
        "for connection in connections:\n        while part := connection.recv(2**16): received += len(part)",
    )
    assert commands.on_hosts("--hosts", 3, "--rate", "100mbit", script=script) == 0
    assert float(capfd.readouterr().out) >= 0.5


BACK_AND_FORTH = """
import contextlib, os, socket, time
address = os.environ["MASTER_ADDR"], 5000
if os.environ["RANK"] == "0":
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mine:
        mine.bind(address)
        mine.settimeout(0.1)
        while not os.path.exists(os.environ["TIMES"]):
            with contextlib.suppress(TimeoutError):
                mine.sendto(*mine.recvfrom(100))
else:
    time.sleep(0.5)  # until the other rank receives
    times = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mine:
        mine.settimeout(float(os.environ["TIMEOUT"]))
        for number in range(20):
            began = time.monotonic()
            mine.sendto(bytes([number]), address)
            try:
                while mine.recv(100)[0] != number: pass
                times.append(time.monotonic() - began)
            except TimeoutError:
                pass
    open(os.environ["TIMES"], "w").write(repr(times))
"""


@pytest.mark.parametrize(("delay", "loss", "timeout"), [(50, 0, 60), (5, 40, 0.2)])
def test_packets_are_delayed_and_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delay: int, loss: int, timeout: float
) -> None:
    monkeypatch.setenv("TIMES", str(tmp_path / "times"))
    monkeypatch.setenv("TIMEOUT", str(timeout))
    link = ("--rate", "10mbit", "--delay", delay, "--loss", loss)
    assert commands.on_hosts("--hosts", 2, *link, script=BACK_AND_FORTH) == 0
    times = eval((tmp_path / "times").read_text())
    assert min(times) >= 2 * delay / 1e3
    assert (
        0 < len(times) < 18 if loss else len(times) == 20
    )  # with 40 % loss, about a third of the round trips complete


def test_two_concurrent_runs_are_separate() -> None:
    script = """
import os, socket, sys, time
rank, mine = os.environ["RANK"], sys.argv[1].encode()
if rank == "0":
    server = socket.create_server((os.environ["MASTER_ADDR"], 5000))  # the other run uses the same address
    received = {server.accept()[0].recv(9) for _ in range(2)}
    assert received == {mine}, received
    time.sleep(0.5)
else:
    while True:
        try:
            socket.create_connection((os.environ["MASTER_ADDR"], 5000)).sendall(mine)
            break
        except OSError:
            time.sleep(0.02)
"""
    with running("--hosts", 3, "--", sys.executable, "-c", script, "other") as other:
        other.wait_until(lambda: len(spaces(other.pid)) == 4)
        assert commands.hosts("--hosts", 3, "--", sys.executable, "-c", script, "one") == 0
        assert other.done().returncode == 0
    assert_gone(other.pid, [])
    assert_gone(os.getpid(), [])


def test_the_error_without_iproute2_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commands.on_hosts("--hosts", 2, script="pass") == 2
    errors = capfd.readouterr().err
    assert all(text in errors for text in ("root", "apt install iproute2", "no ip and no tc"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--rate", "3mb"), "'3mb' is not a rate"),
        (("--clean",), "expected either -- COMMAND or --clean"),
        (("--hosts", 10**6), "has too few addresses"),
    ],
)
def test_wrong_options_are_errors(arguments: tuple[object, ...], text: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert commands.on_hosts(*arguments, script="pass") == 2
    assert text in capfd.readouterr().err
