"""The state of an outer optimizer in a checkpoint: plain tensors and numbers."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dltrain_ext._arguments import is_dense
from dltrain_ext.compress import checkpoint as residuals
from dltrain_ext.local_sgd.fragments import Fragment

_FLATS = ("backup", "momentum")
_MOST = 2**62  # steps


class Counts(NamedTuple):
    """Where a site is: outer steps, steps of the inner optimizer, and how many of these until the next average."""

    outer: int
    inner: int
    due_in: int


class Loaded(NamedTuple):
    """A state that has been checked."""

    counts: Counts
    flats: dict[str, dict[str, Tensor]]  # "backup" and "momentum", by parameter
    residuals: dict[str, Tensor]


def save(
    flats: Mapping[str, dict[str, Tensor]], lost: dict[str, Tensor], counts: Counts, rank: int, world_size: int
) -> dict[str, Any]:
    """Returns a state of what all sites have, by "backup" and "momentum" and by parameter, and of what encoding has
    lost of this rank's movements. The tensors are its own."""
    saved = residuals.save(lambda as_they_are: lost, counts.outer, rank, world_size, None)
    return {**saved, "inner_steps": counts.inner, "due_in": counts.due_in, **flats}


def flats_of(fragments: Sequence[Fragment]) -> dict[str, dict[str, Tensor]]:
    return {
        key: {name: value.clone() for fragment in fragments for name, value in _named(fragment, key).items()}
        for key in _FLATS
    }


def lost_of(fragments: Sequence[Fragment]) -> dict[str, Tensor]:
    return {name: lost.clone() for fragment in fragments for name, lost in fragment.residuals().items()}


def check(
    state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    fragments: Sequence[Fragment],
    has_momentum: bool,
    rank: int,
    world_size: int,
) -> Loaded:
    """Raises TypeError or ValueError that names what was expected and what came."""
    states: Any = state_dict if isinstance(state_dict, list | tuple) else [state_dict]
    shapes = {name: value for fragment in fragments for name, value in fragment.named(fragment.backup).items()}
    outer, lost = residuals.merge(states, rank, world_size, shapes, "DiLoCo")
    if outer >= _MOST:
        raise ValueError(f"state_dict: expected steps below {_MOST}, got {outer}")
    if spoilt := [name for name, residual in lost.items() if not bool(residual.isfinite().all())]:
        raise ValueError(f"state_dict: expected finite feedback of {spoilt[0]}")
    state = states[0]
    for name, least in (("inner_steps", 0), ("due_in", 1)):
        if type(number := state.get(name)) is not int or not least <= number < _MOST:
            raise ValueError(f"state_dict: expected {name} of at least {least}, got {number!r}")
    flats = {}
    for key in _FLATS:
        wanted = list(shapes) if key == "backup" or has_momentum else []
        given = state.get(key)
        if not isinstance(given, Mapping) or sorted(map(str, given)) != sorted(wanted):
            raise ValueError(
                f"state_dict: expected {key} of the parameters {sorted(wanted)}, got "
                f"{sorted(map(str, given)) if isinstance(given, Mapping) else given!r}"
            )
        for name in wanted:
            _check_values(given[name], f"{key} of {name}", shapes[name])
        flats[key] = dict(given)
    return Loaded(Counts(outer, state["inner_steps"], state["due_in"]), flats, lost)


def _check_values(given: Any, what: str, like: Tensor) -> None:
    if not isinstance(given, Tensor) or not is_dense(given) or given.is_meta:
        raise ValueError(f"state_dict: expected {what} as a dense tensor, got {type(given).__name__}")
    if given.dtype != torch.float32:
        raise ValueError(f"state_dict: expected {what} in float32, got {given.dtype}")
    if given.shape != like.shape:
        raise ValueError(f"state_dict: expected {what} of shape {tuple(like.shape)}, got {tuple(given.shape)}")
    if not bool(given.isfinite().all()):
        raise ValueError(f"state_dict: expected {what} to be finite")


def apply(loaded: Loaded, fragments: Sequence[Fragment]) -> None:
    for fragment in fragments:
        for key in _FLATS:
            for name, value in _named(fragment, key).items():
                value.copy_(loaded.flats[key][name].detach())
        for name, lost in fragment.residuals().items():
            lost.copy_(loaded.residuals[name]) if name in loaded.residuals else lost.zero_()


def _named(fragment: Fragment, key: str) -> dict[str, Tensor]:
    flat = fragment.backup if key == "backup" else fragment.momentum
    return {} if flat is None else fragment.named(flat)
