"""Skipped steps: a batch whose gradients overflow on one rank leaves no trace."""

import math

import pytest
import torch
import torch.distributed as dist
from contributions import same_everywhere
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import codecs, ddp, optim
from dltrain_ext.amp import LossScaler

NAN, INF = math.nan, math.inf


SIZES = (50, 77, 65, 80, 20, 7)  # weights with odd numbers of elements, the last ones small


class Net(nn.Module):
    """The layers are not used in the order of their definition, so DDP's second buckets differ from the first."""

    def __init__(self):
        super().__init__()
        for i in (3, 0, 4, 2, 1):
            self.add_module(str(i), nn.Linear(*SIZES[i : i + 2]))

    def forward(self, x):
        for i in range(5):
            x = torch.tanh(self.get_submodule(str(i))(x))
        return x


def make(bucket_kib=16, **options):
    torch.manual_seed(0)
    return DistributedDataParallel(Net(), bucket_cap_mb=bucket_kib / 1024, **options)


def batch(rank, number):
    return torch.randn(4, 50, generator=torch.Generator().manual_seed(10 * number + rank))


class Spoiler:
    """Puts a number that is not finite into this rank's gradient of one parameter, on request."""

    def __init__(self, parameter):
        self.number = None
        parameter.register_hook(self)

    def __call__(self, gradient):
        if self.number is None:
            return None
        gradient = gradient.clone()
        gradient.view(-1)[gradient.numel() // 2] = self.number
        return gradient


def backward(model, scaler, x):
    model.zero_grad()
    scaler.scale((model(x) - 0.3).square().sum()).backward()


def residuals(state):
    (found,) = state.state_dict()["feedback"].values()
    return list(found.values())


def parameters(model):
    return [p.detach().clone() for p in model.parameters()]


def same(ours, theirs):
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def fused_step(scaler, optimizer, state):
    scaler.step(optimizer, max_norm=1.0, grad_stats=state.grad_stats)


def torch_step(scaler, optimizer, state):
    scaler.step(optimizer)


def train(
    rank,
    world_size,
    batches,
    bad=None,
    spoilt="2.weight",
    watch=False,
    looks=False,
    scale=2.0**12,
    scaler=LossScaler,
    optimizer=optim.AdamW,
    step=fused_step,
    growth_interval=2000,
    enabled=True,
    options=None,
    **hook,
):
    """Return the final parameters and residuals; `bad` says which batches overflow on the last rank, and how."""
    bad = bad or {}
    model = make(**(options or {}))
    scaler = scaler("cpu", init_scale=scale, growth_interval=growth_interval, enabled=enabled)
    state = ddp.register(model, scaler=scaler, **hook)
    optimizer = optimizer(model.parameters(), lr=0.01)
    spoiler = Spoiler(model.module.get_parameter(spoilt))
    if looks:
        model.module.get_parameter("0.bias").register_hook(lambda _: state.stats() and None)
    for number in batches:
        before = (parameters(model), residuals(state)) if watch else None
        spoiler.number = bad.get(number) if rank == world_size - 1 else None
        backward(model, scaler, batch(rank, number))
        step(scaler, optimizer, state)
        scaler.update()
        if watch:
            assert same(parameters(model), before[0]) == (number in bad), number
            assert same(residuals(state), before[1]) == (number in bad), number
    if enabled and growth_interval > len(batches):
        assert scaler.get_scale() == scale / 2 ** len(bad)
    if isinstance(scaler, LossScaler):
        assert scaler.skipped_steps == len(bad)
    assert all(same_everywhere(p.detach()) for p in model.parameters())
    return parameters(model), residuals(state)


def check_skipped(rank, world_size, cases):
    for bad, options in cases:
        without = [number for number in range(6) if number not in bad]
        expected = train(rank, world_size, without, **options)
        assert any(r.any() for r in expected[1])
        for watch in (False, True):
            found = train(rank, world_size, range(6), bad, watch=watch, **options)
            assert same(found[0], expected[0]) and same(found[1], expected[1]), (bad, options, watch)


ONE, TWO = {2: NAN}, {2: NAN, 3: INF}
CASES = [
    (ONE, {}),
    (TWO, {}),
    ({0: NAN}, {}),
    ({0: INF, 1: NAN, 4: NAN}, {"codec": "int4"}),
    (TWO, {"codec": "int4", "feedback_dtype": "bf16"}),
    ({0: NAN, 3: INF}, {"feedback_dtype": "bf16", "algorithm": "ring"}),
    ({1: INF}, {"spoilt": "0.bias", "options": {"gradient_as_bucket_view": True}}),  # sent as fp32
    ({0: NAN, 5: NAN}, {"spoilt": "4.weight", "options": {"static_graph": True}}),
]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_skipped_batch_is_as_if_it_had_not_been(world_size):
    run_ranks(world_size, check_skipped, CASES)


def test_two_levels():
    run_ranks(4, check_skipped, [(TWO, {"ranks_per_host": 2})])  # not the first case, as buckets matter with two levels


GRAD_SCALER = {"scaler": torch.amp.GradScaler, "step": torch_step}


def test_with_optimizers_and_scalers_of_torch():
    cases = [
        (TWO, {**GRAD_SCALER, "optimizer": torch.optim.AdamW}),
        ({0: INF}, {**GRAD_SCALER, "codec": "int4", "options": {"gradient_as_bucket_view": True}}),
        (ONE, {"optimizer": torch.optim.AdamW}),
    ]
    run_ranks(2, check_skipped, cases)


def check_grad_stats(rank, world_size):
    # With find_unused_parameters, DDP keeps its first buckets.
    models, found = [make(), make(bucket_kib=1 << 20), make(find_unused_parameters=True)], []
    scaler = LossScaler("cpu", init_scale=8.0)
    states = [ddp.register(model, scaler=scaler) for model in models]
    with pytest.raises(RuntimeError, match="grad_stats: expected a backward pass first"):
        _ = states[0].grad_stats
    for number in range(5):
        for model, state in zip(models, states, strict=True):
            backward(model, scaler, batch(rank, number))
            stats = state.grad_stats
            exact = math.fsum(float(p.grad.double().square().sum()) for p in model.parameters())
            assert stats.sum_squares.dtype == torch.float64 and stats.found_inf is None
            assert stats.sum_squares.item() == pytest.approx(exact, rel=1e-12)
            found.append(stats.sum_squares.item())
    assert found[0::3] == found[1::3] == found[2::3]  # the buckets do not matter

    runs = []
    for gives in (True, False):
        model, scaler = make(), LossScaler("cpu", init_scale=8.0)
        state = ddp.register(model, scaler=scaler)
        optimizer, norms = optim.AdamW(model.parameters(), lr=0.01), []
        for number in range(3):
            backward(model, scaler, batch(rank, number))
            scaler.step(optimizer, max_norm=1.0, grad_stats=state.grad_stats if gives else None)
            norms.append(scaler.total_norm.item())
            scaler.update()
        runs.append((parameters(model), norms))
    assert min(runs[0][1]) > 1  # so that they are clipped
    assert runs[0][1] == pytest.approx(runs[1][1], rel=1e-6)
    for ours, theirs in zip(runs[0][0], runs[1][0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_grad_stats():
    run_ranks(2, check_grad_stats)


def check_scales(rank, world_size):
    for codec in ("int8", "int4"):
        runs = [
            train(rank, world_size, range(6), codec=codec, scale=scale, growth_interval=2)
            for scale in (2.0**10, 2.0**4)
        ]
        runs.append(train(rank, world_size, range(6), codec=codec))
        runs.append(train(rank, world_size, range(6), codec=codec, enabled=False))
        for found in runs[1:]:
            assert same(found[0], runs[0][0]) and same(found[1], runs[0][1])


def test_residuals_do_not_change_with_the_scale():
    run_ranks(2, check_scales)


def check_bound(rank, world_size):
    for codec in ("int8", "int4"):
        model, scaler = make(), LossScaler("cpu", init_scale=2.0**12)
        state = ddp.register(model, codec=codec, scaler=scaler)
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        spoiler = Spoiler(model.module.get_parameter("2.weight"))
        largest = [torch.zeros(()) for _ in model.parameters()]
        for number in range(8):
            spoiler.number = NAN if number in (3, 6) and rank == 0 else None
            x = batch(rank, number)
            own = torch.autograd.grad((model.module(x) - 0.3).square().sum(), [*model.parameters()])
            backward(model, scaler, x)
            if number not in (3, 6):
                for most, gradient in zip(largest, own, strict=True):
                    torch.maximum(most, gradient.abs().max(), out=most)
            for most, lost in zip(largest, residuals(state), strict=True):
                bound = most.clone()
                dist.all_reduce(bound, dist.ReduceOp.MAX)
                # Relative to the sum of all ranks' shards and the previous residual.
                assert lost.abs().max() <= 1.5 * codecs.error_bound(codec).max * bound, (codec, number)
            fused_step(scaler, optimizer, state)
            scaler.update()


def test_residuals_stay_within_the_bound():
    run_ranks(2, check_bound)


def check_stats_within_backward(rank, world_size):
    expected = train(rank, world_size, range(6), ONE)
    found = train(rank, world_size, range(6), ONE, looks=True)
    assert same(found[0], expected[0]) and same(found[1], expected[1])


def test_stats_within_backward_change_nothing():
    run_ranks(2, check_stats_within_backward)


def check_without_scaler(rank, world_size):
    model = make()
    state = ddp.register(model, codec="int8")
    spoiler = Spoiler(model.module.get_parameter("2.weight"))
    for number in range(4):
        spoiler.number = NAN if number in (0, 2) and rank == 1 else None
        model.zero_grad()
        model(batch(rank, number)).square().sum().backward()
        assert all(lost.isfinite().all() for lost in residuals(state))
        spoilt = [not p.grad.isfinite().all() for p in model.parameters()]
        assert sum(spoilt) == (number in (0, 2))


def test_without_a_scaler_an_overflow_does_not_affect_the_next_batch():
    run_ranks(2, check_without_scaler)


def check_join(rank, world_size, batches, bad):
    model, scaler = make(), LossScaler("cpu", init_scale=2.0**12)
    state = ddp.register(model, codec="int4", scaler=scaler)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    spoiler = Spoiler(model.module.get_parameter("2.weight"))
    at_the_end = residuals(state)
    with model.join():
        for number in range(batches[rank]):
            spoiler.number = NAN if number in bad and rank == 0 else None
            backward(model, scaler, batch(rank, number))
            fused_step(scaler, optimizer, state)
            scaler.update()
            at_the_end = residuals(state)
    assert all(same_everywhere(p.detach()) for p in model.parameters())
    assert rank > 0 or scaler.skipped_steps == len(bad)
    assert same(residuals(state), at_the_end), "a rank that has joined keeps its residuals"
    assert rank > 0 or any(lost.any() for lost in at_the_end)


CASES_OF_JOIN = {"before": ((6, 3), (1,)), "after": ((6, 3), (4,)), "never there": ((4, 0), ())}


@pytest.mark.parametrize(("batches", "bad"), CASES_OF_JOIN.values(), ids=CASES_OF_JOIN)
def test_ranks_that_have_joined(batches, bad):
    """A step is skipped before or after a rank has joined, whose loss scale does not change; or a rank has no batch."""
    run_ranks(2, check_join, batches, bad)
