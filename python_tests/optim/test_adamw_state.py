"""optim.AdamW: its state over steps, checkpoints and copies, compared with torch.optim.AdamW."""

import copy
import io

import pytest
import torch
from optimizers import SHAPES, Pair, assert_same, assert_untouched, give_grads, make_params

from dltrain_ext import optim


def test_parameters_are_added_and_replaced(device):
    pair = Pair(device)
    pair.step()
    for params, optimizer in zip(pair.params, pair.optimizers, strict=True):
        params += make_params([(9, 2), (3,)], device, seed=5)
        optimizer.add_param_group({"params": params[-2:], "lr": 0.05})
    pair.step()
    for params, optimizer in zip(pair.params, pair.optimizers, strict=True):
        (new,) = make_params([(11,)], device, seed=6)
        optimizer.state.pop(params[1])
        params[1] = optimizer.param_groups[0]["params"][1] = new
        params[0].data = torch.ones(6, 6, device=device)[:3, :5]  # new memory with gaps
    for _ in range(3):
        pair.step()
    pair.check()


def test_state_edited_by_hand(device):
    pair = Pair(device)
    pair.step()

    def edit(params, optimizer):
        optimizer.state[params[0]]["exp_avg"] = torch.full((3, 5), 0.5, device=device)  # replaced
        optimizer.state[params[5]]["exp_avg_sq"].fill_(2.0)  # written in place
        optimizer.state[params[1]] = {
            "step": torch.tensor(9.0),
            "exp_avg": torch.ones(7, device=device),
            "exp_avg_sq": torch.ones(14, device=device)[::2],
        }
        optimizer.param_groups[0]["lr"] = 0.3

    pair.step(edit)
    pair.step()
    pair.check()


def test_amsgrad_may_be_enabled_later(device):
    pair = Pair(device)
    pair.step()
    pair.optimizers[0].param_groups[0]["amsgrad"] = True
    give_grads(pair.params[0], 1)
    pair.optimizers[0].step()
    assert "max_exp_avg_sq" in pair.optimizers[0].state[pair.params[0][0]]


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=12),  # this also changes the betas
    ],
)
@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)])
def test_schedulers(schedule, lr, device):
    pair = Pair(device, lr=lr)
    schedulers = [schedule(optimizer) for optimizer in pair.optimizers]
    for _ in range(8):
        pair.step()
        for scheduler in schedulers:
            scheduler.step()
    pair.check()


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("through_file", [True, False])
def test_state_dict_goes_both_ways(options, through_file, device):
    def carried(state_dict):
        if not through_file:
            return copy.deepcopy(state_dict)
        file = io.BytesIO()
        torch.save(state_dict, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    pair = Pair(device, **options)
    for _ in range(3):
        pair.step()
    ours, theirs = (carried(optimizer.state_dict()) for optimizer in pair.optimizers)
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    pair.optimizers[0].load_state_dict(theirs)
    pair.optimizers[1].load_state_dict(ours)
    for _ in range(3):
        pair.step()
    pair.check()


def test_state_survives_save_and_load_bit_for_bit(device):
    params = make_params(SHAPES, device)
    optimizer = optim.AdamW(params, amsgrad=True)
    for seed in range(3):
        give_grads(params, seed)
        optimizer.step()
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    restored = optim.AdamW(twins)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for optimizer_, params_ in ((optimizer, params), (restored, twins)):
        for seed in range(3, 6):
            give_grads(params_, seed)
            optimizer_.step()
    assert all(torch.equal(p, twin) for p, twin in zip(params, twins, strict=True))


def test_a_step_count_in_fp64_is_accepted(device):
    default = torch.get_default_dtype()
    params, twins = make_params([(3,)], device), make_params([(3,)], device)
    theirs = torch.optim.AdamW(twins)
    give_grads(twins, 0)
    try:
        torch.set_default_dtype(torch.float64)
        theirs.step()
    finally:
        torch.set_default_dtype(default)
    assert theirs.state[twins[0]]["step"].dtype == torch.float64
    with torch.no_grad():
        params[0].copy_(twins[0])
    ours = optim.AdamW(params)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for optimizer, held in ((ours, params), (theirs, twins)):
        give_grads(held, 1)
        optimizer.step()
    assert_same(params, twins)


def test_a_deepcopy_is_independent(device):
    params = make_params(SHAPES, device)
    optimizer = optim.AdamW(params)
    give_grads(params, 0)
    optimizer.step()
    twins, twin = copy.deepcopy((params, optimizer))
    for optimizer_, params_ in ((optimizer, params), (twin, twins)):
        give_grads(params_, 1)
        optimizer_.step()
    assert all(torch.equal(p, twin) for p, twin in zip(params, twins, strict=True))


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("fused", [None, True])
def test_grad_scaler(unscale_first, fused, device):
    results = []
    for kind in (optim.AdamW, torch.optim.AdamW):
        params = make_params([(5,), (3, 2)], device)
        optimizer = kind(params, fused=fused)
        scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=2)
        for seed in range(6):
            optimizer.zero_grad()
            weight = float("inf") if seed == 3 else 1.0 + seed
            loss = sum((p * weight).pow(2).sum() for p in params)
            scaler.scale(loss).backward()
            if unscale_first:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, 1.0)
            before = [p.grad.clone() for p in params]
            scaler.step(optimizer)
            if kind is optim.AdamW:
                assert_untouched([p.grad for p in params], before)
            scaler.update()
        assert optimizer.state[params[0]]["step"] == 5  # one of six steps is skipped
        results.append((params, scaler.get_scale()))
    assert_same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_any_nonzero_found_inf_skips_the_step(device):
    params = make_params([(3,)], device)
    optimizer = optim.AdamW(params)
    give_grads(params, 0)
    optimizer.found_inf = torch.tensor(2.0, device=device)
    optimizer.step()
    assert_same(params, make_params([(3,)], device))
    assert not optimizer.state


@pytest.mark.gpu
def test_grad_scaler_like_torch_fused():
    """found_inf stays on the device; gradients overflow in the first step, before there is a state, and later."""
    results = []
    for kind in (optim.AdamW, torch.optim.AdamW):
        params = make_params(SHAPES, "cuda")
        optimizer = kind(params, fused=True)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)
        for seed in range(7):
            give_grads(params, seed)
            scale = scaler.scale(torch.ones((), device="cuda"))
            for p in params:
                p.grad.mul_(float("inf") if seed in (0, 4) else scale)
            scaler.step(optimizer)
            scaler.update()
        results.append((params, [optimizer.state[p] for p in params], scaler.get_scale()))
    (ours, our_states, our_scale), (theirs, their_states, their_scale) = results
    assert_same(ours, theirs)
    assert our_scale == their_scale
    for state, wanted in zip(our_states, their_states, strict=True):
        assert state.keys() == wanted.keys()
        assert_same(state.values(), [wanted[key] for key in state])
        assert state["step"] == 5


@pytest.mark.gpu
def test_no_host_waits_once_the_state_exists():
    params = make_params(SHAPES, "cuda")
    optimizer = optim.AdamW(params, lr=torch.tensor(0.01, device="cuda"))
    give_grads(params, 0)
    optimizer.step()
    optimizer.grad_scale = torch.tensor(4.0, device="cuda")
    before = [p.detach().clone() for p in params]
    skip, go = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    try:
        torch.cuda.set_sync_debug_mode("error")
        optimizer.found_inf = skip
        optimizer.step()
        skipped = [p.detach().clone() for p in params]
        optimizer.found_inf = go
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(before, skipped, strict=True))
    assert not torch.equal(params[0], skipped[0])
