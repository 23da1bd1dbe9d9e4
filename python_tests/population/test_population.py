"""Population based training: who becomes a copy of whom, bit for bit, and what happens when a member is lost."""

import math
import random

import pytest
import torch
import torch.distributed as dist
from ranks import DEADLINE, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import optim, population
from dltrain_ext.population import Winner, choose


class Net(nn.Module):
    """Parameters in several dtypes and layouts, buffers, and a parameter that has two names."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(64)
        self.low = nn.Linear(64, 300, dtype=torch.bfloat16)
        self.tied = nn.Linear(64, 300, bias=False, dtype=torch.bfloat16)
        self.tied.weight = self.low.weight
        self.register_buffer("mask", torch.rand(7) < 0.5)

    def forward(self, x):
        x = self.norm(self.conv(x.contiguous(memory_format=torch.channels_last))).mean((2, 3))
        return (self.low(x.bfloat16()) + self.tied(x.bfloat16())).float().square().mean() * self.mask.sum()


OPTIMIZERS = {
    "torch": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr),
    "ours": lambda parameters, lr: optim.AdamW(parameters, lr=lr),
    "int8": lambda parameters, lr: optim.AdamW(parameters, lr=lr, state_codec="int8"),
    "8bit": lambda parameters, lr: optim.AdamW(parameters, lr=lr, master_weights="8bit"),
    "SGD": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
}


def make(rank, name):
    torch.manual_seed(rank)
    model = Net()
    return model, OPTIMIZERS[name]([*model.parameters()], lr=0.01 * (rank + 1))


def train(model, optimizer, seed, steps=2):
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(100 * seed + step))).backward()
        optimizer.step()


def whole_state(model, optimizer):
    """Return all that a member is."""
    found = optimizer.state_dict()
    tensors = [tensor.clone() for tensor in model.state_dict().values()]
    tensors += [value.clone() for state in found["state"].values() for value in state.values() if value is not None]
    options = [{key: value for key, value in group.items() if key != "params"} for group in found["param_groups"]]
    return tensors, options


def same(ours, theirs):
    return (
        len(ours[0]) == len(theirs[0])
        and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))
        and ours[1] == theirs[1]
    )


def copy(rank, world_size, name, scores, trained):
    model, optimizer = make(rank, name)
    if rank in trained:
        train(model, optimizer, rank)
    before = [None] * world_size
    dist.all_gather_object(before, whole_state(model, optimizer))
    found = population.exploit(model, optimizer, scores[rank], settings={"rank": rank})
    source = rank if found is None else found.rank
    assert same(whole_state(model, optimizer), before[source])
    assert found is None or found == Winner(source, scores[source], {"rank": source})
    train(model, optimizer, 7)  # as the winner would go on
    after = [None] * world_size
    dist.all_gather_object(after, whole_state(model, optimizer))
    assert same(after[rank], after[source])
    return found and found.rank


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_worst_becomes_a_copy_of_the_best(name):
    assert run_ranks(4, copy, name, [0.3, 0.1, 0.9, 0.5], (0, 1, 2, 3)) == [None, 2, None, None]


@pytest.mark.parametrize(("trained", "case"), [((), "nobody"), ((0,), "the winner"), ((1,), "the loser")])
def test_state_may_be_absent_before_the_first_step(trained, case):
    assert run_ranks(2, copy, "ours", [1.0, 0.0], trained) == [None, 0], case


def test_members_with_the_same_score_do_not_change():
    assert run_ranks(3, copy, "SGD", [2.0, 2.0, 2.0], (0, 1, 2)) == [None] * 3


def half(rank, world_size):
    """Several members become copies of one or of several."""
    found = []
    for seed in range(4):
        model, optimizer = make(rank, "SGD")
        train(model, optimizer, rank)
        winner = population.exploit(model, optimizer, float(rank), fraction=0.5, seed=seed)
        found.append(winner and winner.rank)
        states = [None] * world_size
        dist.all_gather_object(states, whole_state(model, optimizer))
        assert winner is None or same(states[rank], states[winner.rank])
    return found


def test_half_of_the_members_change():
    first, second, *winners = run_ranks(4, half)
    assert {*first, *second} == {2, 3} and winners == [[None] * 4] * 2
    assert any(a == b for a, b in zip(first, second, strict=True))  # two copies of one member
    assert first != second


def members_of_two(rank, world_size):
    """Members of two DDP ranks: the ranks with the same place exchange."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    places = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    member = rank // 2
    torch.manual_seed(member)
    model = DistributedDataParallel(nn.Linear(30, 300), process_group=pairs[member])
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 30, generator=torch.Generator().manual_seed(rank))).square().mean().backward()
        optimizer.step()
    found = population.exploit(model, optimizer, float(member), fraction=0.5, group=places[rank % 2])
    every = [None] * world_size
    dist.all_gather_object(every, whole_state(model, optimizer))
    assert all(same(every[0], other) for other in every)
    return found and found.rank


def test_a_member_may_have_several_ranks():
    assert run_ranks(4, members_of_two) == [2, 3, None, None]


