"""All-reduce over a torch.distributed group, on connections of its own."""

import itertools
import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from dltrain_ext import _ops


def _averages(op: "str | dist.ReduceOp") -> bool:
    for name, reduce_op, average in (("sum", dist.ReduceOp.SUM, False), ("avg", dist.ReduceOp.AVG, True)):
        if op in (name, reduce_op):
            return average
    raise ValueError(f"op: expected 'sum', 'avg', ReduceOp.SUM or ReduceOp.AVG, got {op!r}")


class Work:
    """An all-reduce under way, to be waited for like ``torch.distributed.Work``."""

    def __init__(self, future: torch.futures.Future[torch.Tensor], communicator: "Communicator"):
        self._future = future
        self._communicator = communicator  # which fails its work when it is dropped

    def wait(self) -> bool:
        """Returns True when the tensor holds the result; raises ``DistBackendError`` when it cannot come."""
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> torch.futures.Future[torch.Tensor]:
        """A future whose value is the tensor."""
        return self._future


class Communicator:
    """Runs all-reduces of one group, in the order of the calls, on Gloo connections that nobody else uses.

    Making one is a collective call: every rank of the group makes its communicators in the same order.

    Args:
        group: the ranks; the default group where None. Its own backend may be any.
        timeout: how long one all-reduce, and the making itself, may wait for the peers; the group's own where None.

    Raises:
        torch.distributed.DistBackendError: a rank did not come; names it.
    """

    _made: "weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]]" = weakref.WeakKeyDictionary()

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: timedelta | None = None):
        group = _group(group)
        timeout = timedelta(seconds=_ops.timeout_of(group)) if timeout is None else timeout
        if not isinstance(timeout, timedelta) or not timedelta(milliseconds=1) <= timeout <= timedelta(days=365):
            raise ValueError(f"timeout: expected a datetime.timedelta of 1 ms to 365 days, or None, got {timeout!r}")
        number = next(self._made.setdefault(group, itertools.count()))
        store = dist.PrefixStore(f"dltrain_ext/{group.group_name}/{number}", group.get_group_store())
        ranks = dist.get_process_group_ranks(group)
        _meet(store, ranks, timeout)
        try:
            backend = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)
        except RuntimeError as error:
            raise dist.DistBackendError(
                f"communicator of ranks {ranks}: could not connect in {timeout}: {error}"
            ) from error
        self._impl = _ops.Communicator(backend, ranks, timeout.total_seconds())
        self._close = weakref.finalize(self, self._impl.close)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: "str | dist.ReduceOp" = "sum",
        *,
        algorithm: str = "auto",
        codec: str = "raw",
        async_op: bool = False,
    ) -> Work | None:
        """:func:`dltrain_ext.comm.all_reduce` on this communicator."""
        average = _averages(op)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensor: expected a torch.Tensor, got {type(tensor).__name__}")
        if async_op:
            return Work(self.submit(tensor, average=average, algorithm=algorithm, codec=codec), self)
        self._impl.all_reduce(tensor, algorithm, codec, average)
        return None

    def submit(
        self, tensor: torch.Tensor, *, average: bool, algorithm: str, codec: str
    ) -> torch.futures.Future[torch.Tensor]:
        """Hands the tensor to the worker; the future's value is the tensor. What the DDP hook calls."""
        return self._impl.submit(tensor, algorithm, codec, average)

    def stats(self) -> dict[str, int]:
        """``calls`` completed and ``wire_bytes`` sent by this rank."""
        return self._impl.stats()

    def close(self) -> None:
        """Fails what is under way and every later call, at once. Leaving the process does the same."""
        self._close()


_communicators: "weakref.WeakKeyDictionary[dist.ProcessGroup, Communicator]" = weakref.WeakKeyDictionary()


def all_reduce(
    tensor: torch.Tensor,
    op: "str | dist.ReduceOp" = "sum",
    *,
    group: dist.ProcessGroup | None = None,
    algorithm: str = "auto",
    codec: str = "raw",
    async_op: bool = False,
) -> Work | None:
    """Sums or averages a tensor over the ranks of a group, in place, like ``torch.distributed.all_reduce``.

    Sums are in fp32; every rank ends with the same bits. The first call on a group is collective: it makes the
    group's communicator.

    Args:
        tensor: float32 on the CPU, any shape (also empty), the same on all ranks.
        op: ``"sum"``, ``"avg"`` or the ``ReduceOp`` of that name. For an average each contribution is scaled before
            it is sent.
        group: the default group where None.
        algorithm: one of ``comm.ALGORITHMS``, or ``"auto"``: by size.
        codec: ``"raw"``, the only one of ``codecs.CODECS`` that an all-reduce carries so far.
        async_op: return a :class:`Work` at once.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
        torch.distributed.DistBackendError: a peer is gone or late; names the rank waited for, the algorithm, the
            round and the deadline. The communicator is of no use afterwards; the group is.
    """
    group = _group(group)
    communicator = _communicators.get(group)
    if communicator is None:
        communicator = _communicators[group] = Communicator(group)
    return communicator.all_reduce(tensor, op, algorithm=algorithm, codec=codec, async_op=async_op)


def _meet(store: dist.Store, ranks: list[int], timeout: timedelta) -> None:
    """Waits until every rank has come, so that one that does not can be named."""
    deadline = time.monotonic() + timeout.total_seconds()
    store.set(f"here/{dist.get_rank()}", "")
    for rank in ranks:
        left = max(0.001, deadline - time.monotonic())
        try:
            store.wait([f"here/{rank}"], timedelta(seconds=left))
        except RuntimeError as error:
            raise dist.DistBackendError(
                f"communicator of ranks {ranks}: rank {rank} did not come in {timeout}"
            ) from error


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise ValueError(
            "group: expected an initialized default group, call torch.distributed.init_process_group first"
        )
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a torch.distributed.ProcessGroup that this rank belongs to, got {group!r}")
    return group
