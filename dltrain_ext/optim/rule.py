"""The descriptions of the optimizers, from their headers in csrc/math/optim."""

from typing import NamedTuple

from dltrain_ext import _ops


class State(NamedTuple):
    """A float32 tensor of the parameter's shape. If it may be ``coded``, it can also be stored as codes."""

    key: str
    optional: bool
    initial: float
    nonnegative: bool
    coded: bool


class Counter(NamedTuple):
    """A float32 number for each parameter."""

    key: str
    initial: float


class Rule(NamedTuple):
    """An optimizer's hyper-parameters with their defaults, its states and counters, a flag that is set for some
    tensors, how many norms of those tensors a step needs, and whether bfloat16 parameters may be ``compact``: rounded
    stochastically, or extended by eight bits."""

    name: str
    hyper: dict[str, float | bool]
    states: tuple[State, ...]
    counters: tuple[Counter, ...]
    flag: str | None
    norms: int
    compact: bool


RULES = {
    name: Rule(
        name,
        hyper,
        tuple(State(*each) for each in states),
        tuple(Counter(*each) for each in counters),
        flag,
        norms,
        compact,
    )
    for name, hyper, states, counters, flag, norms, compact in _ops.optimizers()
}
