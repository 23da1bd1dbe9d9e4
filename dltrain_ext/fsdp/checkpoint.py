"""What a checkpoint of a ShardedState has beside residuals by contribution: reductions by module, and shards."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from dltrain_ext.fsdp.flat import Sharded


def checked(
    states: Sequence[Mapping[str, Any]], modules: Collection[str], parameters: Iterable[Sharded], contributions: int
) -> dict[str, int]:
    """Returns the number of reductions of each module.

    Raises ValueError that has the expected and the actual value.
    """
    if not isinstance(states, list | tuple) or not states:
        raise ValueError(f"state_dict: expected one of a ShardedState, or a list of them, got {states!r:.50}")
    for state in states:
        if not isinstance(state, Mapping) or not {"reductions", "shard", "feedback", "world_size"} <= state.keys():
            raise ValueError("state_dict: expected one of a ShardedState, or a list of them, got something else")
        shard, reductions = state["shard"], state["reductions"]
        if not isinstance(shard, list | tuple) or [type(number) for number in shard] != [int, int]:
            raise ValueError(f"state_dict: expected shard as two numbers, got {shard!r}")
        if not isinstance(reductions, Mapping) or reductions.keys() != set(modules):
            raise ValueError(f"state_dict: expected the modules of this model, {', '.join(modules)}, got {reductions}")
        if not all(type(steps) is int and steps >= 0 for steps in reductions.values()):
            raise ValueError(f"state_dict: expected reductions of at least 0, got {dict(reductions)}")
        if not isinstance(state["feedback"], Mapping):
            raise ValueError(f"state_dict: expected feedback by rank, got {type(state['feedback']).__name__}")
        if type(state["world_size"]) is not int:
            raise ValueError(f"state_dict: expected world_size as a number, got {type(state['world_size']).__name__}")
        if state["world_size"] != contributions and any(parameter.is_parallel for parameter in parameters):
            raise ValueError(
                f"state_dict: expected what {contributions} ranks have saved, since the model has tensor parallelism, "
                f"got that of {state['world_size']}"
            )
    return dict(states[0]["reductions"])


def joined(states: Sequence[Mapping[str, Any]], dims: Mapping[str, int]) -> list[Mapping[str, Any]]:
    """Returns a state for each contribution, whose residuals are of whole parameters.

    dims: the dimension that is sharded, by parameter. Raises ValueError if a shard is missing or invalid.
    """
    by_contribution: dict[str, dict[int, Mapping[str, Any]]] = {}
    for state in states:
        for key in state["feedback"]:
            by_contribution.setdefault(key, {})[state["shard"][0]] = state
    whole: list[Mapping[str, Any]] = []
    for key, by_shard in by_contribution.items():
        one = next(iter(by_shard.values()))
        shards = one["shard"][1]
        if len(by_shard) != shards or sorted(by_shard) != list(range(shards)):
            raise ValueError(
                f"state_dict: expected all {shards} shards of {key}, got {sorted(by_shard)}; give it a list of the "
                "ranks' state_dicts"
            )
        parts = [by_shard[shard]["feedback"][key] for shard in range(shards)]
        try:
            residuals = {name: torch.cat([part[name] for part in parts], dims[name]) for name in parts[0]}
        except (KeyError, TypeError, RuntimeError, IndexError) as error:
            raise ValueError(
                f"state_dict: expected tensors for the model's parameters in each shard of {key}, got others: {error}"
            ) from error
        whole.append({**one, "feedback": {key: residuals}})
    return whole
