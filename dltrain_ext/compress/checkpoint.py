"""Residuals in a checkpoint: plain tensors and numbers, by parameter and by the rank that has them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dltrain_ext._arguments import is_dense
from dltrain_ext.compress.feedback import Feedback

VERSION = 1
MOST_RANKS = 2**16


def key_of(rank: int, world_size: int) -> str:
    return f"rank {rank} of {world_size}"


def takes(rank: int, world_size: int, saved_by: int) -> range:
    """Returns the ranks, of those that saved, whose residuals a rank adds up, so that the sum over all is kept."""
    return range(rank, saved_by, world_size) if saved_by != world_size else range(rank, rank + 1)


def save(
    collect: Callable[[bool], Mapping[str, Tensor]],
    steps: int,
    rank: int,
    world_size: int,
    saved_by: int | None,
) -> dict[str, Any]:
    """Returns ``version``, ``steps``, ``world_size`` and ``feedback``, by rank, then by parameter, in its shape.

    collect: returns copies of this rank's residuals by parameter or, if it is given False, zeros like them.
    saved_by: None, or a world size, for zeros instead of the residuals that this rank takes of as many ranks. Raises
    ValueError if it is not a world size.
    """
    if saved_by is None:
        saved_by = world_size
    if type(saved_by) is not int or saved_by < 1:
        raise ValueError(f"saved_by: expected a world size of at least 1, or None, got {saved_by!r}")
    if saved_by > MOST_RANKS:
        raise ValueError(f"saved_by: expected at most {MOST_RANKS}, got {saved_by}")
    taken = takes(rank, world_size, saved_by)
    by_rank = {key_of(saving, saved_by): dict(collect(saved_by == world_size)) for saving in taken}
    return {"version": VERSION, "steps": steps, "world_size": saved_by, "feedback": by_rank}


def residuals_of(
    feedback: Feedback[Tensor] | None, parameters: Mapping[str, Tensor], as_they_are: bool
) -> dict[str, Tensor]:
    """Returns copies of the residuals by the name of their parameter, in its shape; zeros unless ``as_they_are``."""
    residuals: dict[str, Tensor] = {}
    if feedback is None:
        return residuals
    for name, parameter in parameters.items():
        lost = feedback.of(parameter) if as_they_are else None
        if lost is None:
            lost = torch.zeros(parameter.numel(), dtype=feedback.dtype, device=parameter.device)
        residuals[name] = lost.reshape(parameter.shape).clone()
    return residuals


def merge(
    states: Sequence[Mapping[str, Any]], rank: int, world_size: int, parameters: Mapping[str, Tensor], of: str
) -> tuple[int, dict[str, Tensor]]:
    """Returns the number of steps, and this rank's residuals by name, from what one or several ranks saved.

    parameters: the parameters by name, or tensors of their shapes and devices.
    of: the name of the class whose states these are, for messages. Raises TypeError or ValueError that names the
    expected and the actual value.
    """
    entries = {"version", "steps", "world_size", "feedback"}
    if not states or not all(isinstance(state, Mapping) and entries <= state.keys() for state in states):
        raise TypeError(f"state_dict: expected a state_dict of {of}, or a list of them")
    if any(type(state["version"]) is not int or state["version"] != VERSION for state in states):
        raise ValueError(f"state_dict: expected version {VERSION}, got {[state.get('version') for state in states]}")
    for state in states:
        for name, least in (("steps", 0), ("world_size", 1)):
            if type(number := state[name]) is not int or number < least:
                raise ValueError(f"state_dict: expected {name} of at least {least}, got {number!r}")
        if state["world_size"] > MOST_RANKS:
            raise ValueError(f"state_dict: expected a world_size of at most {MOST_RANKS}, got {state['world_size']}")
        if not isinstance(state["feedback"], Mapping) or not all(
            isinstance(residuals, Mapping) for residuals in state["feedback"].values()
        ):
            raise ValueError("state_dict: expected feedback by rank and by parameter, got something else")
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
        if unknown := sorted(map(str, set(saved[key]) - set(parameters))):
            raise ValueError(f"state_dict: expected feedback of the model's parameters, got {', '.join(unknown)}")
        for name, residual in saved[key].items():
            parameter = parameters[name]
            if not isinstance(residual, Tensor) or not is_dense(residual) or residual.is_meta:
                raise ValueError(f"state_dict: expected feedback of {name} as a dense tensor, got {type(residual)}")
            if not residual.is_floating_point() or residual.shape != parameter.shape:
                raise ValueError(
                    f"state_dict: expected feedback of shape {tuple(parameter.shape)} for {name}, "
                    f"got {tuple(residual.shape)} of {residual.dtype}"
                )
            given = residual.detach().to(parameter.device, torch.float32)
            total[name] = total[name] + given if name in total else given
    (done,) = steps
    return done, total


def gather_feedback(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Returns on rank 0 one state_dict with the residuals of all ranks of the default group, and on others their own.

    This is a collective call. It gathers tensor by tensor on the group's device, which then holds the residuals of all
    ranks for one parameter. Parameters whose residuals are zero on all ranks are left out.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    feedback: dict[str, dict[str, Tensor]] = {key_of(r, world_size): {} for r in range(world_size)}
    own = state["feedback"][key_of(rank, world_size)]
    has_lost = torch.tensor([bool(residual.any()) for residual in own.values()], dtype=torch.uint8, device=device)
    if own:
        dist.all_reduce(has_lost, dist.ReduceOp.MAX)
    for (name, residual), lost in zip(own.items(), has_lost.tolist(), strict=True):
        if not lost:
            continue
        sent = residual.to(device).flatten().view(torch.uint8)  # every backend supports uint8
        received = [torch.empty_like(sent) for _ in range(world_size)] if rank == 0 else None
        dist.gather(sent, received)
        for residuals, message in zip(feedback.values(), received or (), strict=False):
            residuals[name] = message.cpu().view(residual.dtype).view(residual.shape)
    return {**state, "feedback": feedback if rank == 0 else state["feedback"]}
