"""The gradients of one group of parameters of ``fully_shard``, from one reduction to the next."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dltrain_ext.compress.feedback import Feedback
from dltrain_ext.compress.layout import Layout, Region
from dltrain_ext.compress.scaling import StepOutcome
from dltrain_ext.compress.watch import Watch
from dltrain_ext.fsdp.flat import Part, Sharded, regions_of


class Gradient:
    """A flat tensor that is reduced in each step.

    Args:
        name: that of the module, for errors.
        parameters: those of the group that have gradients.
        is_scattered: whether shards of the sum are given to the ranks; else the tensor is this rank's shards.
        min_compress_numel: parameters of fewer elements are small, and sent raw.
        seed: the seed of its random numbers, different for each gradient.
        feedback_dtype: None without error feedback.
        scaler: one that is enabled, or None.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[Sharded],
        *,
        is_scattered: bool,
        codec: str,
        min_compress_numel: int,
        seed: int,
        steps: int,
        feedback_dtype: torch.dtype | None,
        scaler: torch.amp.GradScaler | None,
    ):
        self.name, self.parameters, self.codec, self.seed, self.steps = name, parameters, codec, seed, steps
        self.feedback = (
            None if feedback_dtype is None else Feedback[Part](feedback_dtype, double_buffered=scaler is not None)
        )
        self._shards: Sequence[int] = ()
        if parameters:
            self._shards = range(parameters[0].shards) if is_scattered else [parameters[0].shard]
        self._regions = regions_of(parameters, codec, min_compress_numel, self._shards, has_owners=is_scattered)
        self._min_compress_numel = min_compress_numel
        self._latest: Layout[Part] | None = None
        self._layouts: dict[int, Layout[Part]] = {}  # by numel: without feedback some parameters may be unused
        self._scaler = scaler

    @property
    def numel(self) -> int:
        """The number of elements of the latest reduction or, before the first one, if no parameter is unused."""
        return sum(region.numel for region in self._regions) if self._latest is None else self._latest.numel

    @property
    def message_bytes(self) -> int:
        """The size of the message of the latest reduction; 0 before the first one."""
        return 0 if self._latest is None else self._latest.message_bytes

    def enter(self, tensor: Tensor) -> Layout[Part]:
        """Is called before each reduction."""
        layout = self._layouts.get(tensor.numel())
        if layout is None:
            layout = self._layouts[tensor.numel()] = self._lay(tensor)
        self._latest = layout
        if self.feedback is not None:
            self.feedback.settle()
            if self._scaler is not None:
                self.feedback.expect(StepOutcome.of_scaler(self._scaler))
        self.steps += 1
        return layout

    def _lay(self, tensor: Tensor) -> Layout[Part]:
        numel, expected = tensor.numel(), sum(region.numel for region in self._regions)
        if numel == expected:
            return Layout(tensor, self._regions, self.feedback, by_parameter=True)
        if self.feedback is not None:
            raise RuntimeError(
                f"error_feedback: expected gradients of all parameters of {self.name or 'the model'} in each backward "
                f"pass, {expected} elements, got {numel}; where some are unused, register with False"
            )
        # FSDP does not say which parameters the tensor has.
        codec = "raw" if numel < self._min_compress_numel else self.codec
        return Layout(tensor, [Region((self.name, 0), 0, numel, codec, 0)], None)

    def look(self, watch: Watch, layout: Layout[Part], tensor: Tensor, share: Tensor | float) -> None:
        """Shows this rank's contribution, after ``enter``."""
        parts = [(region.part, tensor[region.first : region.first + region.numel]) for region in self._regions]
        if tensor.numel() != sum(region.numel for region in self._regions):  # some parameters are unused
            parts = [((self.name or "the model", 0), tensor)]
        parts = [(part, gradient) for part, gradient in parts if gradient.numel()]
        norms = None
        if layout.has_feedback and self.feedback is not None:
            norms = self.feedback.norms(part for part, _ in parts)
        names = tuple(name for (name, _), _ in parts)
        watch.look(names, [gradient for _, gradient in parts], norms, self.steps, share)

    def residual_norm(self) -> float:
        """Returns the 2-norm of the residuals. Waits for the device."""
        if self.feedback is None:
            return 0.0
        self.feedback.settle()
        return self.feedback.norm((parameter.name, shard) for parameter in self.parameters for shard in self._shards)

    def residuals(self) -> dict[str, Tensor]:
        """Returns copies of the residuals by parameter, in its shape or that of this rank's shard."""
        feedback = self.feedback
        if feedback is None:
            return {}
        feedback.settle()

        def rows(parameter: Sharded, shard: int) -> Tensor:
            lost = feedback.of((parameter.name, shard))
            padded = torch.zeros(parameter.padded, dtype=feedback.dtype) if lost is None else lost
            return parameter.rows(padded, shard)

        return {
            parameter.name: torch.cat([rows(parameter, shard) for shard in self._shards], parameter.dim)
            for parameter in self.parameters
        }

    def restore(self, residuals: Mapping[str, Tensor], is_whole: bool) -> None:
        """Begins with these residuals by parameter, in its shape or, unless ``is_whole``, in that of this rank's
        shard."""
        if self.feedback is None:
            return
        for parameter in self.parameters:
            if (lost := residuals.get(parameter.name)) is None:
                continue
            for shard in self._shards:
                rows = parameter.cut(lost, shard) if is_whole else lost
                self.feedback.initial[parameter.name, shard] = parameter.flat(rows).to(self.feedback.dtype)

    def stats(self) -> dict[str, int]:
        counted = [layout.handle.stats() for layout in self._layouts.values()]
        return {
            "numel": self.numel,
            **{key: int(sum(each[key] for each in counted)) for key in ("calls", "wire_bytes")},
        }
