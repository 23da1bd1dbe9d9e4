"""States of optimizers that are stored as codes of 8 bits: messages, tensors of bytes of one dimension."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dltrain_ext import _ops
from dltrain_ext.optim.rule import Rule, State
from dltrain_ext.optim.shards import like, local

CODECS = (None, "int8")
SMALLEST = 4096
"""States of parameters with fewer elements on this rank stay float32: most are norms and biases."""


def are_codes(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.uint8


def keys_of(rule: Rule, group: Mapping[str, Any], p: Tensor) -> set[str]:
    """Returns the keys of the states of a parameter that the group stores as codes."""
    if group.get("state_codec") is None or local(p).numel() < SMALLEST:
        return set()
    return {state.key for state in rule.states if state.coded}


def size_of(p: Tensor) -> int:
    """Returns how many bytes the codes of a parameter's state have."""
    return _ops.state_bytes(local(p).numel())


def check_group(rule: Rule, group: Mapping[str, Any], optimizer: str) -> None:
    codec = group.get("state_codec")
    if not isinstance(codec, str | None) or codec not in CODECS:
        raise ValueError(f"state_codec: expected None or 'int8', got {codec!r}")
    if codec is not None and not any(state.coded for state in rule.states):
        raise ValueError(
            f"state_codec: expected None, since the states of {optimizer} are always float32, got {codec!r}"
        )


def check(codes: Tensor, state: State, p: Tensor) -> None:
    """Raises ValueError if these cannot be the codes of the state of a parameter."""
    name, expected = f"state[{state.key!r}]", size_of(p)
    if not state.coded or codes.shape != (expected,):
        given = f"{expected} codes" if state.coded else "float32"
        raise ValueError(f"{name}: expected {given}, got codes of shape {list(codes.shape)}")
    scales = codes[: expected - local(p).numel()].view(torch.float32)
    if not codes.is_meta and bool((scales < 0).any()):
        raise ValueError(f"{name}: expected no scale below 0")


def encoded(value: Tensor, state: State) -> Tensor:
    """Returns the codes of a float32 state or, of a DTensor, of its part on this rank."""
    return _ops.encode_state(local(value), nonnegative=state.nonnegative)


def decoded(codes: Tensor, state: State, p: Tensor) -> Tensor:
    """Returns the state of a parameter in float32, as a DTensor if the parameter is one."""
    return like(p, _ops.decode_state(codes, list(local(p).shape), nonnegative=state.nonnegative))


def recode(rule: Rule, group: Mapping[str, Any], entry: dict[str, Any], p: Tensor) -> None:
    """Stores the states of a parameter in the form that its group has."""
    coded = keys_of(rule, group, p)
    for state in rule.states:
        value = entry.get(state.key)
        if not isinstance(value, Tensor) or value.is_sparse:
            continue
        if state.key in coded and not are_codes(value):
            entry[state.key] = encoded(value, state)
        elif state.key not in coded and are_codes(value):
            entry[state.key] = decoded(value, state, p)
