"""Checks which models and parameters the hook accepts."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dltrain_ext import _ops

_INSTEAD = {
    "OptimizedModule": "register before torch.compile",
    "FSDPModule": "for fully_shard there is dltrain_ext.fsdp.register",
    "FullyShardedDataParallel": "use fully_shard and dltrain_ext.fsdp.register",
    "DataParallel": "use a process for each device, and DistributedDataParallel",
}
_IN_A_GROUP = (
    "wrap it in one first; in a Trainer of Transformers that is trainer.model_wrapped, and with Accelerate what "
    "accelerator.prepare returns"
)
_WITHOUT_A_GROUP = "call torch.distributed.init_process_group and wrap it in one first, since WORLD_SIZE is not 1"


def check_plain(model: object, has_peers: bool) -> None:
    """Raises TypeError that says what to do instead, unless the model needs no DDP because there are no peers."""
    instead = [_INSTEAD[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in _INSTEAD]
    if isinstance(model, nn.Module) and not instead and not has_peers:
        return
    if not instead:
        instead = [_IN_A_GROUP if dist.is_initialized() else _WITHOUT_A_GROUP] if has_peers else []
    got = type(model).__name__
    raise TypeError("; ".join([f"model: expected a DistributedDataParallel, got {got}", *instead]))


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters that require gradients, by their names."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def check_parameters(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises TypeError that names a parameter that cannot be reduced."""
    for name, parameter in named:
        if hasattr(parameter, "_in_backward_optimizers"):  # DDP would replace the hook in the first forward
            raise TypeError(
                "model: expected parameters that are stepped after backward, "
                f"got {name}, whose optimizer steps in backward"
            )
        dtypes = (torch.float32, torch.float16, torch.bfloat16)
        if parameter.dtype not in dtypes or not _ops.is_supported(parameter.device):
            raise TypeError(
                f"model: expected parameters of float32, float16 or bfloat16 on {_ops.supported_devices}, "
                f"got {name} of {parameter.dtype} on {parameter.device}"
            )
