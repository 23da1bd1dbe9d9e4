"""Records of the order in which servers have handled messages, and runs that repeat that order."""

import collections
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dltrain_ext import _ops
from dltrain_ext.ps.connecting import blocks_of, is_lossy, make_nodes_here, shard_of
from dltrain_ext.ps.gradients import are_finite
from dltrain_ext.ps.layout import Key, first_blocks
from dltrain_ext.ps.serving import completed
from dltrain_ext.ps.settings import Settings
from dltrain_ext.ps.weights import check_grace, factors

_PUSH, _PULL, _LEAVE, _GRACE, _APPLIED_PULL = range(5)


@dataclass(frozen=True)
class Record:
    """The order of what the servers of a store have handled.

    Attributes:
        settings: those of the store.
        handled: for each server's rank, the messages: what it was (0: push, 1: pull, 2: the worker has left, 4: pull
            with ``applied``), the number of the worker, its clock, and the first block. Where the end of a grace has
            made a version: 3, -1, the version, and the block.
    """

    settings: Settings
    handled: Mapping[int, Sequence[tuple[int, int, int, int]]]

    @staticmethod
    def of(node: "_ops.StoreNode", rank: int, settings: Settings) -> "Record":
        handled = [(each.what, each.worker, each.clock, each.first_block) for each in node.record()]
        return Record(settings, {rank: handled} if rank in settings.servers else {})

    @staticmethod
    def written(
        order: Iterable[tuple[str, int]],
        values: Mapping[str, Tensor],
        optimizer: type,
        *,
        quorum: str | int = 1,
        grace: timedelta | None = None,
        staleness: int | None = None,
        codec: str = "raw",
        delay_compensation: float = 0.0,
        **options: Any,
    ) -> "Record":
        """Returns the record of a run that has not taken place, with one server.

        Args:
            order: ``("push", worker)`` and ``("pull", worker)``, by the numbers of the workers from 0 on. Each worker
                begins with a pull, and each of its pushes is followed by one. ``("grace", version)``: the grace of this
                version is over, for all keys; it is ignored if the version is made already.
            values: as for :func:`replay`.
            optimizer, quorum, grace, staleness, codec, delay_compensation, options: as in :class:`Store`; how long the
                grace is makes no difference.
        """
        order = list(order)
        workers = 1 + max(worker for what, worker in order if what != "grace")
        settings = Settings(
            servers=(workers,),
            workers=tuple(range(workers)),
            keys=tuple(Key(name, tuple(value.shape), 0) for name, value in values.items()),
            optimizer=optimizer.__name__,
            groups=(completed(optimizer.__name__, options),),
            staleness=staleness,
            quorum=0 if quorum == "all" else int(quorum),
            lockstep=quorum == "all" and staleness == 0,
            push_codec=codec,
            pull_codec=codec,
            delay_compensation=delay_compensation,
            window=64,
            records=False,
            grace=check_grace(grace, quorum, delay_compensation),
        )
        blocks = blocks_of(settings)
        firsts = first_blocks(blocks)
        pushed = [0] * workers
        handled = []
        for what, worker in order:
            if what == "grace":
                handled += [(_GRACE, -1, worker, block) for block in range(len(blocks))]
                continue
            clock, is_push = pushed[worker], what == "push"
            some = firsts if is_push else firsts[:1]  # a pull is one message
            handled += [(_PUSH if is_push else _PULL, worker, clock, first) for first in some]
            pushed[worker] += is_push
        return Record(settings, {workers: handled})

    def gather(self, group: dist.ProcessGroup | None = None) -> "Record":
        """Returns the records of all ranks of a group as one. It is a collective call."""
        all_handled: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(all_handled, dict(self.handled), group=group)
        return Record(self.settings, {rank: order for some in all_handled for rank, order in some.items()})

    def save(self, path: "str | os.PathLike[str]") -> None:
        """Writes a JSON file."""
        Path(path).write_text(json.dumps({"settings": self.settings.text(), "handled": dict(self.handled)}))

    @staticmethod
    def load(path: "str | os.PathLike[str]") -> "Record":
        """Reads what :meth:`save` has written."""
        said = json.loads(Path(path).read_text())
        handled = {int(rank): [tuple(each) for each in order] for rank, order in said["handled"].items()}
        return Record(Settings.of(said["settings"]), handled)

    def pulls(self, worker: int) -> list[list[bool]]:
        """Returns the pulls of a worker at each of its clocks, between two pushes: whether they have ``applied``."""
        pushes, pulls = 0, collections.defaultdict[tuple[int, int, int], list[bool]](list)
        for rank, order in self.handled.items():
            for what, who, clock, block in order:
                if who == worker and what == _PUSH:
                    pushes = max(pushes, clock + 1)
                elif who == worker and what in (_PULL, _APPLIED_PULL):
                    pulls[clock, rank, block].append(what == _APPLIED_PULL)
        clocks = range(pushes + 1)
        return [max((some for (at, *_), some in pulls.items() if at == clock), key=len, default=[]) for clock in clocks]