def lose(rank, world_size):
    """The winner is lost after the members have agreed; the loser is as it was."""
    model, optimizer = make(rank, "ours")
    train(model, optimizer, rank)
    before = whole_state(model, optimizer)
    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(population, "Communicator", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("lost")))
            with pytest.raises(RuntimeError, match="lost"):
                population.exploit(model, optimizer, 1.0)
    else:
        with pytest.raises(dist.DistBackendError, match="rank 0 did not come"):
            population.exploit(model, optimizer, 0.0, timeout=DEADLINE)
    assert same(whole_state(model, optimizer), before)


def test_a_member_does_not_change_if_the_winner_is_lost():
    run_ranks(2, lose, fresh=True)


def refuse(rank, world_size):
    model, optimizer = make(0, "torch")
    before = whole_state(model, optimizer)
    for error, match, change in (
        (TypeError, "model: expected a torch.nn.Module, got list", {"model": []}),
        (TypeError, "optimizer: expected a torch.optim.Optimizer, got NoneType", {"optimizer": None}),
        (TypeError, "score: expected a number, got 'x'", {"score": "x"}),
        (ValueError, "fraction: expected a number above 0 and at most 0.5, got 0.6", {"fraction": 0.6}),
        (ValueError, "fraction: expected a number above 0 and at most 0.5, got 0", {"fraction": 0}),
        (ValueError, "seed: expected 0 to", {"seed": -1}),
        (ValueError, "seed: expected the same on all ranks, got 0 on rank 0 and 1 on rank 1", {"seed": rank}),
        (ValueError, "fraction: expected the same on all ranks, got 0.25 on rank 0 and", {"fraction": (1 + rank) / 4}),
        (
            ValueError,
            r"model: weight: expected the same on all ranks, got .*\(2, 3\)",
            {"model": nn.Linear(3, 2 + rank)},
        ),
        (
            ValueError,
            "optimizer: expected the same on all ranks",
            {"optimizer": make(0, "SGD" if rank else "torch")[1]},
        ),
        (TypeError, "group: expected a torch.distributed.ProcessGroup", {"group": 7}),
    ):
        arguments = {"model": model, "optimizer": optimizer, "score": float(rank)} | change
        with pytest.raises(error, match=match):
            population.exploit(**arguments)
    assert same(whole_state(model, optimizer), before)
    sparse = nn.Module()
    sparse.register_buffer("table", torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match="model: table: expected a plain dense tensor"):
        population.exploit(sparse, optimizer, 0.0)


def test_bad_input_names_the_argument():
    run_ranks(2, refuse)


def test_who_is_chosen():
    assert choose([1.0, 3.0, 2.0, 4.0], 0.25, 0) == {0: 3}
    assert choose([math.nan, 3.0, -math.inf, 4.0], 0.5, 0).keys() == {0, 2}
    assert choose([5.0], 0.5, 0) == {} and choose([], 0.5, 0) == {}
    assert choose([1.0, 0.0, 1.0], 0.1, 0) in ({1: 0}, {1: 2})  # at least one changes
    assert choose([math.nan, math.nan], 0.5, 0) == {}
    several = [choose([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 0.5, seed) for seed in range(200)]
    drawn = [found[0] for found in several]
    assert all(found.keys() == {0, 1, 2} for found in several)
    assert all(drawn.count(winner) > 40 for winner in (3, 4, 5))  # 67 is the expectation
    assert choose([0.0, 1.0], 0.5, 3) == choose([0.0, 1.0], 0.5, 3)


def test_settings_are_perturbed_and_resampled():
    generator = torch.Generator().manual_seed(0)
    settings = {"lr": 1.0, "decay": 10.0}
    found = [population.perturb(settings, generator=generator) for _ in range(100)]
    assert {each["lr"] for each in found} == {0.8, 1.2} and {each["decay"] for each in found} == {8.0, 12.0}
    assert 20 < sum(each["lr"] == 0.8 for each in found) < 80
    assert len({tuple(each.values()) for each in found}) == 4  # independent of each other
    assert population.perturb(settings, factors=(2,)) == {"lr": 2.0, "decay": 20.0}
    draw = random.Random(0)
    priors = {"lr": lambda: draw.uniform(5, 6)}
    found = [population.resample(settings, priors, generator=generator) for _ in range(200)]
    assert all(each["decay"] == 10.0 for each in found)
    assert 25 < sum(5 <= each["lr"] <= 6 for each in found) < 80  # a quarter of them
    assert population.resample(settings, priors, probability=0.0) == settings
    assert settings == {"lr": 1.0, "decay": 10.0}
    for error, match, call in (
        (TypeError, "settings: expected a mapping from names to values, got list", lambda: population.perturb([])),
        (TypeError, "settings: lr: expected a number", lambda: population.perturb({"lr": "x"})),
        (
            ValueError,
            r"factors: expected a sequence of at least one number, got \(\)",
            lambda: population.perturb({}, factors=()),
        ),
        (ValueError, "probability: expected 0 to 1, got 2", lambda: population.resample({}, {}, probability=2)),
        (ValueError, "priors: expected names of settings, got 'b'", lambda: population.resample({}, {"b": int})),
        (
            TypeError,
            "priors: expected a mapping from names to functions",
            lambda: population.resample({"a": 1}, {"a": 1}),
        ),
    ):
        with pytest.raises(error, match=match):
            call()
