"""Ranks that are killed while DiLoCo trains, for the case local_sgd: each rank starts a process that trains.

    python -m benchmarks.local_sgd_faults SETTINGS

Run so, it is such a process; it writes what happens as lines of JSON, with times of the machine's monotonic clock.
"""

import contextlib
import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.harness import Progress
from benchmarks.local_sgd_peers import make_runner
from benchmarks.local_sgd_sides import OURS, Schedule, Side, layers_of

ROOT = Path(__file__).parents[1]
TRAINING, SENDING = "between averages", "while it sends"
PATIENCE = 300.0  # s, after which a rank counts as stuck
FIRST = 2  # the average with which, or before which, a rank is lost


class Fault(NamedTuple):
    """When the last rank is killed, and how the ranks train."""

    when: str
    sync_every: int
    delay: int
    times: int
    codec: str = "int4"

    @property
    def name(self) -> str:
        return f"{OURS}, {self.codec}" + (f", delay {self.delay}" if self.delay else "")


class Outcome(NamedTuple):
    """Seconds, of the survivor that took longest, one each time: from the kill until inner.step() raised; from the
    kill, or from its own departure to the average if that was later, until then; from there until recover() returned,
    and until the next outer step was complete. `wrong`: what did not happen as it should, over all times."""

    fault: Fault
    raised: list[float]
    noticed: list[float]
    recovered: list[float]
    completed: list[float]
    wrong: list[str]


def lose_ranks(
    rank: int, ranks: int, faults: list[Fault], width: int, found: Any, progress: Progress
) -> Iterator[Outcome]:
    for index, fault in enumerate(faults):
        outcome = Outcome(fault, [], [], [], [], [])
        for turn in range(fault.times):
            progress(f"a rank is killed {fault.when}, {fault.name}, {turn + 1} of {fault.times}", index / len(faults))
            events = lose_one(rank, ranks, fault, width, found.batch, found.seconds)
            every: list[Any] = [None] * ranks
            dist.all_gather_object(every, events)
            judge(outcome, every)
        yield outcome


def judge(outcome: Outcome, every: list[dict[str, Any]]) -> None:
    """Enter what the survivors have reported, and what is wrong with it."""
    *survivors, lost = every
    victim, killed = len(survivors), lost.get("killed")
    wrong = [f"rank {rank}: {events['wrong']}" for rank, events in enumerate(every) if "wrong" in events]
    for rank, events in enumerate(survivors if not wrong else []):
        if events["lost"] != victim or f"rank {victim}" not in events["text"]:
            wrong.append(f"rank {rank} lost {events['lost']}: {events['text']}")
    if not wrong and len({events["digest"] for events in survivors}) > 1:
        wrong.append("the survivors have different parameters")
    outcome.wrong.extend(wrong)
    if wrong or killed is None:
        return
    outcome.raised.append(max(events["raised"] - killed for events in survivors))
    outcome.noticed.append(max(events["raised"] - max(killed, events["departed"]) for events in survivors))
    outcome.recovered.append(max(events["recovered"] - events["raised"] for events in survivors))
    outcome.completed.append(max(events["completed"] - events["raised"] for events in survivors))


def lose_one(rank: int, ranks: int, fault: Fault, width: int, batch: int, step: float) -> dict[str, Any]:
    """Start a process that trains on each rank, and kill the last one. Return what it has reported."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    place = [store.port if store else 0]
    dist.broadcast_object_list(place)
    settings = {"rank": rank, "ranks": ranks, "host": host, "port": place[0], "width": width, "batch": batch}
    settings["fault"] = fault._asdict()
    trainer = Trainer(__name__, settings)
    try:
        return listen(trainer, rank == ranks - 1, fault, step)
    finally:
        trainer.end()
        dist.barrier()


class Trainer:
    """A process that runs a module of the benchmarks, and what it tells."""

    def __init__(self, module: str, settings: dict[str, Any]):
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(settings)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._errors: list[str] = []
        for read in (self._read, lambda: self._errors.extend(self._process.stderr or ())):
            threading.Thread(target=read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put(None)

    def next(self) -> dict[str, Any] | None:
        """Return the next event; None if the process has ended. Raises TimeoutError if it is stuck."""
        try:
            line = self._lines.get(timeout=PATIENCE)
        except queue.Empty:
            raise TimeoutError(f"it has reported nothing for {PATIENCE:.0f} s") from None
        return None if line is None else dict(json.loads(line))

    def why_ended(self) -> str:
        self._process.wait()
        return f"it has ended: {''.join(self._errors[-3:])}".strip()

    def kill(self) -> float:
        """Kill it, and return when."""
        at = time.monotonic()
        self._process.send_signal(signal.SIGKILL)
        return at

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def listen(trainer: Trainer, is_victim: bool, fault: Fault, step: float) -> dict[str, Any]:
    events: dict[str, Any] = {}
    departed, took = 0.0, 0.0
    while True:
        try:
            event = trainer.next()
        except TimeoutError as stuck:
            return {"wrong": f"{stuck} after {[*events]}"}
        if event is None:
            return events if "completed" in events else {"wrong": trainer.why_ended()}
        events |= event
        if not is_victim:
            continue
        if "departs" in event:
            departed = event["at"]
            if event["departs"] == FIRST and fault.when == SENDING:
                time.sleep(0.4 * took)
                return {"killed": trainer.kill()}
        if "outer" in event:
            took = event["at"] - departed
            if event["outer"] == FIRST - 1 and fault.when == TRAINING:
                time.sleep(0.4 * (fault.sync_every - fault.delay) * step)
                return {"killed": trainer.kill()}


# The process that trains


def tell(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def digest(state: dict[str, Any]) -> str:
    """Return a hash of what all sites should have of a state."""
    kept = b"".join(value.numpy().tobytes() for value in state["backup"].values())
    return hashlib.sha256(kept).hexdigest()


def main() -> None:
    settings = json.loads(sys.argv[1])
    fault, rank, width = Fault(**settings["fault"]), settings["rank"], settings["width"]
    torch.set_num_threads(1)
    patience = timedelta(seconds=PATIENCE)
    store = dist.TCPStore(settings["host"], settings["port"], is_master=False, timeout=patience)
    dist.init_process_group("gloo", store=store, timeout=patience, world_size=settings["ranks"], rank=rank)
    side = Side(OURS, fault.codec, 1, fault.delay, ours=True)
    runner = make_runner(side, layers_of(width), Schedule(fault.sync_every, 1, fault.delay))
    outer = runner.outer
    assert outer
    depart, departed = outer._exchange._depart, list[float]()

    def told() -> None:
        departed.append(time.monotonic())
        tell(departs=len(departed), at=departed[-1])
        depart()

    outer._exchange._depart = told  # type: ignore[method-assign]
    x = torch.randn(settings["batch"], width, generator=torch.Generator().manual_seed(rank))
    last, until = 0, None
    while until is None or outer.outer_steps < until:
        try:
            runner.train(x)
        except dist.DistBackendError as error:
            raised = time.monotonic()
            tell(raised=raised, departed=departed[-1], lost=outer.lost, text=str(error).splitlines()[0])
            outer.recover()
            tell(recovered=time.monotonic())
            last = outer.outer_steps
            until = last + 1
        if outer.outer_steps > last:
            last = outer.outer_steps
            tell(outer=last, at=time.monotonic())
    done = time.monotonic()
    tell(digest=digest(outer.state_dict()), completed=done)
    with contextlib.suppress(RuntimeError):
        dist.barrier(outer.group)  # so that rank 0, which has the store, is the last to end
    os._exit(0)


if __name__ == "__main__":
    main()
