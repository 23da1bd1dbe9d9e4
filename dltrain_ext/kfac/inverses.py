"""The inverses of the layers' damped factors: averaged for their owners, inverted there, and shared."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dltrain_ext.comm import Owners
from dltrain_ext.kfac.cholesky import damped_inverses
from dltrain_ext.kfac.layers import Layer
from dltrain_ext.kfac.triangle import pack, packed_numel, unpack

PATIENCE = 10  # steps without anything new
Numbers = dict[str, list[float]]  # by layer, the same on all ranks


class Inverses:
    """The inverses of the factors of those layers whose gradients this rank preconditions.

    Factors travel, and are inverted, in units of the means of their diagonals, a and g; inverses travel in units of
    theirs. So numbers are of the order of 1 in every codec. Damping adds pi sqrt(damping) to the diagonal of the one
    factor and sqrt(damping) / pi to that of the other, with pi = sqrt(a / g). In units of a and of g, both are
    sqrt(damping / (a g)).

    Attributes:
        names: the layers that have inverses, on any rank.
        retries: how many times the damping of a factor was multiplied by 10, on all ranks together.
    """

    def __init__(self, layers: Mapping[str, Layer], owners: Owners, codec: str):
        self._layers, self._owners, self._codec = layers, owners, codec
        self._matrices: dict[str, tuple[Tensor, Tensor]] = {}  # (inputs, inputs) and (outputs, outputs)
        self.names: list[str] = []
        self.retries = 0
        self._lacking, self._patience = False, PATIENCE

    def update(self, damping: float) -> None:
        """Makes the inverses anew. This is a collective call, for which the host waits. After an error the earlier
        inverses are still there, on all ranks."""
        units, weights, lacking = self._units()
        sums = {name: self._packed_sums(name, units[name], weights[name]) for name in units}
        means = self._owners.reduce(sums, self._codec)
        relative = {name: math.sqrt(damping / math.prod(units[name])) for name in means}
        inverses, figures = self._invert(means, relative)
        shared = self._owners.share(inverses, {name: packed.shape for name, packed in sums.items()}, self._codec)
        found = self._total(figures, 3)
        if failed := [name for name in units if not all(map(math.isfinite, found[name]))]:
            raise ArithmeticError(f"step: the factors of layer {failed[0]!r} cannot be inverted with damping {damping}")
        matrices = {}
        for name, packed in shared.items():
            inputs, gradients = self._unpacked(name, packed)
            of_inputs, of_gradients, _ = found[name]
            matrices[name] = inputs, gradients.mul_(of_inputs * of_gradients / math.prod(units[name]))
        self._patience = PATIENCE if len(units) > len(self.names) else self._patience - 1
        self._matrices, self.names, self._lacking = matrices, list(units), lacking
        self.retries += round(sum(growths for _, _, growths in found.values()))
        for layer in self._layers.values():
            layer.calls = 0

    def reset(self) -> None:
        """Forgets the inverses, as new sums are there; layers that have none of these wait for the next batch."""
        self._matrices, self.names, self._patience = {}, [], PATIENCE
        self._lacking = any(float(moment.weight) == 0 for layer in self._layers.values() for moment in layer.moments)
        for layer in self._layers.values():
            layer.calls = 0

    @property
    def lacks_some(self) -> bool:
        """Whether inverses should be made at every step, because a layer that was called has none: its inputs or
        gradients were all zero or not finite. If ten more batches do not change that, it is no hurry."""
        return self._lacking and self._patience > 0

    def precondition(self, name: str, gradient: Tensor) -> Tensor:
        """Returns the product of a gradient (outputs, inputs) with both inverses."""
        inputs, gradients = self._matrices[name]
        return gradients @ gradient @ inputs

    def _units(self) -> tuple[Numbers, Numbers, bool]:
        """Returns the means of the diagonals of the factors, the means over the ranks of the sums' weights, and whether
        a layer that was called has neither."""
        local = {name: layer.figures() for name, layer in self._layers.items()}
        units, weights = {}, {}
        lacking, calls = False, 0.0
        for name, (*pairs, of_layer) in self._total(local, 5).items():
            sums, weight = pairs[:2], pairs[2:]
            calls += of_layer
            if all(0 < number < math.inf for number in pairs):
                units[name] = [one / (by * size) for one, by, size in zip(sums, weight, self._sizes(name), strict=True)]
                weights[name] = [by / self._owners.world_size for by in weight]
            else:
                lacking |= of_layer > 0
        if not (units or calls or self._lacking):
            raise RuntimeError(
                "step: expected the gradients of a forward and a backward pass in training mode, got none"
            )
        return units, weights, lacking or (self._lacking and not units)

    def _total(self, rows: Mapping[str, Tensor], width: int) -> Numbers:
        """Adds up a row of numbers for each layer over all ranks, some of which have none for it."""
        first = next(iter(self._layers.values()))
        table = torch.zeros(len(self._layers), width, device=first.inputs.sum.device)
        for index, name in enumerate(self._layers):
            if name in rows:
                table[index] = rows[name]
        return dict(zip(self._layers, self._owners.sum(table).tolist(), strict=True))

    def _packed_sums(self, name: str, units: list[float], weights: list[float]) -> Tensor:
        moments = self._layers[name].moments
        parts = [
            pack(moment.sum).div_(unit * weight) for moment, unit, weight in zip(moments, units, weights, strict=True)
        ]
        return torch.cat(parts)

    def _invert(
        self, means: dict[str, Tensor], dampings: dict[str, float]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns the inverses, packed and in units of their diagonals' means, and for each layer these means and how
        often dampings were multiplied by 10."""
        matrices = [matrix for name, packed in means.items() for matrix in self._unpacked(name, packed)]
        inverses, growths = damped_inverses(matrices, [dampings[name] for name in means for _ in range(2)])
        units = [inverse.diagonal().mean() for inverse in inverses]
        packed = [pack(inverse).div_(unit) for inverse, unit in zip(inverses, units, strict=True)]
        result, figures = {}, {}
        for index, name in enumerate(means):
            pair = slice(2 * index, 2 * index + 2)
            result[name] = torch.cat(packed[pair])
            figures[name] = torch.stack([*units[pair], units[0].new_tensor(sum(growths[pair]))])
        return result, figures

    def _unpacked(self, name: str, packed: Tensor) -> tuple[Tensor, ...]:
        sizes = self._sizes(name)
        parts = torch.split(packed, [packed_numel(size) for size in sizes])
        return tuple(unpack(part, size) for part, size in zip(parts, sizes, strict=True))

    def _sizes(self, name: str) -> list[int]:
        return [moment.size for moment in self._layers[name].moments]
