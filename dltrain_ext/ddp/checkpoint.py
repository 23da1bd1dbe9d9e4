"""What the hook leaves in a checkpoint: plain tensors and numbers, by parameter and by the rank that has them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

VERSION = 1


def key_of(rank: int, world_size: int) -> str:
    return f"rank {rank} of {world_size}"


def takes(rank: int, world_size: int, saved_by: int) -> range:
    """The ranks, of those that saved, whose residuals a rank adds up: so that the sum over all ranks is kept."""
    return range(rank, saved_by, world_size) if saved_by != world_size else range(rank, rank + 1)


def merge(
    states: Sequence[Mapping[str, Any]], rank: int, world_size: int, parameters: Mapping[str, Tensor]
) -> tuple[int, dict[str, Tensor]]:
    """The steps done, and this rank's residuals by name, from what one or several ranks saved.

    Raises TypeError, ValueError: naming what was expected and what came.
    """
    entries = {"version", "steps", "world_size", "feedback"}
    if not states or not all(isinstance(state, Mapping) and entries <= state.keys() for state in states):
        raise TypeError("state_dict: expected a state_dict of an AllReduceState, or a list of them")
    if any(state.get("version") != VERSION for state in states):
        raise ValueError(f"state_dict: expected version {VERSION}, got {[state.get('version') for state in states]}")
    steps = {state["steps"] for state in states}
    if len(steps) != 1:
        raise ValueError(f"state_dict: expected states of one moment, got some of {sorted(steps)} steps")
    sizes = {state["world_size"] for state in states}
    if len(sizes) != 1:
        raise ValueError(f"state_dict: expected states of one world size, got some of {sorted(sizes)}")
    (saved_by,) = sizes
    saved: dict[str, Mapping[str, Tensor]] = {}
    for state in states:
        saved.update(state["feedback"])
    wanted = {r: key_of(r, saved_by) for r in takes(rank, world_size, saved_by)}
    if missing := [r for r, key in wanted.items() if key not in saved]:
        raise ValueError(
            f"state_dict: expected the feedback of the ranks {list(wanted)} of {saved_by} on rank {rank} of "
            f"{world_size}, ranks {missing} are missing; give it a list of the ranks' state_dicts"
        )
    total: dict[str, Tensor] = {}
    for key in wanted.values():
        if unknown := sorted(set(saved[key]) - set(parameters)):
            raise ValueError(f"state_dict: expected feedback of the model's parameters, got {', '.join(unknown)}")
        for name, residual in saved[key].items():
            parameter = parameters[name]
            if not isinstance(residual, Tensor) or residual.shape != parameter.shape:
                raise ValueError(
                    f"state_dict: expected feedback of shape {tuple(parameter.shape)} for {name}, "
                    f"got {tuple(getattr(residual, 'shape', ()))}"
                )
            given = residual.detach().to(parameter.device, torch.float32)
            total[name] = total[name] + given if name in total else given
    (done,) = steps
    if type(done) is not int or done < 0:
        raise ValueError(f"state_dict: expected steps of at least 0, got {done!r}")
    return done, total
