"""A call under way."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dltrain_ext.comm.communicator import Communicator


class Work:
    """A collective under way, to be waited for like ``torch.distributed.Work``."""

    def __init__(
        self,
        future: torch.futures.Future[Any],
        wait: Callable[[torch.futures.Future[Any]], None],
        communicator: "Communicator",
        before: "Work | None" = None,
    ):
        self._future, self._wait = future, wait
        self._communicator = communicator  # which fails its work when it is dropped
        self._before = before  # whose error torch would wrap

    def wait(self) -> bool:
        """Returns True when the result is there; raises ``DistBackendError`` when it cannot come. On Ctrl-C, which the
        future's own wait would not hear, the communicator is closed."""
        self._communicator.check_process()
        if self._before is not None:
            self._before.wait()
        self._wait(self._future)
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future whose value is what has been written: the tensor, or the list of tensors."""
        return self._future

    def then(self, act: Callable[[], Any]) -> "Work":
        """One that ends when this has, and ``act`` after it, with what that returns; not where this fails."""

        def after(future: torch.futures.Future[Any]) -> Any:
            future.value()
            return act()

        return Work(self._future.then(after), self._wait, self._communicator, self)
