"""Processes that take one call after another, forked from a server that has imported torch once.

    with processes.calling([partial(work, rank) for rank in range(4)]) as team:
        while team.busy and (event := team.next(timeout=60)):
            ...

A process that has returned rests, and takes a call of a later team: with that caller's folder, environment and module
path, torch's first random state, and no process group. Who asks for fresh ones gets some that end after their call.
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
_lock = threading.RLock()  # a process that is started polls all others, and two threads must not poll the same one
_preloaded = ["torch", "torch._dynamo", "torch.nn.parallel", "dltrain_ext"]
_resting: list["Process"] = []
_caller: Connection | None = None  # in a process that takes calls


class Event(NamedTuple):
    """What one of a team does: it has "told" a value, "returned" one, "raised" a traceback or "ended" with a status."""

    index: int
    kind: str
    value: Any


class Call(NamedTuple):
    """With what it finds of the process that makes it. ``function`` is pickled: it may need the path."""

    folder: str
    path: list[str]
    environment: dict[str, str]
    function: bytes
    last: bool


def preload(*modules: str) -> None:
    """Has the server import these too: to be called before the first process is started."""
    _preloaded.extend(modules)


def tell(value: Any) -> None:
    """To whom has made the call that this process is in, at once."""
    assert _caller is not None, "this process is in no call"
    _caller.send(("told", value))


class Process:
    """One that takes calls, seen from outside."""

    def __init__(self) -> None:
        self.connection, theirs = _context.Pipe()
        self._stacks, stacks = _context.Pipe(duplex=False)
        # Ctrl-C reaches all that a shell has started, and must break neither into the server's start nor into theirs.
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
        with contextlib.suppress(BrokenPipeError):  # that it has ended comes as an event
            self.connection.send(call)

    def status(self) -> int | None:
        with _lock:
            return self.process.exitcode

    def stacks(self) -> str:
        """Where its Python threads are."""
        if pid := self.process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        text, patience = b"", 5.0
        while self._stacks.poll(patience) and (more := os.read(self._stacks.fileno(), 1 << 16)):
            text, patience = text + more, 0.2  # it comes line by line
        return text.decode()

    def leave(self, timeout: float | None = None) -> int | None:
        """Its exit status; None where it has not ended by then."""
        self.connection.close()
        wait([self.process.sentinel], timeout)
        return self.status()

    def kill(self) -> None:
        with _lock:
            self.process.kill()
        self.leave()


class Team:
    """Calls under way, one in each process."""

    def __init__(self, processes: list[Process], fresh: bool) -> None:
        self._processes, self._fresh = processes, fresh
        self.busy = set(range(len(processes)))

    @property
    def pids(self) -> list[int]:
        return [each.process.pid or 0 for each in self._processes]

    def stacks(self) -> str:
        """Where the threads of those are that are busy."""
        return "\n\n".join(f"{index}:\n{self._processes[index].stacks()}" for index in sorted(self.busy))

    def next(self, timeout: float) -> Event | None:
        """What happens next; None where nothing does within so many seconds."""
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
    """Makes these calls, which pickle can carry, one in each of so many processes.

    When the block ends well and all have returned, the processes rest; else they are killed.
    """
    with _lock:
        found = [_resting.pop() if _resting and not fresh else None for _ in functions]
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
                _resting.append(process)
            else:
                process.kill()


def end() -> None:
    """Has those that rest leave as they would, so that what has been counted in them is written."""
    leaving = [*_resting]
    _resting.clear()
    for process in leaving:
        process.connection.close()  # of all, who then leave side by side
    for process in leaving:
        if process.leave(20) is None:
            process.kill()


Finalize(None, end, exitpriority=1)


def _serve(caller: Connection, stacks: Connection) -> None:
    """Takes calls, and rests after each when told so, until the last or until the caller is gone."""
    global _caller
    _caller = caller
    faulthandler.register(signal.SIGUSR1, stacks)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the caller answers Ctrl-C, and this process may wait inside of Gloo
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    gc.freeze()  # what the server has imported need not be looked through at each rest
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
        _rest()
    _rest()


def _listen(caller: Connection, calls: "queue.SimpleQueue[Call | None]", answered: threading.Event) -> None:
    try:
        while True:
            calls.put(caller.recv())
    except (EOFError, OSError):
        if not answered.is_set():
            os._exit(1)  # nobody waits for what it does
        calls.put(None)
        calls.put(None)


def _rest() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
