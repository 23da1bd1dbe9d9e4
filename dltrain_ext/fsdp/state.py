"""The state that the hooks of a model of ``fully_shard`` share."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dltrain_ext._arguments import is_dense
from dltrain_ext.comm import Communicator
from dltrain_ext.compress.checkpoint import key_of
from dltrain_ext.compress.scaling import is_scaling, loss_scale_of
from dltrain_ext.fsdp.gradient import Gradient

VERSION = 1


class ShardedState:
    """The state that :func:`dltrain_ext.fsdp.register` returns.

    Args:
        numels: the number of elements of each gradient, by the name of its module.
        replicas: the ranks between which shards are averaged; None if the reduce-scatter is compressed.
    """

    def __init__(
        self,
        numels: Mapping[str, int],
        replicas: dist.ProcessGroup | None,
        *,
        codec: str,
        algorithm: str,
        feedback_dtype: torch.dtype | None,
        scaler: torch.amp.GradScaler | None,
        min_compress_numel: int,
        stochastic: bool,
        seed: int,
        timeout: timedelta | None,
    ):
        self.codec, self.algorithm, self.min_compress_numel = codec, algorithm, min_compress_numel
        self._scaler = scaler if is_scaling(scaler) else None
        self._feedback_dtype = feedback_dtype
        self._stochastic, self._seed, self._timeout = stochastic, seed, timeout
        self._numels = dict(numels)
        self._communicators: dict[dist.ProcessGroup, Communicator] = {}
        if replicas is not None:
            self._communicators[replicas] = Communicator(replicas, timeout=timeout)
        self._begin(dict.fromkeys(numels, 0))

    def _begin(self, steps: Mapping[str, int]) -> None:
        """Begins without residuals."""
        self._gradients = {
            name: Gradient(name, numel, (self._seed + index) % 2**63, steps[name], self._feedback_dtype, self._scaler)
            for index, (name, numel) in enumerate(self._numels.items())
        }

    def all_reduce(self, name: str, tensor: Tensor) -> None:
        """Averages a module's gradient between the replicas, in place."""
        (communicator,) = self._communicators.values()
        algorithm, segments = self.algorithm, None
        if algorithm == "auto":
            algorithm, segments = communicator.plan_for(self.codec, 4 * tensor.numel())
        self._reduce(name, communicator, tensor, average=True, algorithm=algorithm, segments=segments or 0)

    def reduce_scatter(self, name: str, shard: Tensor, tensor: Tensor, group: dist.ProcessGroup, average: bool) -> None:
        """Reduces a module's gradient over a group, and writes this rank's part to ``shard``."""
        if group not in self._communicators:
            self._communicators[group] = Communicator(group, timeout=self._timeout, ranks_per_host=1)
        self._reduce(
            name, self._communicators[group], tensor, collective="reduce_scatter", shard=shard, average=average
        )

    def _reduce(self, name: str, communicator: Communicator, tensor: Tensor, **options: Any) -> None:
        """Returns when the reduction is complete or, on CUDA, when the current stream waits for it."""
        codec = "raw" if tensor.numel() < self.min_compress_numel else self.codec
        gradient = self._gradients[name]
        layout = gradient.enter(tensor, codec)
        communicator.reduce_bucket(
            tensor,
            layout.handle,
            feeds=layout.has_feedback,
            codec=codec,
            loss_scale=loss_scale_of(self._scaler, tensor.device) if layout.has_feedback else None,
            stochastic=self._stochastic,
            seed=gradient.seed,
            step=gradient.steps % 2**32,
            **options,
        ).wait()

    def stats(self) -> dict[str, Any]:
        """Returns a dict: ``wire_bytes``, which this rank has sent for gradients; ``ratio``, the size of fp32 messages
        over that of the latest reductions' messages, or None before the first; and ``per_module``, which has for each
        module that has been reduced the ``numel`` of the latest reduction, ``calls`` and ``wire_bytes``."""
        reduced = {name: gradient for name, gradient in self._gradients.items() if gradient.message_bytes > 0}
        message_bytes = sum(gradient.message_bytes for gradient in reduced.values())
        return {
            "wire_bytes": sum(communicator.stats()["wire_bytes"] for communicator in self._communicators.values()),
            "ratio": 4 * sum(gradient.numel for gradient in reduced.values()) / message_bytes if reduced else None,
            "per_module": {name: gradient.stats() for name, gradient in reduced.items()},
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns plain tensors and numbers of this rank, for ``torch.save`` or ``torch.distributed.checkpoint``: by
        rank (``"rank 0 of 4"``) the residual of each module's gradient, flat. It must not be called between a backward
        pass and the ``step`` of the scaler, which may skip that step."""
        lost = {name: gradient.lost() for name, gradient in self._gradients.items() if gradient.feedback is not None}
        steps = {name: gradient.steps for name, gradient in self._gradients.items()}
        return {"version": VERSION, "steps": steps, "feedback": {_key(): lost}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from what this rank saved in a world of the same size.

        Raises:
            ValueError: the state is invalid; the message has the expected and the actual value. Nothing has changed.
        """
        given = state_dict if isinstance(state_dict, Mapping) else {}
        steps, by_rank = given.get("steps"), given.get("feedback")
        version = given.get("version")
        if (
            type(version) is not int
            or version != VERSION
            or not isinstance(steps, Mapping)
            or not isinstance(by_rank, Mapping)
        ):
            raise ValueError(f"state_dict: expected one of a ShardedState, version {VERSION}")
        if _key() not in by_rank:
            raise ValueError(
                f"state_dict: expected what {_key()} saved, since shards differ with the world size, got that of "
                f"{', '.join(map(str, by_rank))}; to continue without it, register anew"
            )
        lost = by_rank[_key()]
        if not isinstance(lost, Mapping):
            raise ValueError(f"state_dict: expected the feedback of {_key()} by module, got {type(lost).__name__}")
        found = {name: tensor.numel() for name, tensor in lost.items() if _is_feedback(tensor)}
        if steps.keys() != self._numels.keys() or (lost and found != self._numels):
            raise ValueError(f"state_dict: expected the modules and sizes of this model, {self._numels}, got {found}")
        if not all(type(done) is int and done >= 0 for done in steps.values()):
            raise ValueError(f"state_dict: expected steps of at least 0, got {dict(steps)}")
        self._begin(steps)
        for name, gradient in self._gradients.items():
            if gradient.feedback is not None and name in lost:
                gradient.feedback.initial[name] = lost[name].to(gradient.feedback.dtype)


def _is_feedback(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and is_dense(value)
        and value.dim() == 1
        and value.is_floating_point()
        and not value.is_meta
    )


def _key() -> str:
    return key_of(dist.get_rank(), dist.get_world_size())
