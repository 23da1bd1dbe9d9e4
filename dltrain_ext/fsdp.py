"""FSDP2 (``fully_shard``): gradients compressed on their way across the replicas, or on their way to the shards."""

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dltrain_ext import _ops
from dltrain_ext.amp import LossScaler
from dltrain_ext.codecs.arguments import check_number, dtype_of_feedback, is_stochastic
from dltrain_ext.comm import Communicator
from dltrain_ext.ddp.checkpoint import VERSION, key_of
from dltrain_ext.ddp.feedback import Feedback


class ShardedState:
    """What the hooks of a model share, as :func:`register` makes it."""

    def __init__(
        self,
        numels: Mapping[str, int],
        replicas: dist.ProcessGroup | None,
        *,
        codec: str,
        algorithm: str,
        feedback_dtype: torch.dtype | None,
        scaler: LossScaler | None,
        min_compress_numel: int,
        stochastic: bool,
        seed: int,
        timeout: timedelta | None,
    ):
        self.codec, self.algorithm, self.min_compress_numel = codec, algorithm, min_compress_numel
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._feedback_dtype = feedback_dtype
        self._stochastic, self._seed, self._timeout = stochastic, seed, timeout
        self._numels = dict(numels)
        self._communicators: dict[dist.ProcessGroup, Communicator] = {}
        if replicas is not None:
            self._communicators[replicas] = Communicator(replicas, timeout=timeout)
        self._forget(dict.fromkeys(numels, 0))

    def _forget(self, steps: Mapping[str, int]) -> None:
        """Begins anew, with nothing lost."""
        self._gradients = {
            name: _Gradient(name, numel, (self._seed + index) % 2**63, steps[name], self._feedback_dtype, self._scaler)
            for index, (name, numel) in enumerate(self._numels.items())
        }

    def _all_reduce(self, name: str, tensor: Tensor) -> None:
        (communicator,) = self._communicators.values()
        algorithm, segments = self.algorithm, None
        if algorithm == "auto":
            algorithm, segments = communicator.plan_for(self.codec, 4 * tensor.numel())
        self._reduce(name, communicator, tensor, average=True, algorithm=algorithm, segments=segments or 0)

    def _reduce_scatter(
        self, name: str, share: Tensor, tensor: Tensor, group: dist.ProcessGroup, average: bool
    ) -> None:
        if group not in self._communicators:
            self._communicators[group] = Communicator(group, timeout=self._timeout, ranks_per_host=1)
        self._reduce(name, self._communicators[group], tensor, share=share, average=average, algorithm="auto")

    def _reduce(self, name: str, communicator: Communicator, tensor: Tensor, **options: Any) -> None:
        """Returns when that is done or, on CUDA, when the current stream waits for it."""
        codec = "raw" if tensor.numel() < self.min_compress_numel else self.codec
        gradient = self._gradients[name]
        communicator.reduce_bucket(
            tensor,
            gradient.enter(tensor, codec),
            feeds=gradient.feedback is not None,
            codec=codec,
            loss_scale=gradient.loss_scale(tensor.device),
            stochastic=self._stochastic,
            seed=gradient.seed,
            step=gradient.steps % 2**32,
            **options,
        ).wait()

    def stats(self) -> dict[str, Any]:
        """``wire_bytes`` that this rank has sent for gradients; ``ratio``, what fp32 messages would have, over what
        those of one backward pass have, None before the first; and ``per_module``: ``numel`` of one reduction,
        ``calls`` and ``wire_bytes``."""
        per_module = {
            name: {
                "numel": gradient.numel,
                **{key: int(gradient.handle.stats()[key]) for key in ("calls", "wire_bytes")},
            }
            for name, gradient in self._gradients.items()
            if gradient.handle is not None
        }
        message_bytes = sum(self._gradients[name].message_bytes for name in per_module)
        return {
            "wire_bytes": sum(stats["wire_bytes"] for stats in per_module.values()),
            "ratio": 4 * sum(stats["numel"] for stats in per_module.values()) / message_bytes
            if message_bytes
            else None,
            "per_module": per_module,
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers, each rank's own, for ``torch.save`` or ``torch.distributed.checkpoint``: by rank
        (``"rank 0 of 4"``), what it has lost of each module's gradient, flat."""
        lost = {name: gradient.lost() for name, gradient in self._gradients.items() if gradient.feedback is not None}
        steps = {name: gradient.steps for name, gradient in self._gradients.items()}
        return {"version": VERSION, "steps": steps, "feedback": {_key(): lost}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from what this rank saved, in a world of the same size.

        Raises:
            ValueError: naming what was expected and what came; then nothing has changed.
        """
        if not isinstance(state_dict, Mapping) or state_dict.get("version") != VERSION:
            raise ValueError(f"state_dict: expected one of a ShardedState, version {VERSION}")
        lost = state_dict["feedback"].get(_key())
        if lost is None:
            raise ValueError(
                f"state_dict: expected what {_key()} saved, since shards of another world size are others, got that of "
                f"{', '.join(state_dict['feedback'])}; go on without, by a new register()"
            )
        found = {name: tensor.numel() for name, tensor in lost.items()}
        if state_dict["steps"].keys() != self._numels.keys() or (found and found != self._numels):
            raise ValueError("state_dict: expected the modules and sizes of this model, got others")
        self._forget(state_dict["steps"])
        for name, gradient in self._gradients.items():
            if gradient.feedback is not None and name in lost:
                gradient.feedback.initial[name] = lost[name].to(gradient.feedback.dtype)


class _Gradient:
    """That of all parameters of a module: one flat tensor, whenever it has been reduced."""

    def __init__(
        self,
        name: str,
        numel: int,
        seed: int,  # modules draw different random numbers
        steps: int,
        feedback_dtype: torch.dtype | None,
        scaler: LossScaler | None,
    ):
        self.name, self.numel, self.seed, self.steps = name, numel, seed, steps
        self.message_bytes = 0
        self.handle: Any = None
        self.feedback = None if feedback_dtype is None else Feedback[str](feedback_dtype, twofold=scaler is not None)
        self._scaler = scaler
        self._skipped: Tensor | None = None  # by the scaler, before the step that fed last

    def enter(self, tensor: Tensor, codec: str) -> _ops.Bucket:
        """Before each reduction."""
        if self.feedback is not None and tensor.numel() != self.numel:
            raise RuntimeError(
                f"error_feedback: expected gradients of all parameters of {self.name or 'the model'} in each backward "
                f"pass, {self.numel} elements, got {tensor.numel()}; where some are unused, register with False"
            )
        if self.handle is None or self.numel != tensor.numel():
            self.numel = tensor.numel()
            self.message_bytes = _ops.find_codec(codec).bytes(self.numel)
            feedback = {} if self.feedback is None else self.feedback.lay({self.name: (0, self.numel)}, tensor)
            self.handle = _ops.Bucket([(0, self.numel, codec, 0)], by_parameter=False, squares=None, **feedback)
        self.settle()
        if self.feedback is not None and self._scaler is not None:
            self._skipped = self._scaler.skipped_steps
        self.steps += 1
        bucket: _ops.Bucket = self.handle
        return bucket

    def settle(self) -> None:
        """What was lost last counts, unless its step has been skipped. No host waits for that."""
        if self._skipped is not None and self._scaler is not None and self.feedback is not None:
            self.feedback.settle(self._scaler.skipped_steps == self._skipped)
        self._skipped = None

    def loss_scale(self, device: torch.device) -> Tensor | None:
        if self._scaler is None or self.feedback is None:
            return None
        scale: Tensor = self._scaler.scale(torch.ones((), device=device))
        return scale

    def lost(self) -> Tensor:
        self.settle()
        residual = None if self.feedback is None else self.feedback.of(self.name)
        return torch.zeros(self.numel) if residual is None else residual.clone()


class _ReduceScatter:
    """What ``FSDPModule.set_custom_reduce_scatter`` takes."""

    def __init__(self, state: ShardedState, name: str):
        self._state, self._name = state, name

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"op: expected SUM or AVG, got {op}; leave set_gradient_divide_factor alone")
        self._state._reduce_scatter(self._name, output_tensor, input_tensor, group, op == dist.ReduceOp.AVG)


def register(
    model: nn.Module,
    codec: str = "int8",
    *,
    replicas: dist.ProcessGroup | DeviceMesh | None = None,
    algorithm: str = "auto",
    error_feedback: bool | None = None,
    feedback_dtype: str = "fp32",
    scaler: LossScaler | None = None,
    min_compress_numel: int = 1024,
    rounding: str = "nearest",
    seed: int = 0,
    timeout: timedelta | None = None,
) -> ShardedState:
    """Compresses the gradients of a model of ``fully_shard`` (FSDP2).

    With ``replicas``, hybrid sharding: FSDP shards inside a host, over ``mesh["shard"]``, and reduces there as ever;
    then each shard's gradient is averaged across the hosts, over ``replicas=mesh["replicate"]``, by plan and codec::

        mesh = init_device_mesh("cuda", (hosts, gpus), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        state = fsdp.register(model, "int8", replicas=mesh["replicate"])

    Without, each rank sends the others their shards' gradients encoded (:func:`dltrain_ext.comm.reduce_scatter`), and
    adds up what it gets in fp32. Parameters are gathered as ever.

    All gradients of a module travel in one codec, also those of its small parameters.

    Args:
        model: to which ``fully_shard`` has been applied, the parts first.
        codec, algorithm, feedback_dtype, min_compress_numel, rounding, seed, timeout: as for
            :class:`dltrain_ext.ddp.AllReduceState`; no codec ``"auto"``; the algorithm is for ``replicas``,
            and a gradient that is small is that of a whole module.
        replicas: the ranks that have the same shard, one of each host.
        error_feedback: what encoding loses is added to the next step's gradient. It costs an element for each of those
            that are sent: with ``replicas`` a shard of the model, else all of it. Where None, on with ``replicas``
            alone. All parameters of a module must then have gradients in each backward pass.
        scaler: that of the loss; needed with feedback where losses are scaled.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    modules = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    if not modules:
        raise TypeError(
            f"model: expected one that fully_shard was applied to, got {type(model).__name__}; ddp.register is for a "
            "DistributedDataParallel, and of FullyShardedDataParallel (FSDP1) fully_shard is the successor"
        )
    _ops.check_names(algorithm, codec)
    if scaler is not None and not isinstance(scaler, LossScaler):
        raise TypeError(f"scaler: expected a dltrain_ext.amp.LossScaler, got {type(scaler).__name__}")
    check_number(min_compress_numel, "min_compress_numel", 2**63)
    check_number(seed, "seed", 2**63)
    feeds = replicas is not None if error_feedback is None else error_feedback
    stochastic, dtype = is_stochastic(rounding), dtype_of_feedback(feedback_dtype)
    if feeds:
        _ops.check_feedback(codec, stochastic, "error_feedback: expected False")
    if isinstance(replicas, DeviceMesh):
        replicas = replicas.get_group()
    numels = _numels(modules, shards=1 if replicas is not None else None)
    state = ShardedState(
        numels,
        replicas,
        codec=codec,
        algorithm=algorithm,
        feedback_dtype=dtype if feeds else None,
        scaler=scaler,
        min_compress_numel=min_compress_numel,
        stochastic=stochastic,
        seed=seed,
        timeout=timeout,
    )
    for name, module in modules.items():
        if replicas is None:
            module.set_custom_reduce_scatter(_ReduceScatter(state, name))  # type: ignore[arg-type]
        else:
            module.set_all_reduce_hook(partial(state._all_reduce, name))
    return state


def _numels(modules: Mapping[str, FSDPModule], shards: int | None) -> dict[str, int]:
    """Elements of one reduction of each module's gradients: of its share or, where shards is None, of all."""
    numels, seen = {}, set()
    for name, module in reversed(list(modules.items())):  # the parts before what they are parts of
        numels[name] = 0
        assert isinstance(module, nn.Module)
        for parameter in module.parameters():
            if parameter in seen or not isinstance(parameter, DTensor):
                continue
            seen.add(parameter)
            sizes = parameter.device_mesh.shape
            if shards is not None and len(sizes) > 1:
                raise ValueError(
                    f"model: expected fully_shard over the dimension of the shards alone, mesh['shard'], got {sizes}: "
                    "over the replicas FSDP would average before the hook"
                )
            placement, ranks = parameter.placements[-1], sizes[-1]
            dim = placement.dim if placement.is_shard() else 0  # type: ignore[attr-defined]
            share = -(-parameter.size(dim) // ranks) * (parameter.numel() // parameter.size(dim))
            numels[name] += share * (shards or ranks) * parameter.requires_grad
    return {name: numels[name] for name in modules}


def _key() -> str:
    return key_of(dist.get_rank(), dist.get_world_size())
