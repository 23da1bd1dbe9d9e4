"""Ranks of one host that add up their gradients before one of them pushes them."""

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from dltrain_ext import comm
from dltrain_ext.comm.together import broadcast_all


class Host:
    """The ranks of a group that share this rank's host: consecutive ones, of which the first is the leader.

    Making one is a collective call of all ranks of the group.

    Attributes:
        leaders: the process group of the leaders of all hosts; None on other ranks.
        is_leader: whether this rank is one.
        share: the number of ranks of this host over the mean number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup, ranks_per_host: int, timeout: timedelta):
        ranks = dist.get_process_group_ranks(group)
        hosts = [ranks[first : first + ranks_per_host] for first in range(0, len(ranks), ranks_per_host)]
        own = next(host for host in hosts if dist.get_rank() in host)
        self._first = own[0]
        self.is_leader = own[0] == dist.get_rank()
        self.share = len(own) * len(hosts) / len(ranks)
        self._communicator = comm.Communicator(group, timeout=timeout, ranks_per_host=1, ranks=own)
        self.leaders: dist.ProcessGroup | None = None
        if self.is_leader:
            leaders = [host[0] for host in hosts]
            self.leaders = dist.new_group(leaders, timeout, "gloo", use_local_synchronization=True)

    def reduce(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns on the leader the mean of the gradients of the host's ranks, in float32."""
        flat = torch.cat([gradient.detach().to("cpu", torch.float32).reshape(-1) for gradient in gradients.values()])
        self._communicator.reduce(flat, self._first, op="avg")
        mean, at = {}, 0
        for name, gradient in gradients.items():
            mean[name] = flat[at : at + gradient.numel()].view(gradient.shape)
            at += gradient.numel()
        return mean

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Gives the leader's tensors to the other ranks."""
        on_cpu = [tensor.detach().cpu() for tensor in tensors]
        broadcast_all(self._communicator, on_cpu, self._first)
        for tensor, received in zip(tensors, on_cpu, strict=True):
            if tensor.is_cuda:
                tensor.detach().copy_(received)

    def close(self) -> None:
        self._communicator.close()
