"""The handle of a call that is running."""

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dltrain_ext.comm.communicator import Communicator


class Work:
    """A collective that is running, and can be waited for like ``torch.distributed.Work``."""

    def __init__(
        self,
        future: torch.futures.Future[Any],
        wait: Callable[[torch.futures.Future[Any], float | None], None],
        communicator: "Communicator",
        before: "Work | None" = None,
    ):
        self._future, self._wait = future, wait
        self._communicator = communicator  # kept alive: its destruction fails its work
        self._before = before  # waited for first, because torch would wrap its error

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until the collective is complete; on CUDA until it is enqueued, and the current stream waits for it.

        Ctrl-C closes the communicator, and so ends the wait.

        Args:
            timeout: how long to wait. None: until the communicator's own timeout fails the collective.

        Returns:
            True.

        Raises:
            TypeError, ValueError: ``timeout`` is not a positive timedelta.
            torch.distributed.DistBackendError: the collective has failed, or it is not complete after ``timeout``. In
                the latter case it continues, and a later ``wait`` may succeed.
        """
        self._communicator.check_process()
        seconds = None
        if timeout is not None:
            if not isinstance(timeout, timedelta):
                raise TypeError(f"timeout: expected a timedelta or None, got {timeout!r}")
            if not timedelta() < timeout <= timedelta(days=365):
                raise ValueError(f"timeout: expected more than 0 and at most a year, got {timeout!r}")
            seconds = timeout.total_seconds()
        if self._before is not None:
            self._before.wait(timeout)
        self._wait(self._future, seconds)
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Returns whether the collective is complete or has failed."""
        return self._future.done()

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future whose value is the list of the tensors that the collective writes on this rank."""
        return self._future

    def then(self, act: Callable[[], Any]) -> "Work":
        """Returns a Work that completes after this one and ``act``, with the result of ``act``, and fails if this one
        fails."""

        def after(future: torch.futures.Future[Any]) -> Any:
            future.value()
            return act()

        return Work(self._future.then(after), self._wait, self._communicator, self)
