"""The flat tensors that ``fully_shard`` reduces and gathers: which of their elements belong to which parameter."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dltrain_ext.compress.layout import Region, is_small, rows_of
from dltrain_ext.compress.parameters import numbers_of

Part = tuple[str, int]
"""The name of a parameter, and the number of the shard."""


@dataclass(frozen=True)
class Sharded:
    """A parameter of ``fully_shard``.

    A flat tensor has the parameters' shards one after another, padded to equal sizes. If it has those of several ranks,
    it has them rank by rank::

        a of rank 0 | b of rank 0 | a of rank 1 | b of rank 1
    """

    name: str
    shape: tuple[int, ...]  # of what is sharded: the parameter or, in tensor parallelism, this rank's part of it
    dim: int  # the dimension that is sharded
    group: dist.ProcessGroup  # over whose ranks
    shard: int  # the number of this rank's shard
    shards: int
    device: torch.device
    has_gradient: bool
    is_parallel: bool

    @classmethod
    def of(cls, name: str, parameter: DTensor) -> "Sharded":
        mesh, placements = parameter.device_mesh, parameter.placements
        over = sharded_dim(parameter)
        shape = list(parameter.shape)
        for mesh_dim in range(over + 1, len(placements)):  # tensor parallelism divides first
            if not placements[mesh_dim].is_replicate():
                dim = placements[mesh_dim].dim  # type: ignore[attr-defined]
                shape[dim] = -(-shape[dim] // mesh.size(mesh_dim))
        return cls(
            name,
            tuple(shape),
            placements[over].dim,  # type: ignore[attr-defined]
            mesh.get_group(over),
            mesh.get_local_rank(over),
            mesh.size(over),
            parameter.device,
            parameter.requires_grad,
            is_parallel=tuple(shape) != tuple(parameter.shape),
        )

    @property
    def padded(self) -> tuple[int, ...]:
        """The shape of a shard."""
        shape = list(self.shape)
        shape[self.dim] = -(-shape[self.dim] // self.shards)
        return tuple(shape)

    def like(self) -> Tensor:
        """Returns a tensor that has the shape and the device, and no memory."""
        return torch.empty(1, device=self.device).expand(self.shape)

    def _rows(self, shard: int) -> tuple[int, int]:
        return rows_of(self.shape[self.dim], self.shards)[shard]

    def cut(self, whole: Tensor, shard: int) -> Tensor:
        """Returns the part of the whole that is a shard."""
        return whole.narrow(self.dim, *self._rows(shard))

    def rows(self, flat: Tensor, shard: int) -> Tensor:
        """Returns a shard without its padding, of which ``flat`` is the content in a flat tensor."""
        return flat.view(self.padded).narrow(self.dim, 0, self._rows(shard)[1])

    def flat(self, rows: Tensor) -> Tensor:
        """Returns the content in a flat tensor of a shard without its padding."""
        out = rows.new_zeros(self.padded)
        out.narrow(self.dim, 0, rows.shape[self.dim]).copy_(rows)
        return out.flatten()


def sharded_dim(parameter: DTensor) -> int:
    """Returns the mesh dimension over which FSDP shards: its replicas are before it, tensor parallelism is behind."""
    return next(dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate())


def regions_of(
    parameters: Sequence[Sharded],
    codec: str,
    min_compress_numel: int,
    shards: Iterable[int],
    *,
    has_owners: bool,
    exact: str = "raw",
) -> list[Region[Part]]:
    """Returns the regions of the flat tensor that has these shards.

    Small parameters are sent in the codec ``exact``.
    """
    regions = []
    first = number = 0
    for shard in shards:
        for parameter in parameters:
            numel = math.prod(parameter.padded)
            its_codec = exact if is_small(parameter.shape, min_compress_numel) else codec
            owner = shard if has_owners else -1
            regions.append(Region((parameter.name, shard), first, numel, its_codec, number, owner))
            first += numel
            number += numbers_of(numel)
    return regions
