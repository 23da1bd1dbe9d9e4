"""The handle of a push or a pull that is under way."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from dltrain_ext import _ops

_PATIENCE = 1.0  # s that the servers have to say what a pull waits for
_LOOK = 0.2  # s between two looks at the servers, less than between two heartbeats


def waited(wait: Callable[[float], bool], seconds: float, in_vain: Callable[[], bool]) -> bool:
    """Waits at most so many seconds, or until it is in vain. Returns whether ``wait`` was successful."""
    until = time.monotonic() + seconds
    while not wait(min(_LOOK, max(0.0, until - time.monotonic()))):
        if in_vain() or time.monotonic() > until:
            return False
    return True


class Versions(NamedTuple):
    """What a pull has read.

    Attributes:
        lowest, highest: the versions of its keys; they are equal if all keys are of one version.
        skipped: whether the last version of a key was skipped, because a worker had gradients that are not finite.
    """

    lowest: int
    highest: int
    skipped: bool


class Work:
    """A push or a pull that is under way. A push is complete when all servers have it, a pull when it is written.

    Args:
        in_vain: says whether a wait that lasts should end as if it were too late.
    """

    def __init__(
        self,
        what: str,
        node: "_ops.StoreNode",
        tickets: "list[_ops.StoreTicket]",
        timeout: timedelta,
        in_vain: Callable[[], bool],
        write: Callable[[], None] | None = None,
    ):
        self._what, self._node, self._tickets, self._timeout = what, node, tickets, timeout
        self._in_vain, self._write = in_vain, write

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until it is complete.

        Args:
            timeout: how long to wait; the store's timeout if None.

        Returns:
            True.

        Raises:
            torch.distributed.DistBackendError: a server or a worker that it needs is lost, or it is not complete in
                time; the message names the ranks that it waits for.
        """
        seconds = (self._timeout if timeout is None else timeout).total_seconds()
        for ticket in self._tickets:
            began = time.monotonic()
            if not waited(ticket.wait, seconds, self._in_vain):
                took = min(seconds, time.monotonic() - began)
                why = self._node.reasons(ticket, _PATIENCE)
                raise dist.DistBackendError(f"{self._what}: not complete after {took:.3g} s: {why}")
        if self._write is not None:
            self._write()
            self._write = None
        return True

    def completes_within(self, timeout: timedelta) -> bool:
        """Waits at most that long, and returns whether it is complete; :meth:`wait` then returns at once.

        Raises:
            torch.distributed.DistBackendError: a server or a worker that it needs is lost.
        """
        until = time.monotonic() + timeout.total_seconds()
        return all(ticket.wait(max(0.0, until - time.monotonic())) for ticket in self._tickets)

    def is_completed(self) -> bool:
        """Returns whether it is complete or has failed."""
        return all(ticket.is_done() for ticket in self._tickets)

    @property
    def versions(self) -> Versions:
        """What a complete pull has read."""
        return Versions(*self._tickets[0].versions())
