"""Worker processes that run one call after another, forked from a server that has imported torch once.

    with processes.calling([partial(work, rank) for rank in range(4)]) as team:
        while team.busy and (event := team.next(timeout=60)):
            ...

A process whose call has returned is idle, and is reused by a later team: with the folder, environment and module path
of that caller, torch's initial random state, and no process group. Fresh processes run one call only, and then end.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_lock = threading.RLock()  # the start of a process polls all others, and two threads must not poll the same one
_preloaded = ["torch", "torch._dynamo", "torch.nn.parallel", "dltrain_ext"]
_idle: list["Process"] = []
_caller: Connection | None = None  # set in a worker process


class Event(NamedTuple):
    """An event of a process in a team: "reported" or "returned" a value, "raised" a traceback, "ended" with a status.

    `index` is that of the process.
    """

    index: int
    kind: str
    value: Any


class Call(NamedTuple):
    """A call with the settings of the caller. ``function`` stays pickled until the path is set, which it may need."""

    folder: str
    path: list[str]
    environment: dict[str, str]
    function: bytes
    last: bool


def preload(*modules: str) -> None:
    """Have the server import these modules, too. Must be called before the first process is started."""
    _preloaded.extend(modules)


def report(value: Any) -> None:
    """Send a value to the caller of the call that this process is running."""
    assert _caller is not None, "this process is not running a call"
    _caller.send(("reported", value))


class Process:
    """The caller's handle of a worker process."""

    def __init__(self) -> None:
        self.connection, theirs = _context.Pipe()
        self._stacks, stacks = _context.Pipe(duplex=False)
        # Ctrl-C reaches all processes of a shell's job; it must not interrupt the start of the server or of a worker.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with _lock:
                _context.set_forkserver_preload(_preloaded)
                self.process = _context.Process(target=_serve, args=(theirs, stacks))
                self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        stacks.close()

    def begin(self, call: Call) -> None:
        with contextlib.suppress(BrokenPipeError):  # an event reports that the process has ended
            self.connection.send(call)

    def status(self) -> int | None:
        with _lock:
            return self.process.exitcode

    def stacks(self) -> str:
        """Return the stacks of its Python threads."""
        if pid := self.process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        text, timeout = b"", 5.0
        while self._stacks.poll(timeout) and (more := os.read(self._stacks.fileno(), 1 << 16)):
            text, timeout = text + more, 0.2  # faulthandler writes line by line
        return text.decode()

    def leave(self, timeout: float | None = None) -> int | None:
        """Let it end, and return its exit status; None if it has not ended within the timeout."""
        self.connection.close()
        wait([self.process.sentinel], timeout)
        return self.status()

    def kill(self) -> None:
        with _lock:
            self.process.kill()
        self.leave()


class Team:
    """The running calls, one in each process."""

    def __init__(self, processes: list[Process], fresh: bool) -> None:
        self._processes, self._fresh = processes, fresh
        self.busy = set(range(len(processes)))

    @property
    def pids(self) -> list[int]:
        return [each.process.pid or 0 for each in self._processes]

    def stacks(self) -> str:
        """Return the stacks of the threads of all busy processes."""
        return "\n\n".join(f"{index}:\n{self._processes[index].stacks()}" for index in sorted(self.busy))

    def next(self, timeout: float) -> Event | None:
        """Wait for the next event, and return it; None if there is none within `timeout` seconds."""
        sources = {each.connection: index for index, each in enumerate(self._processes) if index in self.busy}
        sources |= {self._processes[index].process.sentinel: index for index in self.busy}
        ready = wait([*sources], max(0, timeout))
        if not ready:
            return None
        index = sources[ready[0]]
        process = self._processes[index]
        try:
            kind, value = process.connection.recv() if process.connection.poll() else ("ended", None)
        except (EOFError, ConnectionResetError):
            kind, value = "ended", None
        if kind == "ended":
            wait([process.process.sentinel])
            value = process.status()
        if kind in ("ended", "raised") or (kind == "returned" and not self._fresh):
            self.busy.remove(index)
        return Event(index, kind, pickle.loads(value) if kind == "returned" else value)


@contextlib.contextmanager
def calling(functions: Sequence[Callable[[], Any]], fresh: bool = False) -> Iterator[Team]:
    """Run the functions, which have to be picklable, each in a process of its own.

    If the block ends without an exception and all have returned, the processes become idle; otherwise they are killed.
    """
    with _lock:
        found = [_idle.pop() if _idle and not fresh else None for _ in functions]
    processes = [each or Process() for each in found]
    team = Team(processes, fresh)
    well = False
    try:
        setting = os.getcwd(), sys.path, dict(os.environ)
        for process, function in zip(processes, functions, strict=True):
            process.begin(Call(*setting, pickle.dumps(function), last=fresh))
        yield team
        well = not fresh and not team.busy
    finally:
        for process in processes:
            if well:
                process.connection.send(None)
                _idle.append(process)
            else:
                process.kill()


def end() -> None:
    """Let the idle processes exit normally, so that they write what they have counted (coverage)."""
    leaving = [*_idle]
    _idle.clear()
    for process in leaving:
        process.connection.close()  # of all processes first, so that they exit concurrently
    for process in leaving:
        if process.leave(20) is None:
            process.kill()


Finalize(None, end, exitpriority=1)


def _serve(caller: Connection, stacks: Connection) -> None:
    """Run calls in a worker process, until the last call, or until the caller has ended."""
    global _caller
    _caller = caller
    faulthandler.register(signal.SIGUSR1, stacks)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would not run while this process waits in Gloo
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    gc.freeze()  # so that _reset() does not search the objects that the server has imported
    random_state = torch.get_rng_state()
    calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
    answered = threading.Event()
    answered.set()
    threading.Thread(target=_listen, args=(caller, calls, answered), daemon=True).start()
    while call := calls.get():
        os.chdir(call.folder)
        sys.path[:] = call.path
        os.environ.clear()
        os.environ.update(call.environment)
        torch.set_rng_state(random_state)
        torch.set_num_threads(1)
        answered.clear()
        try:
            answer = "returned", pickle.dumps(pickle.loads(call.function)())
        except BaseException:
            answer = "raised", traceback.format_exc()
        answered.set()
        caller.send(answer)
        del answer
        if call.last:
            break
        calls.get()
        _reset()
    _reset()


def _listen(caller: Connection, calls: "queue.SimpleQueue[Call | None]", answered: threading.Event) -> None:
    try:
        while True:
            calls.put(caller.recv())
    except (EOFError, OSError):
        if not answered.is_set():
            os._exit(1)  # the caller has ended, so the result is not needed
        calls.put(None)
        calls.put(None)


def _reset() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
