"""Registers the hook on a model."""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext.ddp.hook import AllReduceState, allreduce_hook
from dltrain_ext.ddp.local import LocalState, has_peers
from dltrain_ext.ddp.parameters import check_parameters, check_plain, trained_parameters
from dltrain_ext.ddp.sharded import ShardedOptimizerState
from dltrain_ext.ddp.shards import check_shardable


def register(
    model: nn.Module,
    codec: str | None = None,
    algorithm: str = "auto",
    error_feedback: bool = True,
    scaler: torch.amp.GradScaler | None = None,
    *,
    shard: torch.optim.Optimizer | None = None,
    **options: Any,
) -> AllReduceState:
    """Registers :func:`allreduce_hook` on a DDP model and returns its state, an :class:`AllReduceState`, whose
    arguments are ``options`` and the others. Its process group and parameter names are those of the model.

    With ``shard``, an optimizer of the model's parameters, each rank updates a part of them (ZeRO stage 1), and the
    state is a :class:`ShardedOptimizerState`::

        optimizer = optim.AdamW(model.parameters())
        state = ddp.register(model, "int8", shard=optimizer)

    Training is written as without it: ``optimizer.step()``, schedules, ``LossScaler``. Each rank then has gradients
    and state for its rows only, so ``p.grad`` of the model is None after backward; ``state.shards`` has them.

    In a process without peers any model is accepted, so that a script for several processes, for example of Trainer or
    Accelerate, also runs in one. Then nothing is registered, sent or lost, and ``grad_stats`` are those of the
    gradients as they are. Checkpoints can be exchanged with runs of several processes in both directions.

    Raises:
        TypeError: ``model`` is not a DDP model although there are peers, or a parameter is not float32, float16 or
            bfloat16 on the CPU or, in a build for CUDA, on a CUDA device; the message names the parameter.
        RuntimeError: ``model`` has a comm hook already.
    """
    options.update(codec=codec, algorithm=algorithm, error_feedback=error_feedback, scaler=scaler)
    if not isinstance(model, DistributedDataParallel):
        check_plain(model, has_peers())
        check_parameters(trained_parameters(model).items())
        if shard is not None:
            check_shardable(trained_parameters(model), shard)
        return LocalState(model, **options)
    named = trained_parameters(model.module)
    check_parameters((name, p) for name, p in named.items() if name not in model.parameters_to_ignore)
    state: AllReduceState
    if shard is None:
        state = AllReduceState(model.process_group, named_parameters=named.items(), **options)
    else:
        state = ShardedOptimizerState(model, shard, **options)
    try:
        model.register_comm_hook(state, allreduce_hook)
    except RuntimeError as error:
        state.communicator.close()
        raise RuntimeError(
            "model: expected a DistributedDataParallel without a comm hook; wrap model.module anew for another one, "
            "and use torch.autocast instead of mixed_precision=, which is one too"
        ) from error
    state._attach(model)
    return state
