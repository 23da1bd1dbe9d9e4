"""Groups of hundreds of parameters, which several threads read; some of them need Python code to be read."""

import copy
import weakref
from typing import ClassVar

import pytest
import torch
from optimizers import (
    KINDS,
    PAIRS,
    assert_same,
    assert_same_bits_for_any_number_of_threads,
    assert_untouched,
    everything,
    scaled_steps,
    telling,
    through_file,
)
from ranks import run_ranks

from dltrain_ext import optim

COUNT = 700  # more than the parts of two threads
VARIANTS = [(*pair, options) for pair in PAIRS for options in ({}, telling(pair[0]))]
VARIANTS.append((optim.AdamW, torch.optim.AdamW, {"amsgrad": True}))


def make(kind, device, dtype=torch.float32, **options):
    """Make parameters, of which every third has the dtype."""
    random = torch.Generator().manual_seed(0)
    params = []
    for i in range(COUNT):
        value = torch.randn([(), (7,), (3, 5), (0,), (2, 3, 4)][i % 5], generator=random)
        params.append(torch.nn.Parameter(value.to(device, torch.float32 if i % 3 else dtype)))
    return params, kind(params, lr=0.01, **options)


def give(params, seed):
    """Set gradients: every 13th is missing, every 11th is strided, and every 7th is lazily negated."""
    random = torch.Generator().manual_seed(seed)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=random).to(p)
        if i % 11 == 0:
            grad = torch.stack([grad, grad], -1)[..., 0]
        if i % 7 == 0:
            grad = torch._neg_view(grad)
        p.grad = None if (i + seed) % 13 == 0 else grad


@pytest.mark.parametrize(("kind", "torchs", "options"), VARIANTS)
def test_like_torch(kind, torchs, options, device):
    (params, optimizer), (twins, twin) = make(kind, device, **options), make(torchs, device, **options)
    initial = [copy.deepcopy(twin.state.get(q, {})) for q in twins]  # torch's Adagrad before 2.13 adds it only here
    for seed in range(5):
        give(params, seed)
        for p, q in zip(params, twins, strict=True):
            q.grad = None if p.grad is None else p.grad.resolve_neg().clone()
        optimizer.step()
        twin.step()
        assert_same(params, twins)
        # State may be added or removed between the steps.
        for state in (optimizer.state[params[seed]], twin.state[twins[seed]]):
            state.clear()
        twin.state[twins[seed]].update(initial[seed])
        if seed == 2:
            # These keys are equal to ours, but are not the same objects.
            optimizer.load_state_dict(through_file(optimizer.state_dict()))
    for p, q in zip(params, twins, strict=True):
        assert_same(optimizer.state[p].values(), [twin.state[q][key] for key in optimizer.state[p]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_same_bits_for_any_number_of_threads(kind, dtype):
    def run():
        return scaled_steps(*make(kind, "cpu", dtype), give, max_norm=0.1)

    assert_same_bits_for_any_number_of_threads(run)


@pytest.mark.parametrize("index", [0, 300, COUNT - 1])
def test_an_error_names_the_parameter_and_changes_none(index, device):
    params, optimizer = make(optim.AdamW, device)
    give(params, 1)
    params[index].grad = torch.zeros_like(params[index])
    optimizer.step()
    before = everything(params, optimizer)
    optimizer.state[params[index]]["exp_avg"] = torch.zeros(99, device=device)
    with pytest.raises(ValueError, match=rf"exp_avgs\[{index}\]: expected shape"):
        optimizer.step()
    optimizer.state[params[index]]["exp_avg"] = torch.zeros_like(params[index])
    assert_untouched(params, before[:COUNT])


def test_copies_on_write_are_made_once():
    """All step counts share one storage; requesting its memory would copy it, in two threads at the same time."""
    (params, optimizer), (twins, twin) = make(optim.AdamW, "cpu"), make(optim.AdamW, "cpu")
    for seed in range(3):
        give(params, seed)
        give(twins, seed)
        lazy = [torch._lazy_clone(state[key]) for state in optimizer.state.values() for key in state]
        kept = [tensor.clone() for tensor in lazy]
        optimizer.step()
        twin.step()
        assert_untouched(lazy, kept)
    assert_untouched(everything(params, optimizer), everything(twins, twin))


class Hashed(torch.nn.Parameter):
    """A parameter with its own hash function, which may run other code."""

    def __hash__(self):
        for state in Hashed.states:
            state.clear()
        return 7

    __eq__ = object.__eq__
    states: ClassVar[list[dict]] = []


def test_a_parameter_with_its_own_hash():
    params, _ = make(optim.SGD, "cpu")
    params[COUNT // 2] = Hashed(torch.ones(3))
    optimizer = optim.SGD(params, lr=1.0, momentum=0.9)
    for seed in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        Hashed.states = list(optimizer.state.values())[:5] if seed == 2 else []
        optimizer.step()
    assert torch.equal(params[COUNT // 2], torch.full((3,), 1.0 - 1.0 - 1.9 - 2.71))


def test_state_that_has_been_read_is_kept_until_the_step_is_done():
    """Another thread may delete it meanwhile, also that of parameters with their own hash."""
    params = [kind(torch.ones(3)) for kind in (torch.nn.Parameter, Hashed) for _ in range(20)]
    Hashed.states = []
    optimizer = optim.SGD(params, lr=1.0, momentum=0.9)
    lives = []

    def judge(groups):
        kept = [weakref.ref(state["momentum_buffer"]) for state in optimizer.state.values()]
        for state in optimizer.state.values():
            state.clear()
        lives.extend(ref() is not None for ref in kept)
        return optimizer._unscale(groups)

    for optimizer.unscaler in (None, judge):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert lives == [True] * len(params)


def test_errors_name_what_is_not_a_tensor():
    _, optimizer = make(optim.SGD, "cpu")
    optimizer.param_groups[0]["params"][1] = [1.0]
    with pytest.raises(TypeError, match=r"params\[1\]: expected a tensor, got list"):
        optimizer.step()


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, dispatch_sizes_strides_policy="sizes", dispatch_device=True
        )

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return torch.device("cpu") if function is torch.ops.prim.device.default else NotImplemented


def ask_python(rank, world_size):
    torch.set_num_threads(2)
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(1024)]
    for p in params:
        p.grad = torch.ones(4)
    optimizer = optim.AdamW(params)
    optimizer.step()
    optimizer.state[params[1000]]["exp_avg"] = Wrapper(torch.ones(4))
    with pytest.raises((TypeError, ValueError), match=r"exp_avgs\[1000\]: expected"):
        optimizer.step()


def test_a_tensor_with_a_size_in_python_does_not_deadlock():
    """This runs in a process of its own, which can be killed."""
    run_ranks(1, ask_python, fresh=True, timeout=600)
