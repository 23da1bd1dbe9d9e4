"""Runs the steps of a script one after another. Each has a time limit and a log, and a failed step ends no other."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SHOWN = 60  # last lines of the log that are shown if a step fails


class Step(NamedTuple):
    """A command for bash, which is run in the root of the checkout, with the folder $OUT for its output.

    It may take ``limit`` seconds. It is skipped if one of ``needs``, a file or a command on the PATH, does not exist.
    """

    name: str
    command: str
    limit: float
    needs: tuple[str, ...] = ()


def run(steps: Sequence[Step], folder: Path, name: str, seconds: float = float("inf")) -> bool:
    """Run the steps within `seconds` in all, and return whether none failed. Write folder/name.txt and name.tar.gz."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the running step is ended, too
    start, out = time.monotonic(), ROOT / "build" / "steps" / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, step in enumerate(steps, 1):
        log = out / f"{number:02d}-{re.sub(r'[^a-zA-Z0-9.]+', '-', step.name)}.log"
        began = time.monotonic()
        print(f"\n=== [{began - start:.0f} s] {step.name}\n{step.command}", flush=True)
        left = seconds - (began - start)
        if absent := [need for need in step.needs if not (shutil.which(need) or Path(ROOT, need).exists())]:
            said = f"skipped: there is no {', no '.join(absent)}"
        elif left < 5:
            said = "FAILED: no time was left"
        else:
            said = _run(step.command, log, min(step.limit, left), out)
        lines.append(f"{time.monotonic() - began:7.1f} s  {step.name:32} {said}")
        print(lines[-1], flush=True)
        if said.startswith("FAILED") and log.exists():
            print("\n".join(log.read_text(errors="replace").splitlines()[-SHOWN:]), flush=True)
        # These are written after each step, so that an interrupted run has them, too.
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
        with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as archive:
            archive.add(out, name)
    print(f"\n=== [{time.monotonic() - start:.0f} s] {name}", *lines, sep="\n", flush=True)
    return not any(" FAILED" in line for line in lines)


def _run(command: str, log: Path, limit: float, out: Path) -> str:
    """Run a command; return "passed", or "FAILED" with the reason."""
    with log.open("wb") as written:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=ROOT,
            env=os.environ | {"OUT": str(out.resolve()), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"FAILED: took longer than {limit:.0f} s"
        finally:
            _end(process)
    return "passed" if status == 0 else f"FAILED: exit status {status}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the whole process group, including processes that the command has left running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def copy_of_tree(folder: str) -> str:
    """Return a command that copies all tracked files in their current state, so that builds do not share a folder."""
    return f"rm -rf {folder} && mkdir -p {folder} && git ls-files -z | xargs -0 cp --parents -t {folder}"
