"""Emulated hosts: what their ranks see, how they end, and that nothing of them stays."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # behind what is installed

from benchmarks.__main__ import main  # noqa: E402
from benchmarks.hosts import started  # noqa: E402


def why_not() -> str | None:
    """Why this machine can have no such hosts; None if it can."""
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


REASON = why_not()
pytestmark = [
    pytest.mark.needs("matplotlib", "rich"),
    pytest.mark.skipif(REASON is not None, reason=f"needs network namespaces: {REASON}"),
]


def command(*arguments: object, script: str) -> list[str]:
    """Hosts, each of whose ranks runs a Python script."""
    return [sys.executable, "-m", "benchmarks", "hosts", *map(str, arguments), "--", sys.executable, "-c", script]


def call(*arguments: object) -> int:
    """In this process, which has imported torch already; the exit status."""
    try:
        return main(["hosts", *map(str, arguments)])
    except SystemExit as exit:
        return int(exit.code or 0)


def run(*arguments: object, script: str) -> int:
    return call(*arguments, "--", sys.executable, "-c", script)


def spaces(pid: int | str = r"\d+") -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return re.findall(rf"^dltrain-{pid}-\S+", listed, re.MULTILINE)


def start_and_wait(tmp_path: Path) -> subprocess.Popen[str]:
    """Two hosts whose ranks sleep and would rather not end; all have begun, and have written their pid."""
    script = f"""
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path({str(tmp_path)!r}, os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(300)
"""
    process = subprocess.Popen(
        command("--hosts", 2, script=script),
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        # A shell has its background jobs ignore Ctrl-C, and they their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while len(pids(tmp_path)) < 2:
        assert process.poll() is None and time.monotonic() < deadline, "no rank came"
        time.sleep(0.05)
    assert len(spaces(process.pid)) == 3
    return process


def pids(tmp_path: Path) -> list[int]:
    return [int(text) for file in tmp_path.iterdir() if (text := file.read_text())]


def is_alive(pid: int) -> bool:
    return started(pid) is not None


def assert_gone(pid: int, ranks: list[int]) -> None:
    assert spaces(pid) == []
    deadline = time.monotonic() + 5  # in which the system takes apart what has ended
    while any(map(is_alive, ranks)):
        assert time.monotonic() < deadline, "a rank lives on"
        time.sleep(0.02)


def test_ranks_have_the_variables_of_torchrun_and_reach_each_other(capfd: pytest.CaptureFixture[str]) -> None:
    script = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
own = torch.tensor([int(os.environ[name]) for name in names])
gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
dist.all_gather(gathered, own)
print([tensor.tolist() for tensor in gathered])
ones = torch.ones(1)
dist.all_reduce(ones)
print("sum", ones.item())
dist.destroy_process_group()
"""
    assert run("--hosts", 2, "--per-host", 2, script=script) == 0
    # Of rank 0 alone, as the others' output is kept.
    assert capfd.readouterr().out.splitlines() == [
        "[[0, 0, 2, 0], [1, 1, 2, 0], [2, 0, 2, 1], [3, 1, 2, 1]]",
        "sum 4.0",
    ]


def test_a_failing_rank_ends_the_others_and_is_heard(capfd: pytest.CaptureFixture[str]) -> None:
    script = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("what went before\\n" * 100 + "no more memory")
    sys.exit(7)
time.sleep(300)
"""
    assert run("--hosts", 2, script=script) == 7
    errors = capfd.readouterr().err
    assert "rank 1 failed with exit status 7" in errors and "no more memory" in errors
    assert errors.count("what went before") == 19
    assert_gone(os.getpid(), [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_ranks(number: signal.Signals, tmp_path: Path) -> None:
    process = start_and_wait(tmp_path)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert number.name in errors and "Traceback" not in errors
    assert_gone(process.pid, pids(tmp_path))


@pytest.mark.parametrize("by", ["the next", "--clean"])
def test_what_a_killed_run_has_left_is_removed(by: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    process = start_and_wait(tmp_path)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # left as it is: as under a parent that never asks
    left = spaces(process.pid)
    assert len(left) == 3 and all(map(is_alive, pids(tmp_path)))

    if by == "--clean":
        assert call("--clean") == 0
        (removed,) = re.findall("^removed: (.*)", capfd.readouterr().out, re.MULTILINE)
        assert set(left) <= set(removed.split(", "))
    else:
        assert run("--hosts", 1, script="pass") == 0
    assert_gone(process.pid, pids(tmp_path))
    assert process.wait() == -signal.SIGKILL


def test_what_a_run_has_left_whose_process_id_is_another_s_by_now_is_removed() -> None:
    name = f"dltrain-{os.getpid()}-1-switch"  # we began later than in the first tick
    subprocess.run(["ip", "netns", "add", name], check=True)
    assert call("--clean") == 0
    assert name not in spaces(os.getpid())


def test_what_a_living_run_has_made_is_left_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    process = start_and_wait(tmp_path)
    assert call("--clean") == 0
    (kept,) = re.findall("^left alone, in use: (.*)", capfd.readouterr().out, re.MULTILINE)
    assert run("--hosts", 1, script="pass") == 0
    assert len(spaces(process.pid)) == 3 and process.poll() is None
    assert set(spaces(process.pid)) <= set(kept.split(", "))
    process.terminate()
    process.communicate(timeout=60)
    assert_gone(process.pid, pids(tmp_path))


DAEMON = """
import os, pathlib, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:  # now nobody's child, and in a session of its own
        pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
        time.sleep(300)
    os._exit(0)
while not pathlib.Path(sys.argv[1], os.environ["RANK"]).exists():
    time.sleep(0.02)
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("status", [0, 3])
def test_what_ranks_have_left_running_is_ended(status: int, tmp_path: Path) -> None:
    assert call("--hosts", 2, "--", sys.executable, "-c", DAEMON, tmp_path, status) == status
    assert_gone(os.getpid(), pids(tmp_path))


def tool(folder: Path, script: str) -> str:
    """A path on which tc is a script."""
    (folder / "tc").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "tc").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_a_network_that_cannot_be_made_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", tool(tmp_path, "echo no such qdisc >&2; exit 2"))
    assert run("--hosts", 2, script="pass") == 2
    assert re.search("tc -n .*: no such qdisc", capfd.readouterr().err)
    assert_gone(os.getpid(), [])


