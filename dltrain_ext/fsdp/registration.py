"""Registers the hooks that compress the gradients of ``fully_shard``."""

import math
import weakref
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

from dltrain_ext.compress.arguments import check_options
from dltrain_ext.fsdp.state import ShardedState

_registered: "weakref.WeakKeyDictionary[nn.Module, set[str]]" = weakref.WeakKeyDictionary()


class _ReduceScatter:
    """The object that ``FSDPModule.set_custom_reduce_scatter`` takes."""

    def __init__(self, state: ShardedState, name: str):
        self._state, self._name = state, name

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError("op: expected SUM or AVG, got another; do not call set_gradient_divide_factor")
        self._state.reduce_scatter(self._name, output_tensor, input_tensor, group, op == dist.ReduceOp.AVG)


def register(
    model: nn.Module,
    codec: str = "int8",
    *,
    replicas: dist.ProcessGroup | DeviceMesh | None = None,
    algorithm: str = "auto",
    error_feedback: bool | None = None,
    feedback_dtype: str = "fp32",
    scaler: torch.amp.GradScaler | None = None,
    min_compress_numel: int = 1024,
    rounding: str = "nearest",
    seed: int = 0,
    timeout: timedelta | None = None,
) -> ShardedState:
    """Compresses the gradients of a model of ``fully_shard`` (FSDP2).

    With ``replicas`` (hybrid sharding) FSDP shards within a host, over ``mesh["shard"]``, and reduces there as usual.
    Then each shard's gradient is averaged between hosts, over ``replicas=mesh["replicate"]``, by plan and codec::

        mesh = init_device_mesh("cuda", (hosts, gpus), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        state = fsdp.register(model, "int8", replicas=mesh["replicate"])

    Without ``replicas`` each rank sends the others the encoded gradients of their shards
    (:func:`dltrain_ext.comm.reduce_scatter`), and adds what it receives in fp32. Parameters are gathered as usual.

    All gradients of a module are sent in one codec, also those of its small parameters.

    Args:
        model: a module to which ``fully_shard`` has been applied, to its submodules first.
        codec, algorithm, feedback_dtype, min_compress_numel, rounding, seed, timeout: as for
            :class:`dltrain_ext.ddp.AllReduceState`, without the codec ``"auto"``. The algorithm applies to ``replicas``
            only, and ``min_compress_numel`` to the gradient of a whole module.
        replicas: the ranks that have the same shard, one of each host: a group, or a DeviceMesh of one dimension.
        error_feedback: add the encoding error to the next step's gradient. This takes an element of ``feedback_dtype``
            per element that is sent: with ``replicas`` a shard of the model, else all of it. None is True with
            ``replicas`` only. All parameters of a module must then have gradients in each backward pass.
        scaler: the ``LossScaler``, or any ``torch.amp.GradScaler``, that scales the loss; needed for feedback if losses
            are scaled. A step that it skips does not change the residuals. Accumulate gradients with
            ``model.set_requires_gradient_sync(False)``, so that there is one reduction per step.

    Returns:
        The :class:`ShardedState` of the hooks.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
        RuntimeError: the same was registered on the model before.
    """
    groups = _groups(model)
    stochastic, dtype = check_options(
        algorithm,
        codec,
        error_feedback=replicas is not None if error_feedback is None else error_feedback,
        feedback_dtype=feedback_dtype,
        scaler=scaler,
        min_compress_numel=min_compress_numel,
        rounding=rounding,
        seed=seed,
    )
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"timeout: expected a datetime.timedelta or None, got {timeout!r}")
    group = None if replicas is None else _replicas(replicas, groups)
    kind = "reduce-scatter" if group is None else "replicas"
    if kind in _registered.setdefault(model, set()):
        raise RuntimeError(f"model: expected one whose {kind} has not been registered, which is possible only once")
    state = ShardedState(
        {name: _numel(parameters, is_shard=group is not None) for name, (_, parameters) in groups.items()},
        group,
        codec=codec,
        algorithm=algorithm,
        feedback_dtype=dtype,
        scaler=scaler,
        min_compress_numel=min_compress_numel,
        stochastic=stochastic,
        seed=seed,
        timeout=timeout,
    )
    for name, (module, _) in groups.items():
        if group is None:
            module.set_custom_reduce_scatter(_ReduceScatter(state, name))  # type: ignore[arg-type]
        else:
            module.set_all_reduce_hook(partial(state.all_reduce, name))
    _registered[model].add(kind)
    return state


