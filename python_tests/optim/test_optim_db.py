"""The inputs with which torch tests its own optimizers: ours have the same results, states and errors."""

import copy
import warnings

import pytest
import torch
from optimizers import (
    IDS,
    KINDS,
    PAIRS,
    SHAPES,
    assert_same,
    assert_untouched,
    everything,
    give_grads,
    give_own_grads,
    give_scaled,
    make_params,
    skip_unless_torch_unscales,
    taken_by,
    through_file,
    two_groups,
)
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

from dltrain_ext import optim
from dltrain_ext.amp import LossScaler

INFOS = {info.optim_cls: info for info in optim_db}
INF, NAN = float("inf"), float("nan")
SCHEDULES = [(*kinds, index) for kinds in PAIRS for index in range(len(INFOS[kinds[1]].scheduler_inputs))]
kinds = pytest.mark.parametrize(("kind", "torchs"), PAIRS, ids=IDS)


def inputs(torchs, device):
    """Return copies of torch's options, because some contain tensors."""
    given = [item.kwargs for item in INFOS[torchs].optim_inputs_func(device=device)]
    assert len(given) >= 5
    return copy.deepcopy(given)


def both(kind, torchs, kwargs, device):
    """Make parameters and optimizer, ours and torch's."""
    result = []
    for one in (kind, torchs):
        params = make_params(SHAPES, device)
        result.append((params, one(params, **copy.deepcopy(kwargs))))
    return result


def step(pair, seeds, edit=lambda params, optimizer: None):
    for seed in seeds:
        for params, optimizer in pair:
            give_grads(params, seed)
            edit(params, optimizer)
            optimizer.step()


def check(pair, slack=1):
    (ours, optimizer), (theirs, torchs) = pair
    assert_same(ours, theirs, slack)
    for p, twin in zip(ours, theirs, strict=True):
        wanted = {key: value for key, value in torchs.state[twin].items() if value is not None}
        assert optimizer.state[p].keys() == wanted.keys()
        assert_same(optimizer.state[p].values(), [wanted[key] for key in optimizer.state[p]])


