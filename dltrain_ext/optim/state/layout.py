"""What an optimizer keeps of each parameter: how it is laid out in memory, and which values are possible."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dltrain_ext._arguments import as_number, check_dense
from dltrain_ext.optim.rule import Rule
from dltrain_ext.optim.shards import local
from dltrain_ext.optim.state import codes, masters
from dltrain_ext.optim.state.masters import MASTER

ALIGNMENT = 16  # float32 elements: a cache line


def is_compact(entry: Any) -> bool:
    """Returns whether a parameter's entry in the state of an optimizer has tensors that are not float32."""
    return isinstance(entry, dict) and any(map(codes.are_codes, entry.values()))


def decoded(rule: Rule, entry: dict[str, Any], p: Tensor) -> dict[str, Any]:
    """Returns the entry of a parameter with float32 states and a float32 master: itself if it has them."""
    if not is_compact(entry):
        return entry
    states = {state.key: state for state in rule.states}
    out = dict(entry)
    for name in filter(lambda name: codes.are_codes(entry[name]), entry):
        if name in states:
            out[name] = codes.decoded(entry[name], states[name], p)
        elif name == MASTER and masters.fits(entry[name], p):
            out[name] = masters.decoded(entry[name], p)
        elif name == MASTER:  # the parameter has been converted since, and what extended it is lost
            del out[name]
    return out


def recode(rule: Rule, group: Mapping[str, Any], entry: dict[str, Any], p: Tensor) -> None:
    """Stores the states and the master of a parameter in the form that its group has."""
    codes.recode(rule, group, entry, p)
    masters.recode(group, entry, p)


def check(rule: Rule, entry: Any, p: Tensor, *, may_be_sparse: bool) -> None:
    """Raises TypeError or ValueError that names a value, in the entry of a parameter, which no step can produce."""
    if not isinstance(entry, dict):
        raise TypeError(f"state: expected a dict for each parameter, got {type(entry).__name__}")
    states = {state.key: state for state in rule.states}
    for name in (*states, MASTER):
        if not isinstance(entry.get(name), Tensor):
            continue  # the next step creates it, or raises an error
        value, state = local(entry[name]), states.get(name)
        if state is not None and codes.are_codes(value):
            codes.check(value, state, p)
            continue
        if not (may_be_sparse and value.is_sparse):
            check_dense(value, f"state[{name!r}]")
        if entry[name].shape != p.shape:
            expected, got = list(p.shape), list(entry[name].shape)
            raise ValueError(f"state[{name!r}]: expected shape {expected}, got {got}")
        must_check = state is not None and state.nonnegative and value.numel() and not value.is_meta
        if must_check and bool(value.min() < 0):
            raise ValueError(f"state[{name!r}]: expected no number below 0, got {float(value.min()):g}")
    for name in ("step", *(counter.key for counter in rule.counters)):
        number = as_number(entry.get(name, 0), f"state[{name!r}]")
        if not 0 <= number < math.inf:
            raise ValueError(f"state[{name!r}]: expected a number >= 0, got {number:g}")


def lay_out(
    rule: Rule,
    group: Mapping[str, Any],
    params: Iterable[Tensor],
    initial: Mapping[str, float],
    state: Mapping[Tensor, dict[str, Any]],
) -> None:
    """Creates the missing tensors of each parameter in the state, all on one device, and a master if it shall have one.
    ``initial`` has the values of the states at first.

    Those of a dtype are views of one flat tensor. Thousands of small tensors would be scattered over memory, and
    large ones of equal alignment get in each other's way in the cache: arrays whose addresses differ by 2^27 + 2^12
    bytes share a way-predictor tag on AMD processors, and with SSE2 a step took 2.2 times as long.
    """
    missing = []
    totals = {torch.float32: 0, torch.uint8: 0}  # torch.save takes no memory that has tensors of both
    for p in params:
        entry = state[p]
        wanted = [*initial, MASTER] if masters.exist(group) and p.dtype != torch.float32 else initial
        coded = codes.keys_of(rule, group, p)
        for name in wanted:
            if name not in entry:
                is_short = name in coded or (name == MASTER and masters.are_short(group))
                dtype, size = (
                    torch.uint8 if is_short else torch.float32,
                    codes.size_of(p) if name in coded else p.numel(),
                )
                missing.append((p, name, dtype, slice(totals[dtype], totals[dtype] + size)))
                line = 4 * ALIGNMENT // dtype.itemsize
                totals[dtype] += -(-size // line) * line
            elif not isinstance(entry[name], Tensor):
                kind, shape = type(entry[name]).__name__, list(p.shape)
                raise TypeError(f"state[{name!r}] of a parameter of shape {shape}: expected a tensor, got {kind}")
    if not missing:
        return
    device = missing[0][0].device
    arenas = {dtype: torch.zeros(total, dtype=dtype, device=device) for dtype, total in totals.items()}
    for p, name, dtype, part in missing:
        if name != MASTER and dtype == torch.uint8:
            state[p][name] = arenas[dtype][part]
        else:
            dense = torch.empty_like(p, device="meta", dtype=torch.float32)  # p's strides, if they leave no gaps
            state[p][name] = arenas[dtype].as_strided(p.shape, dense.stride(), part.start)
        if dtype == torch.uint8:  # zeros are the codes of zeros, and extend a parameter by nothing
            continue
        if name == MASTER:
            state[p][name].copy_(p)
        elif initial[name]:
            state[p][name].fill_(initial[name])
