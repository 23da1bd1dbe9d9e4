"""What an optimizer is, as its header in csrc/math/optim says it."""

from typing import NamedTuple

from dltrain_ext import _ops


class State(NamedTuple):
    """A tensor of the parameter's shape, in float32."""

    key: str
    optional: bool
    initial: float
    nonnegative: bool


class Counter(NamedTuple):
    """A number of a parameter, in float32."""

    key: str
    initial: float


class Rule(NamedTuple):
    """An optimizer's hyper-parameters with their defaults, what it keeps, and what tells some tensors from others."""

    name: str
    hyper: dict[str, float | bool]
    states: tuple[State, ...]
    counters: tuple[Counter, ...]
    flag: str | None


RULES = {
    name: Rule(name, hyper, tuple(State(*state) for state in states), tuple(Counter(*each) for each in counters), flag)
    for name, hyper, states, counters, flag in _ops.optimizers()
}
