"""Registers the hooks that compress the gradients of ``fully_shard``."""

import weakref
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dltrain_ext.compress.arguments import check_codec, check_options
from dltrain_ext.fsdp.flat import Sharded, sharded_dim
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


class _AllGather:
    """The object that ``FSDPModule.set_custom_all_gather`` takes.

    Args:
        group: the ranks that have the shards. Other groups are those of a host, within which ``fully_shard`` was told
            to reshard after forward.
    """

    def __init__(self, state: ShardedState, name: str, group: dist.ProcessGroup):
        self._state, self._name, self._group = state, name, group

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        handle: dist.Work | None = None
        if group is not self._group:
            handle = dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
            return handle
        work = self._state.all_gather(self._name, output_tensor, input_tensor, group, async_op)
        if work is not None:
            as_work: Any = torch._C._distributed_c10d._create_work_from_future  # type: ignore[attr-defined]
            handle = as_work(work.get_future())  # of the class that FSDP waits for
        return handle


def register(
    model: nn.Module,
    codec: str = "int8",
    *,
    gather: str | None = None,
    replicas: dist.ProcessGroup | DeviceMesh | None = None,
    algorithm: str = "auto",
    error_feedback: bool | None = None,
    feedback_dtype: str = "fp32",
    scaler: torch.amp.GradScaler | None = None,
    min_compress_numel: int = 1024,
    rounding: str = "nearest",
    seed: int = 0,
    timeout: timedelta | None = None,
    watch: bool = False,
) -> ShardedState:
    """Compresses the gradients, and the gathered parameters, of a model of ``fully_shard`` (FSDP2).

    With ``replicas`` (hybrid sharding) FSDP shards within a host, over ``mesh["shard"]``, and reduces there as usual.
    Then each shard's gradient is averaged between hosts, over ``replicas=mesh["replicate"]``, by plan and codec::

        mesh = init_device_mesh("cuda", (hosts, gpus), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        state = fsdp.register(model, "int8", replicas=mesh["replicate"])

    Without ``replicas`` each rank sends the others the encoded gradients of their shards
    (:func:`dltrain_ext.comm.reduce_scatter`), and adds what it receives in fp32.

    With ``gather`` parameters are gathered in a codec, too, before forward and before backward (the quantized weights
    of ZeRO++, arXiv:2306.10209)::

        fsdp.register(model, "int8", gather="int8")

    All ranks compute with the decoded parameters, so they have the same bits. The optimizer updates the exact shards,
    so this needs no error feedback.

    Args:
        model: a module to which ``fully_shard`` has been applied, to its submodules first.
        codec, algorithm, feedback_dtype, min_compress_numel, rounding, seed, timeout, watch: as for
            :class:`dltrain_ext.ddp.AllReduceState`, without the codec ``"auto"``. The algorithm applies to ``replicas``
            only. Without feedback some parameters of a module may have no gradients; its other gradients are then sent
            in one codec, also those of small parameters.
        gather: one of ``codecs.CODECS``, in which parameters are gathered over the ranks that have their shards; None
            for torch's own all-gather. Small parameters are sent as they are. The parameters that are gathered at once
            must have one dtype. Where ``fully_shard`` was given a number for ``reshard_after_forward``, the all-gather
            before backward, within a host, is torch's own.
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
    if not isinstance(watch, bool):
        raise TypeError(f"watch: expected a bool, got {watch!r}")
    if gather is not None:
        check_codec(gather, "gather")
    group = None if replicas is None else _replicas(replicas, model)
    kinds = ["reduce-scatter" if group is None else "replicas", *(["all-gather"] if gather else [])]
    for kind in kinds:
        if kind in _registered.setdefault(model, set()):
            raise RuntimeError(f"model: expected one whose {kind} has not been registered, which is possible only once")
    state = ShardedState(
        {name: parameters for name, (_, parameters) in groups.items()},
        group,
        codec=codec,
        algorithm=algorithm,
        gather=gather,
        feedback_dtype=dtype,
        scaler=scaler,
        min_compress_numel=min_compress_numel,
        stochastic=stochastic,
        seed=seed,
        timeout=timeout,
        watch=watch,
    )
    for name, (module, parameters) in groups.items():
        if gather is not None and parameters:
            module.set_custom_all_gather(_AllGather(state, name, parameters[0].group))  # type: ignore[arg-type]
        if group is None:
            module.set_custom_reduce_scatter(_ReduceScatter(state, name))  # type: ignore[arg-type]
        else:
            module.set_all_reduce_hook(partial(state.all_reduce, name))
    _registered[model].update(kinds)
    return state


def _groups(model: nn.Module) -> dict[str, tuple[FSDPModule, list[Sharded]]]:
    """Returns what is reduced and gathered at once: parameters, and a module that represents them, by its name."""
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
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups: dict[str, tuple[FSDPModule, list[Sharded]]] = {name: (modules[name], []) for name in first.values()}
    for state, name in reversed(first.items()):  # submodules before their parents
        for parameter in _in_the_order_of_fsdp(state):
            if isinstance(parameter, DTensor) and parameter in names:
                groups[name][1].append(Sharded.of(names.pop(parameter), parameter))
    return groups


def _in_the_order_of_fsdp(state: Any) -> Iterator[nn.Parameter]:
    """Yields the parameters of a group as its flat tensors have them: a module's own behind those of its children."""
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> Iterator[nn.Parameter]:
        if module in seen or (isinstance(module, FSDPModule) and module._get_fsdp_state() is not state):
            return
        seen.add(module)
        for child in module.children():
            yield from visit(child)
        yield from module.parameters(recurse=False)

    for module in state._modules:
        yield from visit(module)


def _replicas(replicas: dist.ProcessGroup | DeviceMesh, model: nn.Module) -> dist.ProcessGroup:
    if isinstance(replicas, DeviceMesh) and replicas.ndim == 1:
        replicas = replicas.get_group()
    if not isinstance(replicas, dist.ProcessGroup):
        raise TypeError(f"replicas: expected a ProcessGroup or a DeviceMesh of one dimension, got {replicas!r}")
    here = set(dist.get_process_group_ranks(replicas))
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            continue
        mesh = parameter.device_mesh
        if sharded_dim(parameter) > 0:
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
