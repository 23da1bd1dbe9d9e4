"""How what a step does to a parameter of half precision is kept: in a float32 master, in eight bits that extend a
bfloat16, or in the parameter itself, by rounding."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dltrain_ext import _ops
from dltrain_ext._arguments import as_number, check_dense
from dltrain_ext.codecs import arguments
from dltrain_ext.optim.options import seed_of
from dltrain_ext.optim.rule import Rule
from dltrain_ext.optim.shards import like, local

MASTER = "master_param"
STEP = "rounding_step"
"""The key of a group that rounds stochastically: how often it has taken or skipped a step; int64, where its parameters
are."""


def exist(group: Mapping[str, Any]) -> bool:
    """Returns whether the parameters of half precision of the group have masters."""
    return bool(group.get("master_weights", "auto"))


def are_short(group: Mapping[str, Any]) -> bool:
    return group.get("master_weights") == "8bit"


def is_stochastic(group: Mapping[str, Any]) -> bool:
    return arguments.is_stochastic(group.get("rounding", "nearest"))


def check_group(rule: Rule, group: Mapping[str, Any], optimizer: str) -> None:
    masters, stochastic = group.get("master_weights", "auto"), is_stochastic(group)
    choices = ("auto", True, False, "8bit") if rule.compact else ("auto", True, False)
    if not isinstance(masters, int | str) or masters not in choices:
        allowed = "'auto', True, False or '8bit'" if rule.compact else "'auto', True or False"
        raise ValueError(f"master_weights: expected {allowed}, got {masters!r}")
    if stochastic and not rule.compact:
        raise ValueError(f"rounding: expected 'nearest' for {optimizer}, got 'stochastic'")
    if stochastic and masters:
        raise ValueError(
            f"rounding: expected 'nearest' unless master_weights=False, got 'stochastic' and master_weights={masters!r}"
        )
    seed_of(group)
    needs_bfloat16 = "rounding='stochastic'" if stochastic else "master_weights='8bit'"
    if (stochastic or masters == "8bit") and any(p.dtype == torch.float16 for p in group["params"]):
        raise ValueError(f"params: expected float32 or bfloat16 for {needs_bfloat16}, got float16")
    if isinstance(group.get(STEP), Tensor):
        check_dense(group[STEP], STEP)
    if STEP in group and not 0 <= as_number(group[STEP], STEP) < 2**62:
        raise ValueError(f"{STEP}: expected a number >= 0, got {group[STEP]!r}")


def prepare(group: dict[str, Any]) -> bool:
    """Has the count of the steps of a group that rounds stochastically where its parameters are; returns whether there
    was none."""
    first = next((local(p) for p in group["params"] if isinstance(p, Tensor) and not p.is_meta), None)
    if first is None or not is_stochastic(group):
        return False
    is_new = STEP not in group
    with torch.inference_mode(False):  # it outlives this step
        group[STEP] = torch.as_tensor(group.get(STEP, 0), dtype=torch.int64, device=first.device)
    return is_new


def count(group: Mapping[str, Any]) -> None:
    """Counts a step, on the device: a captured graph counts each replay."""
    if is_stochastic(group) and STEP in group:
        group[STEP].add_(1)


def fits(master: Tensor, p: Tensor) -> bool:
    """Returns whether eight bits can extend the parameter."""
    return p.dtype == torch.bfloat16 and master.shape == p.shape


def decoded(master: Tensor, p: Tensor) -> Tensor:
    """Returns a master in float32, from the eight bits that extend the parameter."""
    return like(p, _ops.decode_master(local(master), local(p)))


def recode(group: Mapping[str, Any], entry: dict[str, Any], p: Tensor) -> None:
    """Stores the master of a parameter in the form that its group has."""
    master = entry.get(MASTER)
    if not isinstance(master, Tensor):
        return
    is_short = master.dtype == torch.uint8
    if is_short and not fits(master, p):
        raise ValueError(f"state[{MASTER!r}]: expected float32 for a parameter of {p.dtype}, got bits of bfloat16")
    if p.dtype == torch.float32:
        return
    if are_short(group) and not is_short:
        entry[MASTER] = like(p, _ops.encode_master(local(master), local(p)))
    elif is_short and not are_short(group):
        entry[MASTER] = decoded(master, p)
