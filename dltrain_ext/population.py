"""Population based training (Jaderberg et al. 2017, arXiv 1711.09846): members that do badly become copies of those
that do well, between live processes. Which settings they then have is the caller's choice."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dltrain_ext._arguments import as_number, check_dense, check_number
from dltrain_ext.comm import Communicator
from dltrain_ext.comm.groups import group_of
from dltrain_ext.comm.together import broadcast_all

__all__ = ["Winner", "exploit", "perturb", "resample"]


class Winner(NamedTuple):
    """The member of which another one is a copy now.

    Attributes:
        rank: its global rank.
        score: what it has given.
        settings: likewise.
    """

    rank: int
    score: float
    settings: Any


class _Absent(NamedTuple):
    """Stands for a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str  # its type

    @classmethod
    def of(cls, tensor: Tensor) -> "_Absent":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type)


class _Member(NamedTuple):
    """What a member tells all others."""

    score: float
    settings: Any
    alike: dict[str, Any]  # what all members must have in common
    state: list[Any]  # the leaves of the optimizer's state_dict
    tree: str  # how they hang together


def exploit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    score: float,
    *,
    fraction: float = 0.25,
    settings: Any = None,
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
) -> Winner | None:
    """Makes the members with the lowest scores copies of members with the highest ones, bit for bit and without a file:
    the truncation selection of the paper's section 4.1.1. This is a collective call over the group.

    Each rank is a member. Of n members the ``ceil(fraction * n)`` with the lowest scores each take the parameters,
    buffers and optimizer state of a member that is drawn among as many with the highest scores. Rates and other options
    of the optimizer's groups belong to its state; a scheduler keeps its own. If the call fails, no model has changed.

    If a member has several DDP ranks, ``group`` has the ranks with the same place in all members, and all ranks of a
    member give the same score.

    Args:
        model: the same on all ranks, up to the values, on the CPU or on CUDA.
        optimizer: one of the model's parameters, of the same class on all ranks.
        score: higher is better, such as an accuracy, or a negative loss; NaN is the lowest.
        fraction: of the members, above 0 and at most 0.5.
        settings: anything that pickle accepts, such as the hyper-parameters of this member.
        seed: of the draws, which depend on it and on the scores alone; the same on all ranks.
        group: the process group; the default group if None.
        timeout: how long members that exchange state wait for each other; the group's own timeout if None.

    Returns:
        The winner of which this member is a copy now; None if it has not changed, as if its score is not lower than
        that of the member that was drawn.

    Raises:
        TypeError, ValueError: an argument is invalid, or the members differ; the message names it.
        torch.distributed.DistBackendError: a rank was lost; the message names it.
    """
    group = group_of(group)
    value, part = as_number(score, "score"), as_number(fraction, "fraction")
    if not 0 < part <= 0.5:
        raise ValueError(f"fraction: expected a number above 0 and at most 0.5, got {fraction!r}")
    check_number(seed, "seed", 2**63)
    tensors = _tensors_of(model)
    leaves, tree = _state_of(optimizer)
    state = [_Absent.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    sizes = [len(parameters["params"]) for parameters in optimizer.param_groups]
    alike = {"fraction": part, "seed": seed, "optimizer": (type(optimizer).__name__, sizes)}
    alike |= {f"model: {name}": _Absent.of(tensor) for name, tensor in tensors.items()}
    own = _Member(value, settings, alike, state, tree)
    ranks: list[int] = dist.get_process_group_ranks(group)
    place = ranks.index(dist.get_rank())
    members: list[_Member] = [own] * len(ranks)
    dist.all_gather_object(members, own, group=group)
    _check_alike(members, ranks)

    sources = choose([member.score for member in members], part, seed)
    source = sources.get(place, place)
    takers = [taker for taker, found in sources.items() if found == source]
    if not takers:
        return None
    some = [ranks[each] for each in (source, *takers)]
    communicator = Communicator(group, ranks=some, timeout=timeout, ranks_per_host=1)
    try:
        if place == source:
            broadcast_all(communicator, [*tensors.values(), *_tensors_in(leaves)], ranks[source])
            communicator.drain()
            return None
        winner = members[source]
        received = [torch.empty_like(tensor) for tensor in tensors.values()]
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        leaves = [_empty(leaf, device) if isinstance(leaf, _Absent) else leaf for leaf in winner.state]
        broadcast_all(communicator, [*received, *_tensors_in(leaves)], ranks[source])
        communicator.drain()
    finally:
        communicator.close()
    with torch.no_grad():
        torch._foreach_copy_([*tensors.values()], received)
    optimizer.load_state_dict(pytree.tree_unflatten(leaves, pytree.treespec_loads(winner.tree)))
    return Winner(ranks[source], winner.score, winner.settings)


def choose(scores: Sequence[float], fraction: float, seed: int) -> dict[int, int]:
    """Returns for each member that changes the one of which it becomes a copy."""
    values = [-math.inf if math.isnan(score) else score for score in scores]
    order = sorted(range(len(values)), key=lambda place: (values[place], -place))
    count = min(math.ceil(fraction * len(order)), len(order) // 2)
    draw = random.Random(f"{seed} {values}")
    drawn = {loser: draw.choice(order[-count:]) for loser in order[:count]}
    return {loser: winner for loser, winner in drawn.items() if values[loser] < values[winner]}


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    found = {name: p.detach() for name, p in model.named_parameters()} | dict(model.named_buffers())
    for name, tensor in found.items():
        _check_plain(tensor, f"model: {name}")
    return found


def _state_of(optimizer: torch.optim.Optimizer) -> tuple[list[Any], str]:
    """Returns the leaves of its state_dict, and how they hang together."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    leaves, tree = pytree.tree_flatten(optimizer.state_dict())
    for tensor in _tensors_in(leaves):
        _check_plain(tensor, "optimizer: its state")
    return leaves, pytree.treespec_dumps(tree)


def _tensors_in(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _check_plain(tensor: Tensor, name: str) -> None:
    if type(tensor).__name__ == "DTensor":  # importing the class takes as long as importing torch
        raise TypeError(f"{name}: expected a plain dense tensor, got a DTensor")
    check_dense(tensor, name)


def _check_alike(members: Sequence[_Member], ranks: Sequence[int]) -> None:
    first, *others = members
    for rank, other in zip(ranks[1:], others, strict=True):
        for name in {**first.alike, **other.alike}:
            one, another = first.alike.get(name), other.alike.get(name)
            if one != another:
                raise ValueError(
                    f"{name}: expected the same on all ranks, got {one} on rank {ranks[0]} and {another} on rank {rank}"
                )


def _empty(absent: _Absent, device: torch.device) -> Tensor:
    where = device if device.type == absent.device else torch.device(absent.device)
    return torch.empty(absent.shape, dtype=absent.dtype, device=where)


def perturb(
    settings: Mapping[str, float],
    *,
    factors: Sequence[float] = (0.8, 1.2),
    generator: torch.Generator | None = None,
) -> dict[str, float]:
    """Returns the settings, each multiplied by one of the factors (the paper's section 4.1.1).

    Args:
        settings: numbers by name.
        factors: each is drawn with the same probability.
        generator: of the draws; torch's default one if None.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
    """
    _check(settings, generator)
    if not isinstance(factors, list | tuple) or not factors:
        raise ValueError(f"factors: expected a sequence of at least one number, got {factors!r}")
    numbers = [as_number(factor, "factors") for factor in factors]
    found = {}
    for name, value in settings.items():
        drawn = int(torch.randint(len(numbers), (1,), generator=generator))
        found[name] = as_number(value, f"settings: {name}") * numbers[drawn]
    return found


def resample(
    settings: Mapping[str, Any],
    priors: Mapping[str, Callable[[], Any]],
    *,
    probability: float = 0.25,
    generator: torch.Generator | None = None,
) -> dict[str, Any]:
    """Returns the settings, each replaced with that probability by a new draw from its prior (the paper's section
    4.1.1).

    Args:
        settings: values by name.
        priors: functions by the same names, or by some of them, that each draw a value.
        probability: 0 to 1.
        generator: decides which are replaced; torch's default one if None.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, the expected and the actual value.
    """
    _check(settings, generator)
    chance = as_number(probability, "probability")
    if not 0 <= chance <= 1:
        raise ValueError(f"probability: expected 0 to 1, got {probability!r}")
    if not isinstance(priors, Mapping) or not all(map(callable, priors.values())):
        raise TypeError(f"priors: expected a mapping from names to functions, got {priors!r}")
    if unknown := [name for name in priors if name not in settings]:
        raise ValueError(f"priors: expected names of settings, got {unknown[0]!r}")
    found = dict(settings)
    for name, prior in priors.items():
        if float(torch.rand(1, generator=generator)) < chance:
            found[name] = prior()
    return found


def _check(settings: object, generator: object) -> None:
    if not isinstance(settings, Mapping):
        raise TypeError(f"settings: expected a mapping from names to values, got {type(settings).__name__}")
    if not isinstance(generator, torch.Generator | None):
        raise TypeError(f"generator: expected a torch.Generator or None, got {generator!r}")
