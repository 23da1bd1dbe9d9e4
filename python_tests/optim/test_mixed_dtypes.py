"""Parameters and gradients of float32, float16 and bfloat16 in any mix: masters, rounding, layouts, checkpoints."""

import copy

import pytest
import torch
from optimizers import (
    OPS,
    STATES,
    assert_same_bits_for_any_number_of_threads,
    assert_untouched,
    available_bytes,
    call_op,
    everything,
    give_own_grads,
    make_params,
    op_lists,
    run_steps,
    scaled_steps,
    strided,
    through_file,
)
from properties import property_test, st
from torch import library

from dltrain_ext import optim, reference
from dltrain_ext.amp import LossScaler

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
ADAMW = (optim.AdamW, torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1})
AMSGRAD = (optim.AdamW, torch.optim.AdamW, {"lr": 0.05, "amsgrad": True})
SGD = (optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1})
PLAIN = (optim.SGD, torch.optim.SGD, {"lr": 0.1})
LARS = (optim.LARS, None, {"lr": 0.1, "weight_decay": 0.1})
kinds = pytest.mark.parametrize(("kind", "options"), [(k, o) for k, _, o in (ADAMW, AMSGRAD, SGD, PLAIN, LARS)])
halves = pytest.mark.parametrize("dtype", FLOATS[1:])
SHAPES = [(3, 5), (7,), (0, 4), (64, 33)]


def mixed_params(device, dtypes=FLOATS):
    return [torch.nn.Parameter(p.detach().to(d)) for d in dtypes for p in make_params(SHAPES, device)]


@pytest.mark.parametrize(("kind", "torchs", "options"), [ADAMW, AMSGRAD, SGD, PLAIN])
def test_one_group_against_double(kind, torchs, options, device):
    params = mixed_params(device)
    twins = [torch.nn.Parameter(p.detach().double()) for p in params]
    ours, exact = kind(params, **options), torchs(twins, **options)
    for seed in range(10):
        give_own_grads(params, seed)
        for p, twin in zip(params, twins, strict=True):
            twin.grad = p.grad.double()
        before = [p.grad.clone() for p in params]
        ours.step()
        exact.step()
        assert_untouched([p.grad for p in params], before)
        for p, twin in zip(params, twins, strict=True):
            if p.dtype == torch.float32:
                assert "master_param" not in ours.state[p]
                torch.testing.assert_close(p.detach().double(), twin.detach(), rtol=1e-5, atol=2e-6)
            else:
                master = ours.state[p]["master_param"]
                torch.testing.assert_close(master.double(), twin.detach(), rtol=1e-5, atol=2e-6)
                assert torch.equal(p, master.to(p.dtype))
            assert all(value.dtype == torch.float32 for value in ours.state[p].values())


LAYOUTS = st.sampled_from(["dense", "unaligned", "transposed", "channels_last", "gaps"])
SIZES = st.sampled_from([(0, 1, 1, 1), (1, 1, 1, 1), (7, 1, 1, 1), (2, 3, 4, 5), (4097, 1, 1, 1), (513, 19, 1, 2)])
ROWS = st.tuples(SIZES, *[st.sampled_from(FLOATS)] * 2, *[LAYOUTS] * 3)


