"""Synchronous mode: a step on the servers has the bits of an all-reduce and a local step."""

import pytest
import torch
from optimizers import KINDS, SHAPES, give_grads, make_params, taken_by, telling
from ranks import FAR, run_ranks

from dltrain_ext import comm, optim, ps
from dltrain_ext.amp import LossScaler

STEPS = 4
ON_SERVERS = [kind for kind in KINDS if kind is not optim.SGLD]
LARGE = (700, 1001)  # several blocks


def named(params):
    return [(f"p{number}", p) for number, p in enumerate(params)]


def local_step(params, optimizer, rank, step, world_size):
    give_grads(params, 1000 * step + rank)
    for p in params:
        if p.numel():
            comm.all_reduce(p.grad, "avg", algorithm="direct" if world_size > 1 else "ring")
    optimizer.step()


def steps_have_the_bits_of_an_all_reduce(rank, world_size, kind, servers, dtype):
    if servers is not None and rank >= world_size - 1 and rank in servers:
        ps.serve(timeout=FAR)
        return None
    shapes = [*SHAPES, LARGE]
    theirs = [torch.nn.Parameter(p.to(dtype)) for p in make_params(shapes)]
    ours = [torch.nn.Parameter(torch.full_like(p, float(rank)) if rank else p.detach().clone()) for p in theirs]
    options = telling(kind, lr=0.01) | taken_by(kind, max_grad_norm=None)
    reference, optimizer = kind(theirs, **options), ps.Optimizer(named(ours), kind, servers=servers, **options)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
    for step in range(STEPS):
        give_grads(ours, 1000 * step + rank)
        for p in ours:
            p.grad = p.grad.to(dtype)
        optimizer.step()
        assert optimizer.versions == (step + 1, step + 1, False)
        if servers is None:
            local_step(theirs, reference, rank, step, world_size)
            for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                assert torch.equal(a, b), (number, step, (a - b).abs().max())
    optimizer.close()
    return [p.detach() for p in ours]


@pytest.mark.parametrize("kind", ON_SERVERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_step_has_the_bits_of_an_all_reduce_and_a_local_step(world_size, kind):
    first, *others = run_ranks(world_size, steps_have_the_bits_of_an_all_reduce, kind, None, torch.float32)
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a, b)


def other_ways_have_the_same_bits(rank, world_size, servers, dtype):
    """With servers elsewhere, half parameters and groups of options, the bits are those of one process."""
    if rank in servers and rank > 0:
        return ps.serve(timeout=FAR)
    params = [torch.nn.Parameter(p.to(dtype)) for p in make_params([*SHAPES, LARGE])]
    groups = [{"params": named(params)[:3], "lr": 0.1}, {"params": named(params)[3:], "weight_decay": 0.5}]
    optimizer = ps.Optimizer(groups, optim.AdamW, servers=servers, lr=0.01)
    masters = [torch.nn.Parameter(p.detach().float()) for p in params]
    reference = optim.AdamW([{"params": masters[:3], "lr": 0.1}, {"params": masters[3:], "weight_decay": 0.5}], lr=0.01)
    for step in range(STEPS):
        give_grads(masters, step)
        for p, master in zip(params, masters, strict=True):
            p.grad = master.grad.to(dtype)
            master.grad = p.grad.float()
        for group in (*optimizer.param_groups, *reference.param_groups):
            group["lr"] *= 0.9  # a schedule
        optimizer.step()
        reference.step()
        for p, master in zip(params, masters, strict=True):
            assert torch.equal(p, master.to(dtype))
    optimizer.close()


@pytest.mark.parametrize("servers", [[0], [1], [0, 1]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_parameters_groups_and_rates(servers, dtype):
    run_ranks(1 + len([rank for rank in servers if rank > 0]), other_ways_have_the_same_bits, servers, dtype)


def layouts_and_missing_gradients(rank, world_size):
    params = make_params([(6, 4), (3, 8, 4, 4), (5,)])
    params[0] = torch.nn.Parameter(params[0].detach().t())
    params[1] = torch.nn.Parameter(params[1].detach().to(memory_format=torch.channels_last))
    reference = [torch.nn.Parameter(p.detach().clone()) for p in params]
    ours, theirs = ps.Optimizer(named(params), optim.SGD, lr=0.1), optim.SGD(reference, lr=0.1)
    give_grads(params, 3)
    give_grads(reference, 3)
    params[2].grad = None  # counts as zeros
    reference[2].grad.zero_()
    version = params[0]._version
    ours.step()
    theirs.step()
    for a, b in zip(params, reference, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()
    assert params[0]._version > version and params[2]._version > 0  # autograd notices
    ours.close()


def test_layouts_and_missing_gradients():
    run_ranks(2, layouts_and_missing_gradients)


def a_worker_overflows(rank, world_size, kind):
    params = make_params([(4, 3)])
    scaler = kind("cpu", init_scale=1024.0, growth_interval=2)
    optimizer = ps.Optimizer(named(params), optim.AdamW, scaler=scaler)
    scales, values = [], []
    for step in range(4):
        loss = (params[0] * (float("inf") if (rank, step) == (1, 1) else 1.0)).sum()
        params[0].grad = None
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        values.append(params[0].detach().clone())
    optimizer.close()
    assert torch.equal(values[0], values[1]) and not torch.equal(values[1], values[2])  # skipped on all ranks
    expected = optim.AdamW([reference := make_params([(4, 3)])[0]])
    for _ in range(3):
        reference.grad = torch.ones(4, 3)
        expected.step()
    assert torch.equal(values[3], reference)
    return scales


@pytest.mark.parametrize("kind", [LossScaler, torch.amp.GradScaler])
def test_a_step_is_skipped_on_all_workers(kind):
    first, second = run_ranks(2, a_worker_overflows, kind)
    assert first == second == [1024.0, 512.0, 512.0, 1024.0]


def not_finite_without_a_scaler(rank, world_size):
    params = make_params([(4,)])
    before = params[0].detach().clone()
    optimizer = ps.Optimizer(named(params), optim.SGD, lr=1.0, quorum=1 if world_size == 1 else "all")
    params[0].grad = torch.full((4,), torch.nan if rank == 0 else 1.0)
    optimizer.step()
    assert torch.equal(params[0], before) and optimizer.versions.skipped
    optimizer.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_that_are_not_finite_do_not_reach_the_values(world_size):
    run_ranks(world_size, not_finite_without_a_scaler)


def is_refused(rank, world_size):
    p = torch.nn.Parameter(torch.ones(2))
    for given, error, text in (
        ({"optimizer": optim.LAMB}, ValueError, "max_grad_norm: expected None"),
        ({"optimizer": optim.LARS}, TypeError, "lr: expected a number for LARS, got none"),
        ({"state_codec": "int8"}, ValueError, "state_codec: expected None, because servers keep float32"),
        ({"rounding": "stochastic"}, ValueError, "rounding: expected 'nearest', because servers keep float32"),
        ({"optimizer": torch.optim.AdamW, "quorum": 0}, ValueError, "quorum: expected 'all'"),
        ({"scaler": 1}, TypeError, "scaler: expected a GradScaler or None"),
        ({"delay_compensation": 0.1}, ValueError, "delay_compensation: expected 0 with quorum 'all'"),
    ):
        with pytest.raises(error, match=text):
            ps.Optimizer([("p", p)], **given)
    with pytest.raises(TypeError, match="named_parameters: expected"):
        ps.Optimizer([p])


def test_wrong_arguments_are_named():
    run_ranks(1, is_refused)
