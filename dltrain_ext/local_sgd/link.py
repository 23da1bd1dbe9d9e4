"""The connections of a site to the others, which are made anew when others come or go."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from dltrain_ext.comm import Communicator
from dltrain_ext.comm.addresses import check_private
from dltrain_ext.comm.groups import Members
from dltrain_ext.local_sgd.sockets import limit_unsent, sockets

_UNSENT = 1 << 16  # bytes of a connection: 50 ms at 10 Mbit/s


class Link:
    """Args are those of :class:`dltrain_ext.local_sgd.DiLoCo`."""

    def __init__(self, timeout: timedelta | None, allow_public: bool):
        self._timeout, self._allow_public = timeout, allow_public
        self._communicator: Communicator | None = None
        self._ranks: list[int] = []
        self._sent = 0  # by earlier communicators

    def connect(self, members: Members) -> None:
        """Connects the sites, one rank each, and disconnects those of before. It is a collective call."""
        self.close()
        if not self._allow_public:
            check_private(members, "allow_public")
        before = sockets()
        self._ranks = members.ranks
        self._communicator = Communicator(members, timeout=self._timeout, ranks_per_host=1)
        limit_unsent(sockets() - before, _UNSENT)

    def close(self) -> None:
        if self._communicator is not None:
            self._sent = self.wire_bytes
            self._communicator.close()
            self._communicator = None

    @property
    def communicator(self) -> Communicator:
        if self._communicator is None:
            raise dist.DistBackendError("the sites are not connected: an earlier attempt has failed")
        return self._communicator

    @property
    def lost(self) -> int | None:
        """The rank that is responsible for a failure, if it is known."""
        return None if self._communicator is None else self._communicator.culprit

    @property
    def wire_bytes(self) -> int:
        """What this rank has sent."""
        return self._sent + (0 if self._communicator is None else self._communicator.stats()["wire_bytes"])

    def gather(self, number: int) -> list[int]:
        """Returns the numbers of all sites, of 64 bits."""
        found = torch.empty(self.communicator.world_size, dtype=torch.int64)
        self.communicator.all_gather(found, torch.tensor([number]))
        return found.tolist()

    def agree(self, number: int) -> bool:
        """Returns whether all sites have the same number."""
        return len(set(self.gather(number))) == 1

    def give(self, tensor: Tensor, source: int) -> None:
        """Gives all sites the tensor of one, by its place among them."""
        self.communicator.broadcast(tensor, self._ranks[source])