@kinds
@pytest.mark.parametrize("extra", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_like_torch(kind, torchs, extra, device):
    """The results do not depend on the implementation that is requested from torch."""
    for kwargs in inputs(torchs, device):
        ours, theirs = both(kind, torchs, kwargs, device)
        params = make_params(SHAPES, device)
        if not (extra.get("foreach") and isinstance(kwargs.get("lr"), torch.Tensor)):  # torch refuses this combination
            ours = (params, kind(params, **copy.deepcopy(kwargs), **taken_by(kind, **extra)))
        step((ours, theirs), range(7))
        check((ours, theirs))


@kinds
def test_states_go_both_ways(kind, torchs, device):
    for kwargs in inputs(torchs, device):
        pair = both(kind, torchs, kwargs, device)
        step(pair, range(3))
        states = [through_file(optimizer.state_dict()) for _, optimizer in pair]
        assert states[0]["param_groups"] == states[1]["param_groups"]
        for (_, optimizer), state in zip(pair, reversed(states), strict=True):
            optimizer.load_state_dict(state)
        step(pair, range(3, 6))
        check(pair)


@kinds
def test_continuing_from_a_file_gives_the_same_bits(kind, torchs, device):
    for kwargs in inputs(torchs, device):
        (ours, _) = both(kind, torchs, kwargs, device)
        step([ours], range(3))
        twins = [torch.nn.Parameter(p.detach().clone()) for p in ours[0]]
        restored = kind(twins)
        restored.load_state_dict(through_file(ours[1].state_dict()))
        copied = copy.deepcopy(ours)
        step([ours, (twins, restored), copied], range(3, 6))
        assert_untouched(everything(twins, restored), everything(*ours))
        assert_untouched(everything(*copied), everything(*ours))


@kinds
def test_a_state_of_an_older_torch(kind, torchs, device):
    """It lacks newer options, and its step is a plain number."""
    for kwargs in inputs(torchs, device):
        pair = both(kind, torchs, kwargs, device)
        step(pair, range(2))
        for _, optimizer in pair:
            state = copy.deepcopy(optimizer.state_dict())
            for group in state["param_groups"]:
                for name in ("maximize", "foreach", "fused", "capturable", "differentiable"):
                    group.pop(name, None)
            for entry in state["state"].values():
                if "step" in entry:
                    entry["step"] = entry["step"].item()
            optimizer.load_state_dict(state)
        step(pair, range(2, 5))
        check(pair)


@kinds
@pytest.mark.parametrize("verdict", [1.0, 2.0, float("nan")])
def test_a_step_with_found_inf_changes_nothing(kind, torchs, verdict, device):
    for kwargs in inputs(torchs, device):
        (ours, _) = both(kind, torchs, kwargs, device)
        params, optimizer = ours
        for steps in range(2):
            step([ours], range(steps))
            before = everything(*ours)
            optimizer.found_inf = torch.full((), verdict, device=device)
            optimizer.grad_scale = torch.full((), 4.0, device=device)
            step([ours], [9])
            assert_untouched(everything(*ours), before)
            del optimizer.found_inf, optimizer.grad_scale
        assert len(before) > len(params) or kind is optim.SGD


@kinds
@pytest.mark.parametrize("scaler_kind", [torch.amp.GradScaler, LossScaler])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_scaled(kind, torchs, scaler_kind, unscale_first, device):
    for kwargs in inputs(torchs, device):
        pair = both(kind, torchs, kwargs, device)
        for (params, optimizer), one in zip(pair, (scaler_kind, torch.amp.GradScaler), strict=True):
            scaler = one(device, init_scale=128.0, growth_interval=1)
            for seed in range(5):
                give_grads(params, seed)
                scale = scaler.scale(torch.ones((), device=device))
                for p in params:
                    p.grad *= float("inf") if seed in (0, 3) else scale
                if unscale_first:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            assert scaler.get_scale() == 128.0 * 2
        check(pair)


@kinds
def test_gradients_of_zero_and_missing_gradients(kind, torchs, device):
    for kwargs in inputs(torchs, device):
        kwargs["weight_decay"] = 0.0
        (ours, _) = both(kind, torchs, kwargs, device)
        params, before = [p.detach().clone() for p in ours[0]], everything(*ours)
        ours[1].step()
        assert_untouched(everything(*ours), before)
        for p in ours[0]:
            p.grad = torch.zeros_like(p)
        ours[1].step()
        assert_untouched(ours[0], params)


@kinds
def test_group_options(kind, torchs, device):
    for kwargs in inputs(torchs, device):
        pair = []
        for one in (kind, torchs):
            params = make_params(SHAPES, device)
            groups = [{"params": params[:2], "lr": 0.3}, {"params": params[2:], "weight_decay": 0.3}]
            pair.append((params, one(groups, **copy.deepcopy(kwargs))))
        step(pair, range(4))
        # Here torch computes 1 - beta2 ** step in float32, so that an update may be off by a few parts in 10^5.
        check(pair, slack=10 if kwargs.get("capturable") and device == "cuda" else 1)


@pytest.mark.parametrize(("kind", "torchs", "index"), SCHEDULES)
def test_schedules(kind, torchs, index, device):
    """If the first step is skipped, there is no warning that the scheduler was called before the optimizer."""
    is_refused = device == "cuda" and torchs is torch.optim.Adagrad
    fused = {} if is_refused else taken_by(torchs, fused=True)
    pair = both(kind, torchs, {"lr": 0.05, **fused}, device)
    for (params, optimizer), one in zip(pair, (LossScaler, torch.amp.GradScaler), strict=True):
        scaler = one(device, init_scale=4.0)
        schedulers = [make(optimizer) for make in INFOS[torchs].scheduler_inputs[index]]
        for seed in range(6):
            give_grads(params, seed)
            scale = scaler.scale(torch.ones((), device=device))
            for p in params:
                p.grad *= scale if seed else float("nan")
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "error" if one is LossScaler else "ignore", "Detected call of `lr_scheduler.step"
                )
                scaler.step(optimizer)
                scaler.update()
                for scheduler in schedulers:
                    plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                    scheduler.step(*[1.0] * plateau)
    check(pair)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@kinds
