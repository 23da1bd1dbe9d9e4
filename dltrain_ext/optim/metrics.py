"""What a logger gets to know about an optimizer."""

import torch
from torch import Tensor

from dltrain_ext.optim.shards import local


def metrics_of(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Implements FusedStep.metrics, for any optimizer."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    found = {"optim/lr": rates[0]} if len(rates) == 1 else {f"optim/lr/{i}": lr for i, lr in enumerate(rates)}
    kept = [local(value) for entry in optimizer.state.values() for value in entry.values()]
    found["optim/state_bytes"] = float(sum(value.nbytes for value in kept if isinstance(value, Tensor)))
    by_device: dict[torch.device, list[Tensor]] = {}
    for entry in optimizer.state.values():
        if "step" in entry:
            step = torch.as_tensor(local(entry["step"]))
            by_device.setdefault(step.device, []).append(step)
    if by_device:
        found["optim/steps"] = max(float(torch.stack(steps).max()) for steps in by_device.values())
    return found
