"""The state that the hooks of a model of ``fully_shard`` share."""

import collections
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dltrain_ext.comm import Communicator
from dltrain_ext.comm.metrics import Bandwidths
from dltrain_ext.comm.work import Work
from dltrain_ext.compress import checkpoint
from dltrain_ext.compress.scaling import is_scaling, loss_scale_of
from dltrain_ext.compress.watch import Finding, Watch
from dltrain_ext.fsdp.checkpoint import checked, joined
from dltrain_ext.fsdp.flat import Sharded
from dltrain_ext.fsdp.gathering import Gathering
from dltrain_ext.fsdp.gradient import Gradient


class ShardedState:
    """The state that :func:`dltrain_ext.fsdp.register` returns.

    Args:
        groups: the parameters that are reduced and gathered together, by the name of their module.
        replicas: the ranks between which shards are averaged; None if the reduce-scatter is compressed.
    """

    def __init__(
        self,
        groups: Mapping[str, Sequence[Sharded]],
        replicas: dist.ProcessGroup | None,
        *,
        codec: str,
        algorithm: str,
        gather: str | None,
        feedback_dtype: torch.dtype | None,
        scaler: torch.amp.GradScaler | None,
        min_compress_numel: int,
        stochastic: bool,
        seed: int,
        timeout: timedelta | None,
        watch: bool,
    ):
        self.codec, self.algorithm, self.gather, self.min_compress_numel = codec, algorithm, gather, min_compress_numel
        self._scaler = scaler if is_scaling(scaler) else None
        self._feedback_dtype = feedback_dtype
        self._stochastic, self._seed, self._timeout = stochastic, seed, timeout
        self._groups = {name: list(parameters) for name, parameters in groups.items()}
        self._replicas = replicas
        self._communicators: dict[dist.ProcessGroup, Communicator] = {}
        if replicas is not None:
            self._communicators[replicas] = Communicator(replicas, timeout=timeout)
        self._gatherings: dict[str, Gathering] = {}
        if gather is not None:
            for name, parameters in self._groups.items():
                self._gatherings[name] = Gathering(name, parameters, gather, min_compress_numel)
        self._bandwidths = Bandwidths()
        self._watch = Watch() if watch else None
        self._begin(dict.fromkeys(groups, 0))

    def _begin(self, steps: Mapping[str, int]) -> None:
        """Begins without residuals."""
        self._gradients = {
            name: Gradient(
                name,
                [parameter for parameter in parameters if parameter.has_gradient],
                is_scattered=self._replicas is None,
                codec=self.codec,
                min_compress_numel=self.min_compress_numel,
                seed=(self._seed + index) % 2**63,
                steps=steps[name],
                feedback_dtype=self._feedback_dtype,
                scaler=self._scaler,
            )
            for index, (name, parameters) in enumerate(self._groups.items())
        }

    def all_reduce(self, name: str, tensor: Tensor) -> None:
        """Averages a module's gradient between the replicas, in place."""
        assert self._replicas is not None
        communicator = self._communicators[self._replicas]
        algorithm, segments = self.algorithm, None
        if algorithm == "auto":
            algorithm, segments = communicator.plan_for(self.codec, 4 * tensor.numel())
        self._reduce(name, communicator, tensor, average=True, algorithm=algorithm, segments=segments or 0)

    def reduce_scatter(self, name: str, shard: Tensor, tensor: Tensor, group: dist.ProcessGroup, average: bool) -> None:
        """Reduces a module's gradient over a group, and writes this rank's part to ``shard``."""
        self._reduce(name, self._in_one_level(group), tensor, collective="reduce_scatter", shard=shard, average=average)

    def _in_one_level(self, group: dist.ProcessGroup) -> Communicator:
        if group not in self._communicators:
            self._communicators[group] = Communicator(group, timeout=self._timeout, ranks_per_host=1)
        return self._communicators[group]

    def _reduce(self, name: str, communicator: Communicator, tensor: Tensor, **options: Any) -> None:
        """Returns when the reduction is complete or, on CUDA, when the current stream waits for it."""
        gradient = self._gradients[name]
        layout = gradient.enter(tensor)
        if self._watch is not None:
            share = 1.0 / communicator.world_size if options["average"] else 1.0
            scale = loss_scale_of(self._scaler, tensor.device)
            gradient.look(self._watch, layout, tensor, share if scale is None else share / scale)
        communicator.run_bucket(
            tensor,
            layout.handle,
            feeds=layout.has_feedback,
            codec=layout.codec,
            loss_scale=loss_scale_of(self._scaler, tensor.device) if layout.has_feedback else None,
            stochastic=self._stochastic,
            seed=gradient.seed,
            step=gradient.steps % 2**32,
            **options,
        )

    def all_gather(
        self, name: str, output: Tensor, shard: Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> Work | None:
        """Gathers a module's parameters in the codec ``gather``, also this rank's own. Returns when that is complete,
        unless ``async_op``, or, on CUDA, when the current stream waits for it."""
        layout = self._gatherings[name].enter(output, dist.get_world_size(group))
        communicator, options = self._in_one_level(group), {"collective": "all_gather", "codec": layout.codec}
        if async_op:
            return communicator.submit_bucket(output, layout.handle, shard=shard, **options)
        communicator.run_bucket(output, layout.handle, shard=shard, **options)
        return None

    def stats(self) -> dict[str, Any]:
        """Returns a dict: ``wire_bytes``, which this rank has sent for gradients, and ``gather_bytes``, for parameters;
        ``ratio``, the size of fp32 messages over that of the latest reductions' messages, or None before the first; and
        ``per_module``, which has for each module that has been reduced the ``numel`` of the latest reduction, ``calls``
        and ``wire_bytes``. ``gather_bytes`` is 0 if parameters are gathered by torch."""
        reduced = {name: gradient for name, gradient in self._gradients.items() if gradient.message_bytes > 0}
        message_bytes = sum(gradient.message_bytes for gradient in reduced.values())
        per_module = {name: gradient.stats() for name, gradient in reduced.items()}
        return {
            "wire_bytes": sum(each["wire_bytes"] for each in per_module.values()),
            "gather_bytes": sum(gathering.wire_bytes for gathering in self._gatherings.values()),
            "ratio": 4 * sum(gradient.numel for gradient in reduced.values()) / message_bytes if reduced else None,
            "per_module": per_module,
        }

    def metrics(self, *, errors: bool = True) -> dict[str, float]:
        """Returns numbers for a logger, a flat dict. Waits for the device.

        Args:
            errors: whether ``fsdp/residual_norm`` is computed, for which the residuals are read once.

        Returns:
            The entries of :meth:`dltrain_ext.comm.Communicator.metrics`, over all connections; ``fsdp/steps``, the most
            reductions of a module; ``fsdp/gather_bytes``, which this rank has sent for parameters; ``fsdp/ratio``, the
            size of fp32 messages over that of the latest reductions' messages; and with feedback
            ``fsdp/residual_norm``, the 2-norm of this rank's residuals in units of the unscaled, averaged gradient.
        """
        counted = collections.Counter[str]()
        for communicator in self._communicators.values():
            counted.update(communicator.counted())
        stats = self.stats()
        found = {
            **self._bandwidths.metrics(counted),
            "fsdp/steps": float(max((gradient.steps for gradient in self._gradients.values()), default=0)),
            "fsdp/gather_bytes": float(stats["gather_bytes"]),
        }
        if stats["ratio"] is not None:
            found["fsdp/ratio"] = stats["ratio"]
        if errors and self._feedback_dtype is not None:
            norms = [gradient.residual_norm() for gradient in self._gradients.values()]
            found["fsdp/residual_norm"] = math.hypot(*norms)
        return found

    def findings(self) -> list[Finding]:
        """Returns what went wrong first since the previous call, as :meth:`dltrain_ext.ddp.AllReduceState.findings`
        does, over all ranks. ``step`` counts the reductions of the parameter's module.

        Raises:
            RuntimeError: the state was made without ``watch=True``.
        """
        if self._watch is None:
            raise RuntimeError("findings: expected a state with watch=True")
        return self._watch.findings(None)

    @property
    def _contribution(self) -> tuple[int, int]:
        """Which of the contributions to an average this rank makes, and how many there are."""
        return dist.get_rank(self._replicas), dist.get_world_size(self._replicas)

    @property
    def _shard(self) -> tuple[int, int]:
        """Which of how many shards of the parameters this rank's residuals are."""
        sharded = [parameter for parameters in self._groups.values() for parameter in parameters]
        return (0, 1) if self._replicas is None or not sharded else (sharded[0].shard, sharded[0].shards)

    def _residuals(self, as_they_are: bool) -> dict[str, Tensor]:
        residuals: dict[str, Tensor] = {}
        for gradient in self._gradients.values():
            residuals.update(gradient.residuals())
        return residuals if as_they_are else {name: torch.zeros_like(lost) for name, lost in residuals.items()}

    def state_dict(self, *, saved_by: int | None = None) -> dict[str, Any]:
        """Returns plain tensors and numbers of this rank, for ``torch.save`` or ``torch.distributed.checkpoint``.

        It must not be called between a backward pass and the ``step`` of the scaler, which may skip that step.

        Args:
            saved_by: as for :meth:`dltrain_ext.ddp.AllReduceState.state_dict`; with ``replicas`` their number.

        Returns:
            A dict of ``version``; ``steps``, the most reductions of a module; ``reductions``, by module;
            ``world_size``, the number of contributions to an average, which are those of the ranks or, with
            ``replicas``, of these; ``shard``, the number of the shard that the residuals are, and how many shards there
            are, which is 1 without ``replicas``; and ``feedback``, the residuals by contribution (``"rank 0 of 4"``)
            and by parameter, in its shape.

        Raises:
            ValueError: ``saved_by`` is not a world size.
        """
        reductions = {name: gradient.steps for name, gradient in self._gradients.items()}
        steps = max(reductions.values(), default=0)
        saved = checkpoint.save(self._residuals, steps, *self._contribution, saved_by)
        return {**saved, "reductions": reductions, "shard": list(self._shard)}

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continues from what this rank has saved or, where the number of ranks differs, from a list of what all ranks
        have saved.

        With another number of ranks, each adds up the residuals of several ones, or takes none, so that the sum over
        all ranks is preserved. In tensor parallelism the number must be the same.

        Raises:
            TypeError, ValueError: the state is invalid; the message has the expected and the actual value. Nothing has
                changed.
        """
        states = [state_dict] if isinstance(state_dict, Mapping) else state_dict
        parameters = [parameter for parameters in self._groups.values() for parameter in parameters]
        contribution, contributions = self._contribution
        steps = checked(states, self._groups.keys(), parameters, contributions)
        own, shards = self._shard
        has_these_shards = all(state["shard"][1] == shards for state in states)
        if has_these_shards:
            states = [state for state in states if state["shard"][0] == own]
        else:
            states = joined(states, {parameter.name: parameter.dim for parameter in parameters})
        is_whole = self._replicas is None or not has_these_shards
        like = {
            parameter.name: parameter.like() if is_whole else parameter.cut(parameter.like(), parameter.shard)
            for parameter in parameters
        }
        _, residuals = checkpoint.merge(states, contribution, contributions, like, of="a ShardedState")
        self._begin(steps)
        for gradient in self._gradients.values():
            gradient.restore(residuals, is_whole)