def test_errors(kind, torchs):
    """The type and the text of the errors are equal; for a duplicate parameter in a group torch only warns."""
    cases = INFOS[torchs].optim_error_inputs_func(device="cpu", dtype=torch.float32)
    assert len(cases) >= 5
    for case in cases:
        given = case.optimizer_error_input
        params = make_params([(2, 2)]) if given.params is None else given.params
        assert case.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
        error, text = (case.error_type, case.error_regex)
        if issubclass(error, Warning):
            error, text = ValueError, "expected each parameter once"
        with pytest.raises(error, match=text):
            kind(params, **given.kwargs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_scaled_step_without_any_gradient(kind, max_norm, device):
    params = make_params(SHAPES, device)
    optimizer = kind(params, lr=0.1)
    before = everything(params, optimizer)
    scaler = LossScaler(device, init_scale=8.0, growth_interval=1)
    scaler.scale(torch.ones((), device=device))
    scaler.step(optimizer, max_norm)
    scaler.update()
    assert scaler.get_scale() == 16.0
    plain = torch.amp.GradScaler(device)
    plain.scale(torch.ones((), device=device))
    plain.step(optimizer)
    assert_untouched(everything(params, optimizer), before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_grad_scale_of_the_user_is_used(kind, device):
    """GradScaler uses the product of its scale and the optimizer's grad_scale once."""
    results = []
    for one in (LossScaler, torch.amp.GradScaler):
        params = make_params(SHAPES, device)
        optimizer = kind(params, lr=0.1, **taken_by(kind, weight_decay=0.1))
        scaler = one(device, init_scale=4.0)
        scaler.scale(torch.ones((), device=device))
        optimizer.grad_scale = torch.full((), 2.0, device=device)
        for seed in range(2):
            give_grads(params, seed)
            scaler.step(optimizer)
            scaler.update()
            assert not hasattr(optimizer, "grad_scale")
        results.append(params)
    assert_same(*results)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_non_finite_element_skips_the_whole_step(kind, bad, max_norm, dtype, device):
    """The first step is skipped, and then steps between others."""
    (params, optimizer), (twins, twin) = two_groups(kind, device, dtype), two_groups(kind, device, dtype)
    scaler, other = (LossScaler(device, init_scale=4.0, min_scale=4.0) for _ in range(2))
    for seed in range(6):
        before = everything(params, optimizer)
        skipped = seed in (0, 3)
        give_scaled(params, seed, scaler, bad if skipped else None)
        grads = [p.grad.clone() for p in params]
        scaler.step(optimizer, max_norm)
        scaler.update()
        assert_untouched([p.grad for p in params], grads)
        if skipped:
            assert_untouched(everything(params, optimizer), before)
        else:
            give_scaled(twins, seed, other)
            other.step(twin, max_norm)
            other.update()
        assert_untouched(everything(params, optimizer), everything(twins, twin))
    assert (scaler.skipped_steps, other.skipped_steps) == (2, 0)
    if kind is optim.AdamW:
        assert all(optimizer.state[p]["step"] == 4 for p in params)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scaler_kind", [LossScaler, torch.amp.GradScaler])
def test_half_gradients(kind, dtype, scaler_kind, device):
    """torch refuses to unscale float16; here the results equal those without a scale, as powers of two are exact."""
    if scaler_kind is torch.amp.GradScaler and dtype == torch.bfloat16:
        skip_unless_torch_unscales(dtype, device)
    (params, optimizer), (twins, twin) = two_groups(kind, device, dtype), two_groups(kind, device, dtype)
    scaler = scaler_kind(device, init_scale=64.0, growth_interval=2)
    for seed in range(6):
        give_scaled(params, seed, scaler, INF if seed == 3 else None)
        scaler.step(optimizer)
        scaler.update()
        if seed != 3:
            give_own_grads(twins, seed)
            twin.step()
    assert_untouched(everything(params, optimizer), everything(twins, twin))
    give_scaled(params, 0, scaler)
    if dtype == torch.float16:
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            scaler.unscale_(optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_post_hook_may_change_the_parameters(dtype, device):
    params, optimizer = two_groups(optim.AdamW, device, dtype)
    give_own_grads(params, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())

    def forget(loaded):
        for state in loaded.state.values():
            state["exp_avg"] = torch.zeros_like(state["exp_avg"], dtype=torch.float32)

    optimizer.register_load_state_dict_post_hook(forget)
    optimizer.load_state_dict(saved)
    assert all(optimizer.state[p]["exp_avg"].abs().sum() == 0 for p in params)


def test_errors_name_the_wrong_dtypes(device):
    p, g, master = (torch.zeros(3, device=device, dtype=d) for d in (torch.bfloat16, torch.float16, torch.float32))
    with pytest.raises(ValueError, match="masters: expected 2 tensors, one for each of params, got 1"):
        torch.ops.dltrain_ext.sgd_([p, p.clone()], [g, g], [], [master], lr=0.1)
    with pytest.raises(TypeError, match=r"masters\[0\]: expected dtype float32, got BFloat16"):
        torch.ops.dltrain_ext.sgd_([p], [g], [], [p.clone()], lr=0.1)
    with pytest.raises(ValueError, match=r"masters\[0\]: expected shape \[3\].*, got \[1\]"):
        torch.ops.dltrain_ext.lars_([p], [g], [], [master[:1]], lr=0.1, momentum=0.0)
    with pytest.raises(TypeError, match=r"grads\[0\]: expected dtype float32, float16 or bfloat16, got Double"):
        torch.ops.dltrain_ext.sgd_([p], [g.double()], [], [], lr=0.1)
    with pytest.raises(TypeError, match=r"momentum_buffers\[0\]: expected dtype float32, got Half"):
        torch.ops.dltrain_ext.sgd_([p], [g], [g.clone()], [], lr=0.1, momentum=0.9)
    double = torch.nn.Parameter(torch.zeros(3, device=device, dtype=torch.float64))
    double.grad = torch.zeros_like(double)
    with pytest.raises(TypeError, match=r"params\[0\]: expected dtype float32, float16 or bfloat16, got Double"):
        optim.AdamW([double]).step()
