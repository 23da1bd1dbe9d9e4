"""Which layers of a model are preconditioned."""

import re
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# A Linear whose weights are used, but which is not called: MultiheadAttention's own.
_NEVER_CALLED = nn.modules.linear.NonDynamicallyQuantizableLinear


def select(model: nn.Module, skip_layers: Sequence[str]) -> dict[str, nn.Linear | nn.Conv2d]:
    """Returns the Linear and Conv2d layers by name, without those that ``skip_layers`` matches."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    patterns = _compiled(skip_layers)
    users: dict[int, list[str]] = {}  # of each parameter
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(name)
    layers = {}
    for name, module in model.named_modules():
        if not _is_supported(module) or any(p.search(name) or p.search(type(module).__name__) for p in patterns):
            continue
        for what in _obstacles(module, users):
            raise ValueError(
                f"model: expected {what}, got layer {name!r}; skip_layers=[{f'^{re.escape(name)}$'!r}] leaves it out"
            )
        layers[name] = module
    if not layers:
        raise ValueError("model: expected at least one Linear or Conv2d layer that requires a gradient, got none")
    devices = {layer.weight.device for layer in layers.values()}
    if len(devices) > 1:
        raise ValueError(f"model: expected all layers on one device, got {', '.join(sorted(map(str, devices)))}")
    return layers


def _compiled(skip_layers: Sequence[str]) -> list[re.Pattern[str]]:
    if not isinstance(skip_layers, list | tuple) or not all(isinstance(pattern, str) for pattern in skip_layers):
        raise TypeError(f"skip_layers: expected a sequence of regular expressions, got {skip_layers!r}")
    try:
        return [re.compile(pattern) for pattern in skip_layers]
    except re.error as error:
        raise ValueError(f"skip_layers: {error} in {error.pattern!r}") from error


def _is_supported(module: nn.Module) -> bool:
    if type(module).forward not in (nn.Linear.forward, nn.Conv2d.forward) or isinstance(module, _NEVER_CALLED):
        return False
    # What is computed of other parameters is none itself.
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    if weight is None or (bias is None and module.bias is not None):
        return False
    return weight.requires_grad and getattr(module, "groups", 1) == 1


def _obstacles(module: nn.Module, users: dict[int, list[str]]) -> Iterator[str]:
    for parameter in module.parameters(recurse=False):
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            yield "initialized layers (run the model once before)"
        elif hasattr(parameter, "device_mesh"):  # a DTensor; importing its class would take a second
            yield "parameters that are not sharded"
        elif parameter.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            yield f"float32, float16 or bfloat16 parameters, not {parameter.dtype}"
        elif len(users[id(parameter)]) > 1:
            yield f"parameters that only one module uses, not {', '.join(map(repr, users[id(parameter)]))}"
