"""Several ranks for a test: real processes in a real Gloo group."""

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dltrain_ext import _C

# Children fork from a server that has imported once what all of them need, and never started a thread.
_context = multiprocessing.get_context("forkserver")
_polling = threading.Lock()  # a process that is started polls all others, and two threads must not poll the same one
_context.set_forkserver_preload(["pytest", "torch", "torch._dynamo", "torch.nn.parallel", "dltrain_ext"])


def _rank(body: Callable, rank: int, world_size: int, where: str | int, results: Any, args: tuple) -> None:
    torch.set_num_threads(1)
    join_group(where, rank, world_size)
    try:
        # Pickled here: the queue would pass tensors by file descriptor, which a rank that has left no longer serves.
        results.put((rank, pickle.dumps(body(rank, world_size, *args)), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    results.close()
    results.join_thread()
    dist.destroy_process_group()
    # A child that was forked leaves by os._exit, where gcov does not write what it has counted.
    if hasattr(library := ctypes.CDLL(_C.__file__), "__gcov_dump"):
        library.__gcov_dump()


def join_group(where: str | int, rank: int, world_size: int) -> None:
    """Makes the default group: where is the file of its store, or the port of one that rank 0 is the host of."""
    store: dist.Store
    if isinstance(where, int):
        store = dist.TCPStore("127.0.0.1", where, world_size, is_master=rank == 0)
    else:
        store = dist.FileStore(where, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def semaphore() -> Any:
    """One that ranks can be given, to tell the test how far they are."""
    return _context.Semaphore(0)


def _join(process: Any, timeout: float | None) -> int | None:
    """Waits for its end, and returns its exit status; None while it lives."""
    multiprocessing.connection.wait([process.sentinel], timeout)
    with _polling:
        return process.exitcode


def run_ranks(
    world_size: int,
    body: Callable,
    *args: Any,
    dying: tuple[int, ...] = (),
    timeout: float = 60,
    port: int | None = None,
    meanwhile: Callable[[list[int]], None] | None = None,
) -> list[Any]:
    """Calls ``body(rank, world_size, *args)`` on every rank and returns what each returned (None for the ``dying``).

    Fails when a rank raises, hangs or leaves with an exit status other than 0. With a port the store is on rank 0;
    ``meanwhile`` is called, with the ranks' process ids, when they have started.
    """
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = dict.fromkeys(dying)
    with tempfile.TemporaryDirectory() as folder:
        where = str(Path(folder, "store")) if port is None else port
        queue = _context.Queue()
        processes = [
            _context.Process(target=_rank, args=(body, rank, world_size, where, queue, args))
            for rank in range(world_size)
        ]
        for process in processes:
            with _polling:
                process.start()
        try:
            if meanwhile:
                meanwhile([process.pid for process in processes])
            while len(results) < world_size:
                rank, result, error = queue.get(timeout=max(0.1, deadline - time.monotonic()))
                assert error is None, f"rank {rank}:\n{error}"
                results[rank] = pickle.loads(result)
            for rank in set(range(world_size)) - set(dying):
                status = _join(processes[rank], max(0.1, deadline - time.monotonic()))
                assert status == 0, f"rank {rank} left with {status}"
        finally:
            for process in processes:
                process.kill()
                _join(process, None)
    return [results[rank] for rank in range(world_size)]


def run_example(name: str, folder: Path, *arguments: str, ranks: int = 2) -> str:
    """What an example prints, started by torchrun in a folder where it is to leave nothing."""
    script = Path(__file__).parents[1] / "examples" / name
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(script),
    ]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, cwd=folder)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert not any(folder.iterdir())
    return done.stdout


def look_like_torchrun(rank: int, world_size: int) -> None:
    """For frameworks that read who they are from torchrun's variables; the group, already there, they take as it is."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(number) for name, number in names.items()})
    os.environ.update(TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
