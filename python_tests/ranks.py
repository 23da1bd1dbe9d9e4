"""Runs the body of a test on several ranks: processes in a Gloo group."""

import contextlib
import ctypes
import io
import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # after the installed packages

from benchmarks.machine import processes  # noqa: E402
from dltrain_ext import _C  # noqa: E402

processes.preload("pytest")

# Timeouts of communicators in the tests of faults, also for machines under load.
DEADLINE = timedelta(seconds=6)  # for timeouts that have to pass; enough to make a communicator
FAR = timedelta(seconds=60)  # for timeouts that must not pass
SILENCE = timedelta(seconds=3)  # of a living rank
SLACK = 20.0  # s that other load may add


def _rank(body: Callable, rank: int, world_size: int, port: int, hosted: bool, args: tuple) -> Any:
    _count_at_end()
    store: dist.Store = dist.TCPStore("127.0.0.1", port, is_master=False)
    join_group(store_of_first(store, rank) if hosted else store, rank, world_size)
    return body(rank, world_size, *args)


@cache
def _count_at_end() -> None:
    """Have a forked process write the coverage of gcov, which os._exit would not."""
    if hasattr(library := ctypes.CDLL(_C.__file__), "__gcov_dump"):
        Finalize(None, library.__gcov_dump, exitpriority=0)


def join_group(store: dist.Store, rank: int, world_size: int) -> None:
    """Make the default group, and wait until every rank has it: one that ends at once would break the others' Gloo."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=300))
    store.set(f"rank {rank} has joined", "")
    store.wait([f"rank {each} has joined" for each in range(world_size)])


def _own_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def store_of_first(store: dist.Store, rank: int) -> dist.Store:
    """Return a store that rank 0 hosts; its port is written to `store`."""
    name = "port of the store of rank 0"
    if rank > 0:
        return dist.TCPStore("127.0.0.1", int(store.get(name)), is_master=False)
    own = _own_store()
    store.set(name, str(own.port))
    return own


def finish_before(victim: int, *others: int) -> None:
    """Have the victim, which dies next, wait until the others have come here too.

    Otherwise they may still be in the call before, which would fail: it ends when the death is known, and a process
    that dies with unread messages discards what it has sent.
    """
    store, rank = dist.group.WORLD.get_group_store(), dist.get_rank()
    store.set(f"{rank} has finished before {victim} dies", "")
    if rank == victim:
        store.wait([f"{other} has finished before {victim} dies" for other in others])


def await_stop(process: int) -> None:
    """Wait until a process stands still: before that its threads may still handle what has arrived."""
    while Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "T":
        time.sleep(0.01)


def ready() -> None:
    """Report that this rank is ready, so that the test may call ``when_ready``."""
    processes.report(None)


def on_gpu(rank: int, world_size: int, body: Callable, *args: Any) -> Any:
    """Call a body on the GPU of this rank, for ``run_ranks``; ranks share GPUs if there are fewer."""
    if torch.cuda.device_count() < world_size:
        # NCCL refuses two ranks of one host on one GPU (up to 2.30.2), unless they appear to be on different hosts.
        os.environ.setdefault("NCCL_HOSTID", f"rank{rank}")
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    result = body(rank, world_size, *args)
    torch.cuda.synchronize()
    return result


def run_ranks(
    world_size: int,
    body: Callable,
    *args: Any,
    dying: tuple[int, ...] = (),
    timeout: float = 300,
    hosted: bool = False,
    when_ready: Callable[[list[int]], None] | None = None,
    fresh: bool = False,
) -> list[Any]:
    """Call ``body(rank, world_size, *args)`` on every rank and return the results (None for the ``dying``).

    Fails if a rank raises, hangs, or exits with a status other than 0. ``hosted``: the store is on rank 0.
    ``when_ready`` is called with the ranks' process ids when each has reported that it is ready. ``fresh``: the ranks
    are new processes that end afterwards, for a body that changes the state of its process.
    """
    # Not a file: a FileStore whose folder is removed first waits for its timeout, and then ends the process.
    store = _own_store()
    calls = [partial(_rank, body, rank, world_size, store.port, hosted, args) for rank in range(world_size)]
    return _call(calls, dying, timeout, when_ready, bool(fresh or dying or hosted or when_ready))


def _call(
    calls: Sequence[Callable[[], Any]],
    dying: tuple[int, ...],
    timeout: float,
    when_ready: Callable[[list[int]], None] | None,
    fresh: bool,
) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = dict.fromkeys(dying)
    are_ready = 0
    with processes.calling(calls, fresh) as team:
        while waiting := team.busy.difference(dying):
            event = team.next(deadline - time.monotonic())
            assert event, f"ranks {sorted(waiting)} are not done after {timeout} s:\n{team.stacks()}"
            rank, kind, value = event
            assert kind != "raised", f"rank {rank}:\n{value}"
            if kind == "reported":
                are_ready += 1
                if when_ready and are_ready == len(calls):
                    when_ready(team.pids)
            elif kind == "returned":
                results[rank] = value
            else:
                assert rank in dying or value == 0, f"rank {rank} exited with {value}"
    return [results[rank] for rank in range(len(calls))]


def run_example(name: str, folder: Path, *arguments: object, ranks: int = 2, fresh: bool = False) -> str:
    """Return what an example prints on ranks with torchrun's variables, in a folder to which it must not write.

    With ``ranks`` 0 it is one process without these variables. ``fresh`` is for frameworks that keep global state.
    """
    call = partial(_example, name, folder, [*map(str, arguments)])
    printed = as_torchrun(ranks, call, fresh=fresh) if ranks else _call([call], (), 600, None, True)
    assert not any(folder.iterdir())
    return "".join(printed)


def _example(name: str, folder: Path, arguments: list[str]) -> str:
    os.chdir(folder)
    script = ROOT / "examples" / name
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


def as_torchrun(
    ranks: int, body: Callable, *args: Any, dying: tuple[int, ...] = (), timeout: float = 600, fresh: bool = False
) -> list[Any]:
    """Return what ``body(*args)`` returns on each of the ranks, which have torchrun's variables, and no group yet."""
    store = _own_store()
    calls = [partial(_as_torchrun, body, rank, ranks, store.port, args) for rank in range(ranks)]
    return _call(calls, dying, timeout, None, bool(fresh or dying))


def _as_torchrun(body: Callable, rank: int, world_size: int, port: int, args: tuple) -> Any:
    _count_at_end()
    look_like_torchrun(rank, world_size, port)
    return body(*args)


def look_like_torchrun(rank: int, world_size: int, port: int = 0) -> None:
    """Set the variables that tell a program its rank, and the address of the launcher's store."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(number) for name, number in names.items()})
    os.environ.update(
        TORCHELASTIC_RUN_ID="test",
        TORCHELASTIC_USE_AGENT_STORE="True",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