def test_a_signal_while_the_network_is_made_starts_no_rank(tmp_path: Path) -> None:
    slow = tool(tmp_path, f'touch {tmp_path}/begun; sleep 0.5; exec {shutil.which("tc")} "$@"')
    environment = os.environ | {"PATH": slow}
    process = subprocess.Popen(
        command("--hosts", 2, script=f"open({str(tmp_path / 'ran')!r}, 'w')"),
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=environment,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and not (tmp_path / "ran").exists()
    assert_gone(process.pid, [])


def test_logs_hold_what_each_rank_writes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = """
import os, sys
print("rank", os.environ["RANK"], flush=True)
print("and its errors", file=sys.stderr, flush=True)
sys.exit(5 if os.environ["RANK"] == "3" else 0)
"""
    assert run("--hosts", 2, "--per-host", 2, "--logs", tmp_path / "new", script=script) == 5
    assert "rank 3 failed with exit status 5\n  rank 3\n  and its errors" in capfd.readouterr().err
    names = {rank: f"host{rank // 2}-rank{rank}.log" for rank in range(4)}
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(names.values())
    assert (tmp_path / "new" / names[3]).read_text() == "rank 3\nand its errors\n"

    assert run("--hosts", 2, "--logs", tmp_path, script=script) == 0
    assert capfd.readouterr().out == "rank 0\nand its errors\n"
    assert [(tmp_path / f"host{rank}-rank{rank}.log").read_text() for rank in range(2)] == [
        f"rank {rank}\nand its errors\n" for rank in range(2)
    ]


def test_logs_that_cannot_be_written_are_answered(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert run("--hosts", 1, "--logs", tmp_path / "file", script="pass") == 2
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
    assert run("--hosts", 2, "--rate", "100mbit", script=SEND) == 0
    assert float(capfd.readouterr().out) >= 0.25  # of the 0.32 s that 32 Mbit take


def test_what_a_host_receives_from_several_is_limited(capfd: pytest.CaptureFixture[str]) -> None:
    script = SEND.replace("connection, _ = server.accept()", "connections = [server.accept()[0] for _ in range(2)]")
    script = script.replace(
        "while received < size:\n        received += len(connection.recv(2**16))",
        "for connection in connections:\n        while part := connection.recv(2**16): received += len(part)",
    )
    assert run("--hosts", 3, "--rate", "100mbit", script=script) == 0
    assert float(capfd.readouterr().out) >= 0.5


def test_two_at_the_same_time_do_not_meet() -> None:
    script = """
import os, socket, sys, time
rank, mine = os.environ["RANK"], sys.argv[1].encode()
if rank == "0":
    server = socket.create_server((os.environ["MASTER_ADDR"], 5000))  # the other one's has the same address
    heard = {server.accept()[0].recv(9) for _ in range(2)}
    assert heard == {mine}, heard
    time.sleep(0.5)
else:
    while True:
        try:
            socket.create_connection((os.environ["MASTER_ADDR"], 5000)).sendall(mine)
            break
        except OSError:
            time.sleep(0.02)
"""
    other = subprocess.Popen([*command("--hosts", 3, script=script), "other"], cwd=ROOT)
    while len(spaces(other.pid)) < 4:
        assert other.poll() is None
        time.sleep(0.01)
    assert call("--hosts", 3, "--", sys.executable, "-c", script, "one") == 0
    assert other.wait(timeout=60) == 0
    assert_gone(other.pid, [])
    assert_gone(os.getpid(), [])


def test_without_iproute2_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run("--hosts", 2, script="pass") == 2
    told = capfd.readouterr().err
    assert all(text in told for text in ("root", "apt install iproute2", "no ip and no tc"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--rate", "3mb"), "'3mb' is not a rate"),
        (("--clean",), "expected either -- COMMAND or --clean"),
        (("--hosts", 10**6), "has no room for so many"),
    ],
)
def test_mistakes_are_answered(arguments: tuple[object, ...], text: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments, script="pass") == 2
    assert text in capfd.readouterr().err
