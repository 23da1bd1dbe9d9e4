"""What sites do with what they have moved, once it is due."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from dltrain_ext.local_sgd.fragments import Fragment
from dltrain_ext.local_sgd.settings import Settings


class Exchange(ABC):
    """Brings what this site has moved to the others, and what all have moved into its parameters.

    Attributes:
        steps, outer_steps: see :class:`dltrain_ext.local_sgd.DiLoCo`.
        fragments: of the model, in the order of their turns.
        waited: the seconds in which training stood still.
        nonfinite: the outer steps whose mean was not finite everywhere.
    """

    def __init__(self, inner: Optimizer, settings: Settings, fragments: Sequence[Fragment]):
        self._inner, self._settings, self.fragments = inner, settings, fragments
        self.steps = self.outer_steps = 0
        self.waited, self.nonfinite = 0.0, 0
        self._due = settings.interval  # the step after which the next fragment is sent

    @abstractmethod
    def begin(self, *_: Any) -> None:
        """Is called before each step of the inner optimizer."""

    @abstractmethod
    def stepped(self, *_: Any) -> None:
        """Is called after each step of the inner optimizer."""

    @abstractmethod
    def finish(self) -> None:
        """Ends what is under way."""

    @abstractmethod
    def save(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""

    @abstractmethod
    def load(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continues from a checkpoint."""

    @abstractmethod
    def recover(self, group: dist.ProcessGroup | None) -> None:
        """Continues without a site that is lost."""

    @property
    @abstractmethod
    def group(self) -> dist.ProcessGroup | None:
        """The group that has a rank of each site, if there is one."""

    @property
    @abstractmethod
    def lost(self) -> int | None:
        """The global rank that is responsible for a failure, if it is known."""

    @property
    @abstractmethod
    def wire_bytes(self) -> int:
        """What this rank has sent."""

    @abstractmethod
    def close(self) -> None:
        """Gives up what is under way, and ends the connections."""
