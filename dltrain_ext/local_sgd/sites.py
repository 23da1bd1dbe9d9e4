"""The ranks within a site: what of a model each of them averages with its counterparts at the other sites."""

import heapq
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext.local_sgd.trained import Trained


class Site:
    """The ranks that have the same parameters as this one, by DDP. Each of them averages some of the parameters, and
    gives the others the result, so that a site sends as much as one rank would.

    Args:
        group: the ranks that have the same parameters; None if this rank is alone, or has a shard of its own.
        size: the number of ranks of the site.
    """

    def __init__(self, group: dist.ProcessGroup | None, size: int):
        self._group, self.size = group, size
        self._rank = 0 if group is None else dist.get_rank(group)

    def owners(self, trained: Sequence[Trained]) -> list[int]:
        """Returns the rank within the site that averages each parameter, so that all average about as much."""
        loads = [(0, rank) for rank in range(1 if self._group is None else self.size)]
        owners = [0] * len(trained)
        for index in sorted(range(len(trained)), key=lambda i: -trained[i].numel):
            load, rank = heapq.heappop(loads)
            owners[index] = rank
            heapq.heappush(loads, (load + trained[index].numel, rank))
        return owners

    def is_own(self, owner: int) -> bool:
        return owner == self._rank

    def share(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Gives all ranks of the site each tensor of its owner."""
        if self._group is None or self.size == 1:
            return
        works = [
            dist.broadcast(tensor, group=self._group, group_src=owner, async_op=True)
            for tensor, owner in zip(tensors, owners, strict=True)
        ]
        for work in works:
            work.wait()


def site_of(model: nn.Module, trained: Sequence[Trained], group: dist.ProcessGroup | None) -> Site:
    """Returns the site of this rank. Raises ValueError if the group has two ranks of a site. Without a group a site has
    one rank."""
    if group is None:
        check_alone(model, trained)
        return Site(None, 1)
    here = {dist.get_rank()}
    site = None
    if isinstance(model, DistributedDataParallel):
        site = model.process_group
        here.update(dist.get_process_group_ranks(site))
    for each in trained:
        mesh = getattr(each.parameter, "device_mesh", None)
        if mesh is not None:
            here.update(mesh.mesh.flatten().tolist())
    ranks = dist.get_process_group_ranks(group)
    if len(both := sorted(here.intersection(ranks))) > 1:
        raise ValueError(
            f"group: expected one rank of each site, got ranks {both} of this one, whose model is one; make a device "
            "mesh of two dimensions, as in the class's documentation, and pass the group across the sites"
        )
    return Site(site, len(here))


def check_alone(model: nn.Module, trained: Sequence[Trained]) -> None:
    """Raises ValueError if the model is one of several ranks."""
    if isinstance(model, DistributedDataParallel) or any(hasattr(each.parameter, "device_mesh") for each in trained):
        raise ValueError(
            "model: expected that of a site of one rank with a membership or a store, got DDP's or one on a device "
            "mesh; sites of several ranks need a process group"
        )
