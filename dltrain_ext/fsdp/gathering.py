"""Gathers the parameters of one group of ``fully_shard`` in a codec."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dltrain_ext.compress.layout import EXACT, Layout
from dltrain_ext.fsdp.flat import Part, Sharded, regions_of


class Gathering:
    """The all-gathers of one group.

    A rank decodes its own shard, too, so that all ranks compute with the same bits. The shard itself does not change.

    Args:
        name: that of the module, for errors.
        parameters: all those of the group.
        min_compress_numel: parameters of fewer elements are small, and sent as they are.
    """

    def __init__(self, name: str, parameters: Sequence[Sharded], codec: str, min_compress_numel: int):
        self._name, self._parameters = name, parameters
        self._codec, self._min_compress_numel = codec, min_compress_numel
        self._layouts: dict[torch.dtype, Layout[Part]] = {}

    def enter(self, output: Tensor, shards: int) -> Layout[Part]:
        """Is called before each all-gather with its result, which has the shards one after another."""
        if (layout := self._layouts.get(output.dtype)) is None:
            layout = self._layouts[output.dtype] = self._lay(output, shards)
        return layout

    def _lay(self, output: Tensor, shards: int) -> Layout[Part]:
        exact = EXACT.get(output.dtype)
        codec = exact if self._codec == "raw" else self._codec
        if exact is None or codec is None:
            raise TypeError(
                f"gather: expected parameters of {self._name or 'the model'} that are all float32, float16 or "
                "bfloat16, got several dtypes or others; a MixedPrecisionPolicy with param_dtype makes them one"
            )
        regions = regions_of(
            self._parameters, codec, self._min_compress_numel, range(shards), has_owners=True, exact=exact
        )
        if (numel := sum(region.numel for region in regions)) != output.numel():
            raise RuntimeError(
                f"gather: expected {numel} elements of the parameters of {self._name or 'the model'}, got "
                f"{output.numel()}; parameters with an all-gather of their own are not supported"
            )
        return Layout(output, regions, None, by_parameter=True)

    @property
    def wire_bytes(self) -> int:
        return int(sum(layout.handle.stats()["wire_bytes"] for layout in self._layouts.values()))
