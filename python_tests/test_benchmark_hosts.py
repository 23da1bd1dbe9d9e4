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

from benchmarks.hosts import is_alive  # noqa: E402


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
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"needs network namespaces: {REASON}")


def command(*arguments: object, script: str) -> list[str]:
    """Hosts, each of whose ranks runs a Python script."""
    return [sys.executable, "-m", "benchmarks", "hosts", *map(str, arguments), "--", sys.executable, "-c", script]


def run(*arguments: object, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments, script=script), capture_output=True, text=True, timeout=120, cwd=ROOT)


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


def assert_gone(pid: int, ranks: list[int]) -> None:
    assert spaces(pid) == []
    deadline = time.monotonic() + 5  # in which the system takes apart what has ended
    while any(map(is_alive, ranks)):
        assert time.monotonic() < deadline, "a rank lives on"
        time.sleep(0.02)


def test_ranks_have_the_variables_of_torchrun_and_reach_each_other() -> None:
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
    done = run("--hosts", 2, "--per-host", 2, script=script)
    assert done.returncode == 0, done.stderr
    # Of rank 0 alone, as the others' output is kept.
    assert done.stdout.splitlines() == ["[[0, 0, 2, 0], [1, 1, 2, 0], [2, 0, 2, 1], [3, 1, 2, 1]]", "sum 4.0"]


def test_a_failing_rank_ends_the_others_and_is_heard() -> None:
    script = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("what went before\\n" * 100 + "no more memory")
    sys.exit(7)
time.sleep(300)
"""
    process = subprocess.Popen(command("--hosts", 2, script=script), stderr=subprocess.PIPE, text=True, cwd=ROOT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 7
    assert "rank 1 failed with exit status 7" in errors and "no more memory" in errors
    assert errors.count("what went before") == 19
    assert_gone(process.pid, [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks(number: signal.Signals, tmp_path: Path) -> None:
    process = start_and_wait(tmp_path)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert number.name in errors and "Traceback" not in errors
    assert_gone(process.pid, pids(tmp_path))


def test_what_a_killed_run_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    process = start_and_wait(tmp_path)
    process.kill()  # and not waited for: as under a parent that never does
    assert len(spaces(process.pid)) == 3
    assert all(map(is_alive, pids(tmp_path)))

    assert run("--hosts", 1, script="pass").returncode == 0
    assert_gone(process.pid, pids(tmp_path))
    assert process.wait() == -signal.SIGKILL


def test_what_a_living_run_has_made_is_left_alone(tmp_path: Path) -> None:
    process = start_and_wait(tmp_path)
    assert run("--hosts", 1, script="pass").returncode == 0
    assert len(spaces(process.pid)) == 3 and process.poll() is None
    process.terminate()
    process.communicate(timeout=60)
    assert_gone(process.pid, pids(tmp_path))


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


def test_the_rate_of_a_link_is_limited() -> None:
    done = run("--hosts", 2, "--rate", "100mbit", script=SEND)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) >= 0.25  # of the 0.32 s that 32 Mbit take


def test_what_a_host_receives_from_several_is_limited() -> None:
    script = SEND.replace("connection, _ = server.accept()", "connections = [server.accept()[0] for _ in range(2)]")
    script = script.replace(
        "while received < size:\n        received += len(connection.recv(2**16))",
        "for connection in connections:\n        while part := connection.recv(2**16): received += len(part)",
    )
    done = run("--hosts", 3, "--rate", "100mbit", script=script)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) >= 0.5


def test_without_iproute2_it_says_what_to_install(tmp_path: Path) -> None:
    done = subprocess.run(
        command("--hosts", 2, script="pass"), capture_output=True, text=True, cwd=ROOT, env={"PATH": str(tmp_path)}
    )
    assert done.returncode == 2
    assert all(text in done.stderr for text in ("root", "apt install iproute2", "no ip and no tc"))


def test_a_rate_that_is_none_is_answered() -> None:
    done = run("--rate", "3mb", script="pass")
    assert done.returncode == 2 and "'3mb' is not a rate" in done.stderr