def replay(
    record: Record,
    values: Mapping[str, Tensor],
    gradients: Callable[[int, int, dict[str, Tensor]], Mapping[str, Tensor]],
    *,
    rates: Callable[[int, int], Sequence[float]] | None = None,
    weights: Callable[[int, int], float] | None = None,
    error_feedback: bool = True,
) -> dict[str, Tensor]:
    """Repeats a run in this process: its servers handle the workers' messages in the recorded order.

    With the same values and gradients the result has the same bits as the run. With other settings or gradients it
    shows what another method makes of the same order of arrival: a record can also be written by hand.

    Graces end where the record says. A worker that pushed before its pull with ``applied=True`` was answered does so
    here, too, with the values that it held before.

    Args:
        record: of all servers.
        values: the first values, by name.
        gradients: ``gradients(worker, clock, values)`` returns the gradients that a worker, by its number, pushes at a
            clock when it holds these values. It is called once for each worker and clock.
        rates: ``rates(worker, clock)`` returns the learning rates of the groups; None: those of the settings.
        weights: ``weights(worker, clock)`` returns the ``weight`` of the push, as for :meth:`Store.push`; None: its
            default.
        error_feedback: as in the run.

    Returns:
        The values of the servers at the end.

    Raises:
        ValueError: no run has this order: the servers wait for a message that nobody sends.
    """
    settings = record.settings
    blocks = blocks_of(settings)
    names = [key.name for key in settings.keys]
    size = max(*settings.servers, *settings.workers) + 1
    shards = [shard_of(rank, settings, blocks) for rank in range(size)]
    for shard in shards:
        for block, own in zip(shard.blocks, shard.values, strict=True) if shard is not None else ():
            whole = values[names[block.key]].detach().reshape(-1).float()
            own.copy_(whole[block.first : block.first + block.numel])
    nodes = make_nodes_here(
        settings,
        blocks,
        shards,
        error_feedback=error_feedback and is_lossy(settings.push_codec),
        replayed={rank: [_ops.Handled(*each) for each in order] for rank, order in record.handled.items()},
    )
    fixed = [float(group["lr"]) for group in settings.groups]
    keys = list(range(len(names)))
    workers = [
        _Worker(nodes[rank], record.pulls(number), {name: torch.empty(values[name].shape) for name in names})
        for number, rank in enumerate(settings.workers)
    ]
    moved = [True]
    while any(moved):  # also when all workers have ended, since the last ones to leave may complete a version
        moved = [node.poll() for node in nodes]
        moved += [worker.pull_next(keys, settings.staleness) for worker in workers]
        for number, worker in enumerate(workers):
            moved.append(worker.leave_once_over())  # later messages of others may come after this in the record
            if not worker.may_push:
                continue
            given = gradients(number, worker.clock, worker.held)
            tensors = [given[name].detach().contiguous() for name in names]
            rate = fixed if rates is None else list(rates(number, worker.clock))
            factor, weight = factors(settings, None if weights is None else weights(number, worker.clock))
            skips = not are_finite(tensors)
            worker.node.push(worker.clock, keys, tensors, factor=factor, rates=rate, skips=skips, weight=weight)
            worker.clock += 1
            moved.append(True)
        if not any(moved):
            moved = [_lets_one_go_on(record, nodes, workers)]
    if waiting := [rank for rank, worker in zip(settings.workers, workers, strict=True) if not worker.is_over]:
        raise ValueError(f"record: expected an order that a run can have, got one that ranks {waiting} cannot finish")
    result = {name: torch.empty(values[name].shape) for name in names}
    for shard in shards:
        for block, own in zip(shard.blocks, shard.values, strict=True) if shard is not None else ():
            result[names[block.key]].view(-1)[block.first : block.first + block.numel].copy_(own)
    for node in nodes:
        node.close(0.0)
    return result


def _lets_one_go_on(record: Record, nodes: "Sequence[_ops.StoreNode]", workers: "Sequence[_Worker]") -> bool:
    """Lets a worker go on before its pull is answered, if a server handles that worker's next message before anything
    else, or has handled all. Returns whether there is one."""
    places = [(order, nodes[rank].replayed()) for rank, order in record.handled.items()]
    awaited = {order[place][1] for order, place in places if place < len(order)}
    return any(worker.go_on() for number, worker in enumerate(workers) if number in awaited or not awaited)


class _Worker:
    """A worker of a replay, which pulls as often at each clock as the record says."""

    def __init__(self, node: "_ops.StoreNode", pulls: list[list[bool]], held: dict[str, Tensor]):
        self.node, self.held, self.clock = node, held, 0
        self._pulls = pulls
        self._ticket: _ops.StoreTicket | None = None
        self._may_go_on = False
        self._has_left = False

    def pull_next(self, keys: list[int], staleness: int | None) -> bool:
        """Begins the next pull of this clock, if none is under way. Returns whether anything has changed."""
        if self._ticket is not None:
            if not self._ticket.is_done():
                return False
            self._ticket.wait(0.0)
            self._ticket = None
            return True
        if not self._pulls[self.clock]:
            return False
        self._may_go_on = self._pulls[self.clock].pop(0)
        into = list(self.held.values())
        self._ticket = self.node.pull(self.clock, staleness, keys, into, applied=self._may_go_on)
        return True

    def go_on(self) -> bool:
        """Waits no longer for a pull that has ``applied``. Returns whether there is one."""
        goes_on = self._ticket is not None and self._may_go_on
        if goes_on:
            self._ticket = None
        return goes_on

    def leave_once_over(self) -> bool:
        """Tells the servers once that no message follows. Returns whether it has."""
        leaves = self.is_over and not self._has_left
        if leaves:
            self.node.finish(0.0)
            self._has_left = True
        return leaves

    @property
    def may_push(self) -> bool:
        return self._ticket is None and not self._pulls[self.clock] and not self.is_over

    @property
    def is_over(self) -> bool:
        return self.clock == len(self._pulls) - 1 and self._ticket is None and not self._pulls[self.clock]