def _groups(model: nn.Module) -> dict[str, tuple[FSDPModule, list[DTensor]]]:
    """Returns what is reduced at once: parameters, and a module that represents them, by its name."""
    named = model.named_modules() if isinstance(model, nn.Module) else ()
    modules = {name: module for name, module in named if isinstance(module, FSDPModule)}
    if not modules:
        raise TypeError(
            f"model: expected one that fully_shard was applied to, got {type(model).__name__}; ddp.register is for a "
            "DistributedDataParallel, and of FullyShardedDataParallel (FSDP1) fully_shard is the successor"
        )
    # Modules that were passed to fully_shard as a list share their state, and so their hooks.
    states = {name: module._get_fsdp_state() for name, module in modules.items()}
    first: dict[Any, str] = {}
    for name, state in states.items():
        first.setdefault(state, name)
    groups: dict[str, tuple[FSDPModule, list[DTensor]]] = {name: (modules[name], []) for name in first.values()}
    seen = set()
    for name, module in reversed(list(modules.items())):  # submodules before their parents
        assert isinstance(module, nn.Module)
        for parameter in module.parameters():
            if parameter not in seen and isinstance(parameter, DTensor):
                seen.add(parameter)
                groups[first[states[name]]][1].append(parameter)
    return groups


def _sharded_dim(parameter: DTensor) -> int:
    """Returns the mesh dimension over which FSDP shards: its replicas are before it, tensor parallelism is behind."""
    return next(dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate())


def _replicas(
    replicas: dist.ProcessGroup | DeviceMesh, groups: Mapping[str, tuple[FSDPModule, list[DTensor]]]
) -> dist.ProcessGroup:
    if isinstance(replicas, DeviceMesh) and replicas.ndim == 1:
        replicas = replicas.get_group()
    if not isinstance(replicas, dist.ProcessGroup):
        raise TypeError(f"replicas: expected a ProcessGroup or a DeviceMesh of one dimension, got {replicas!r}")
    here = set(dist.get_process_group_ranks(replicas))
    for parameter in (parameter for _, parameters in groups.values() for parameter in parameters):
        mesh = parameter.device_mesh
        if _sharded_dim(parameter) > 0:
            raise ValueError(
                "model: expected fully_shard over the dimension of the shards alone, mesh['shard'], got a mesh of "
                f"{tuple(mesh.shape)}: over the replicas FSDP would average before the hook"
            )
        if common := here & set(mesh.mesh.flatten().tolist()) - {dist.get_rank()}:
            raise ValueError(
                f"replicas: expected ranks that have the same shard, as mesh['replicate'], got {sorted(here)}, "
                f"of which {sorted(common)} have others"
            )
    return replicas


def _numel(parameters: list[DTensor], is_shard: bool) -> int:
    """Returns the number of elements of one reduction: those of this rank's shard or, for a reduce-scatter, of all."""
    total = 0
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        sizes, sharded = list(parameter.shape), _sharded_dim(parameter)
        for mesh_dim in reversed(range(sharded, len(parameter.placements))):  # tensor parallelism divides first
            placement, ranks = parameter.placements[mesh_dim], parameter.device_mesh.size(mesh_dim)
            if not placement.is_replicate():
                dim = placement.dim  # type: ignore[attr-defined]
                sizes[dim] = -(-sizes[dim] // ranks)  # FSDP pads
        total += math.prod(sizes) * (1 if is_shard else parameter.device_mesh.size(sharded))
    return total