@property_test(
    150,
    op=st.sampled_from(sorted(OPS)),
    rows=st.lists(ROWS, min_size=1, max_size=6),
    masters=st.booleans(),
    scale=st.sampled_from([None, 8.0]),
    seed=st.integers(0, 1000),
)
def test_any_dtypes_sizes_and_layouts(op, rows, masters, scale, seed, device):
    """Results are compared with fp64, and a half parameter with the float32 from which it is rounded."""
    generator = torch.Generator().manual_seed(seed)
    shapes, dtypes, grad_dtypes, layouts, grad_layouts, state_layouts = zip(*rows, strict=True)

    def tensors(dtypes, layouts):
        drawn = [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        return zip(*(strided(t.to(device), layout) for t, layout in zip(drawn, layouts, strict=True)), strict=True)

    fp32 = [torch.float32] * len(rows)
    params, memory = tensors(dtypes, layouts)
    grads, _ = tensors(grad_dtypes, grad_layouts)
    states = []
    for _ in range(STATES):
        drawn, more = tensors(fp32, state_layouts)
        states.append([t.abs_() for t in drawn])
        memory += more
    kept = [p.float() for p in params]
    if masters:
        kept, more = tensors(fp32, layouts)
        memory += more
    exact = [[t.double() for t in one] for one in (kept, grads, *states)]
    given = {} if scale is None else {"grad_scale": torch.full((), scale, device=device)}
    before = [g.clone() for g in grads]
    gaps = [m == 77.0 for m in memory]
    call_op(torch.ops.dltrain_ext, op, list(params), list(grads), states, list(kept) if masters else [], **given)
    call_op(reference, op, *exact[:2], exact[2:], [], **given)
    assert_untouched(list(grads), before)
    for m, gap in zip(memory, gaps, strict=True):
        assert (m[gap] == 77.0).all()
    for p, master, want in zip(params, kept, exact[0], strict=True):
        if masters:
            torch.testing.assert_close(master.double(), want, rtol=1e-5, atol=1e-5)
            assert torch.equal(p, master.to(p.dtype))
        else:
            ulp = 4 * 1e-6 if p.dtype == torch.float32 else 0.51 * torch.finfo(p.dtype).eps
            torch.testing.assert_close(p.double(), want, rtol=ulp, atol=1e-5)
    for ours, want in zip(states[0] + states[1], exact[2] + exact[3], strict=True):
        torch.testing.assert_close(ours.double(), want, rtol=1e-5, atol=1e-5)


@halves
def test_every_kind_of_float_is_rounded_to_nearest_even(dtype, device):
    """The step changes nothing but copies the masters; random bits include subnormal numbers, infinities and NaN."""
    bits = torch.randint(-(2**31), 2**31, (2**20,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    around = torch.arange(2**16).to(torch.int16).view(dtype).float().view(torch.int32).long()
    half = 2**12 if dtype == torch.float16 else 2**15  # ties, and the numbers next to them
    masters = torch.cat([bits, *(around + offset for offset in (0, half - 1, half, half + 1))])
    masters = masters.to(torch.int32).view(torch.float32).to(device)
    params = torch.zeros_like(masters, dtype=dtype)
    before = masters.clone()
    torch.ops.dltrain_ext.sgd_([params], [torch.zeros_like(params)], [], [masters], lr=0.0)
    assert_untouched([masters, params], [before, before.to(dtype)])


@halves
@kinds
def test_without_masters_the_parameter_is_rounded(kind, options, dtype, device):
    params = mixed_params(device, [dtype])
    twins = [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer, wide = kind(params, master_weights=False, **options), kind(twins, **options)
    for seed in range(4):
        give_own_grads(params, seed)
        for p, twin in zip(params, twins, strict=True):
            twin.grad = p.grad.float()
        optimizer.step()
        wide.step()
        for p, twin in zip(params, twins, strict=True):
            assert optimizer.state.get(p, {}).keys() == wide.state.get(twin, {}).keys()
            torch.testing.assert_close(p.float(), twin.detach(), rtol=0.51 * torch.finfo(dtype).eps, atol=1e-6)
            with torch.no_grad():
                twin.copy_(p)


@halves
def test_masters_accumulate_what_the_parameter_cannot_represent(dtype, device):
    ends = []
    for masters in ("auto", False, True):
        p = torch.nn.Parameter(torch.ones(5, dtype=dtype, device=device))
        optimizer = optim.SGD([p], lr=1e-4, master_weights=masters)
        for _ in range(1000):
            p.grad = torch.ones_like(p)
            optimizer.step()
        ends.append(p.detach().float())
    assert_untouched([ends[1], ends[0]], [torch.ones(5, device=device), ends[2]])
    torch.testing.assert_close(ends[0], torch.full((5,), 0.9, device=device), rtol=torch.finfo(dtype).eps, atol=0)


@halves
def test_groups_have_their_own_master_weights(dtype, device):
    first, second, third = (mixed_params(device, [dtype]) for _ in range(3))
    groups = [{"params": first, "master_weights": False}, {"params": second}, {"params": third, "master_weights": True}]
    optimizer = optim.AdamW(groups, master_weights=True)
    run_steps(first + second + third, optimizer, range(2))
    assert not any("master_param" in optimizer.state[p] for p in first)
    assert all("master_param" in optimizer.state[p] for p in second + third)
    optimizer.param_groups[0]["master_weights"] = True
    run_steps(first + second + third, optimizer, range(2, 4))
    assert all(torch.equal(p, optimizer.state[p]["master_param"].to(dtype)) for p in first + second + third)


def carried_by_hook(state, how, optimizer):
    """Load a state through hooks of the user."""
    if how == "pre-hook in place":
        moved = copy.deepcopy(state)
        wrong = {**state, "state": {}}
        optimizer.register_load_state_dict_pre_hook(lambda _, given: given.update(moved))
        optimizer.load_state_dict(wrong)
    elif how == "pre-hook":
        optimizer.register_load_state_dict_pre_hook(lambda _, given: given["inner"])
        optimizer.load_state_dict({"inner": copy.deepcopy(state)})
    else:
        optimizer.load_state_dict(through_file(state) if how == "file" else copy.deepcopy(state))


@halves
@pytest.mark.parametrize("how", ["file", "deepcopy", "pre-hook", "pre-hook in place"])
@pytest.mark.parametrize("master_weights", ["auto", False])
@kinds
def test_states_are_restored_bit_for_bit(kind, options, how, dtype, master_weights, device):
    """The state includes tiny moments, which float16 cannot represent."""
    params = mixed_params(device, [dtype, torch.float32])
    optimizer = kind(params, master_weights=master_weights, **options)
    run_steps(params, optimizer, range(3))
    for p in params:
        for value in optimizer.state.get(p, {}).values():
            value.mul_(1 + 1e-5).view(-1)[:1].fill_(1e-10)
    before = everything(params, optimizer)
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    twin = kind(twins, master_weights=master_weights, **options)
    carried_by_hook(optimizer.state_dict(), how, twin)
    assert_untouched(everything(twins, twin), before)
    assert all(v.dtype == torch.float32 for p in twins for v in twin.state.get(p, {}).values())
    run_steps(twins, twin, range(3, 5))
    assert_untouched(everything(params, optimizer)[: len(params)], before[: len(params)])
    run_steps(params, optimizer, range(3, 5))
    assert_untouched(everything(twins, twin), everything(params, optimizer))


@pytest.mark.parametrize(("kind", "torchs", "options"), [ADAMW, AMSGRAD, SGD])
@halves
def test_a_half_state_of_torch_can_be_continued(kind, torchs, options, dtype, device):
    """The results equal those with the same numbers in float32."""
    params = [torch.nn.Parameter(p.detach().to(dtype)) for p in make_params(SHAPES, device)]
    theirs = torchs(params, **{"eps": 1e-3, **options} if kind is optim.AdamW else options)
    run_steps(params, theirs, range(3))
    twins = [torch.nn.Parameter(p.detach().float()) for p in params]
    ours, wide = kind(params, **options), torchs(twins, **options)
    for one in (ours, wide):
        one.load_state_dict(through_file(theirs.state_dict()))
    for seed in range(3, 6):
        give_own_grads(params, seed)
        for p, twin in zip(params, twins, strict=True):
            twin.grad = p.grad.float()
        ours.step()
        wide.step()
    for p, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(ours.state[p]["master_param"], twin.detach(), rtol=1e-5, atol=1e-5)
    back = torchs(params, **options)
    back.load_state_dict(through_file(ours.state_dict()))
    run_steps(params, back, range(2))
    assert all(p.isfinite().all() for p in params)


@halves
@kinds
def test_a_deleted_master_is_made_again(kind, options, dtype, device):
    """It is made from the current parameter; the other state continues, as after an edit of the master."""
    params = mixed_params(device, [dtype])
    twins = copy.deepcopy(params)
    optimizer, twin = kind(params, **options), kind(twins, **options)
    run_steps(params, optimizer, range(3))
    run_steps(twins, twin, range(3))
    with torch.no_grad():
        for p, q in zip(params, twins, strict=True):
            p.fill_(0.3)
            q.fill_(0.3)
            del optimizer.state[p]["master_param"]
            twin.state[q]["master_param"].copy_(q)
    run_steps(params, optimizer, range(3, 5))
    run_steps(twins, twin, range(3, 5))
    for p, q in zip(params, twins, strict=True):
        assert optimizer.state[p].keys() == twin.state[q].keys()
        for key, value in twin.state[q].items():
            assert_untouched(optimizer.state[p][key], value)
    assert_untouched(params, twins)


@kinds
def test_the_same_bits_for_any_number_of_threads(kind, options):
    """Parameters, state and the norm of the gradients are compared."""
    shapes = [(700, 1001), (3,), (400_000,), (), (513, 512)]

    def run():
        params = [torch.nn.Parameter(p.detach().to(dtype)) for dtype in FLOATS for p in make_params(shapes)]
        return scaled_steps(params, kind(params, **options), give_own_grads, max_norm=0.5)

    assert_same_bits_for_any_number_of_threads(run)


def test_gradients_of_another_dtype_than_their_parameter(device):
    """autograd has to allow such gradients; the norm is tested, too."""
    params = mixed_params(device)
    scaler, optimizer = LossScaler(device, init_scale=4.0), optim.SGD(params, lr=0.5)
    scaler.scale(torch.ones((), device=device))
    before = [p.detach().double() for p in params]
    for index, p in enumerate(params):
        p.grad_dtype = None
        p.grad = torch.full(p.shape, 4.0, device=device, dtype=FLOATS[(index + 1) % 3])
    scaler.step(optimizer, max_norm=1e9)
    torch.testing.assert_close(scaler.total_norm.item(), sum(p.numel() for p in params) ** 0.5)
    for p, old in zip(params, before, strict=True):
        assert torch.equal(p, (old - 0.5).to(p.dtype))


def test_a_master_has_the_layout_of_its_parameter(device):
    values = torch.randn(2, 3, 4, 5, device=device).bfloat16().to(memory_format=torch.channels_last)
    p = torch.nn.Parameter(values)
    optimizer = optim.AdamW([p])
    p.grad = torch.ones_like(p)
    version = p._version
    optimizer.step()
    assert {value.stride() for value in optimizer.state[p].values() if value.dim()} == {p.stride()}
    assert p._version > version


@pytest.mark.parametrize("op", sorted(OPS))
def test_opcheck(op, device):
    params, grads = mixed_params(device), mixed_params(device, FLOATS[1:] + FLOATS[:1])
    params, grads = ([p.detach() for p in one] for one in (params, grads))
    states = [[p.float().abs() for p in params] for _ in range(STATES)]
    lists = op_lists(op, params, grads, states, [p.float() for p in params])
    library.opcheck(getattr(torch.ops.dltrain_ext, op), lists, OPS[op])


@pytest.mark.exhaustive
def test_more_elements_than_31_bits_count():
    if available_bytes() < 12 * 2**30:
        pytest.skip("needs 12 GiB of memory")
    numel = 2**31 + 4097
    places = [0, 1, 4096, 2**30, 2**31 - 1, 2**31, 2**31 + 1, numel - 2, numel - 1]
    p = torch.zeros(numel, dtype=torch.bfloat16)
    g = torch.ones(numel, dtype=torch.bfloat16)
    g[places] = torch.arange(1.0, 1 + len(places)).bfloat16()
    torch.ops.dltrain_ext.sgd_([p], [g], [], [], lr=0.5)
    assert p[places].tolist() == [-0.5 * (1 + index) for index in range(len(places))]
    assert (p[-5000:-4100] == -0.5).all()
    assert (p[-4000:-100] == -0.5).all()

    param = torch.nn.Parameter(p)
    param.grad = g
    scaler, optimizer = LossScaler("cpu", init_scale=1.0), optim.SGD([param], lr=0.5, master_weights=False)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer, max_norm=1e9)
    scaler.update()
    total = numel - len(places) + sum((1 + index) ** 2 for index in range(len(places)))
    torch.testing.assert_close(scaler.total_norm.item(), total**0.5, rtol=1e-7, atol=0)
    assert p[places].tolist() == [-1.0 - index for index in range(len(places))]
    g[-1] = float("nan")
    scaler.step(optimizer)
    assert scaler.skipped_steps == 1
    assert p[places].tolist() == [-1.0 - index for index in range(len(places))]


@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, 1e39), (torch.float16, 1e5)])
def test_an_initial_sum_that_the_parameters_cannot_represent_is_named(dtype, value):
    with pytest.raises(ValueError, match="initial_accumulator_value: expected one that params can represent"):
        optim.Adagrad([torch.nn.Parameter(torch.ones(3, dtype=dtype))], initial_accumulator_value=value)
