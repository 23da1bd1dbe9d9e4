"""States stored as codes of 8 bits: their size, their effect on a step, and what state_dict makes of them."""

import copy
import io

import pytest
import torch
from optimizers import give_grads, make_params, taken_by
from torch import nn

from dltrain_ext import optim
from dltrain_ext.optim.rule import RULES

CODED = [optim.AdamW, optim.Adam, optim.SGD, optim.Lion, optim.LAMB]
LARGE, SMALL = (96, 100), (7, 5)


def make(kind, params, codec="int8", **options):
    return kind(params, lr=1e-2, state_codec=codec, **taken_by(kind, momentum=0.9), **options)


def trained(kind, device, codec="int8", steps=5, shapes=(LARGE, SMALL), **options):
    params = make_params(shapes, device)
    optimizer = make(kind, params, codec, **options)
    for seed in range(steps):
        give_grads(params, seed)
        optimizer.step()
    return params, optimizer


def entries(optimizer):
    return [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]


def assert_equal_states(optimizer, other):
    for one, two in zip(entries(optimizer), entries(other), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def states_of(kind):
    return [state.key for state in RULES[kind.__name__.lower()].states if not state.optional or kind is optim.SGD]


@pytest.mark.parametrize("kind", CODED)
def test_large_states_are_codes_and_small_ones_float32(kind, device):
    _, optimizer = trained(kind, device)
    large, small = entries(optimizer)
    for key in states_of(kind):
        assert large[key].dtype == torch.uint8
        assert large[key].nbytes == 9600 + 4 * 75  # a scale for each 128 elements
        assert small[key].dtype == torch.float32 and small[key].shape == SMALL


@pytest.mark.parametrize("kind", CODED)
def test_a_step_is_near_that_in_float32(kind, device):
    start = make_params([LARGE], device)[0]
    coded, plain = (trained(kind, device, codec, steps=20)[0][0] for codec in ("int8", None))
    moved = (plain - start).norm()
    assert 0 < (coded - plain).norm() < 0.1 * moved


def test_updates_stay_bounded_where_gradients_have_unequal_scales(device):
    """A second moment that is coded as zero would divide by eps."""
    params = [nn.Parameter(torch.zeros(LARGE, device=device))]
    optimizer = optim.AdamW(params, lr=1.0, weight_decay=0.0, state_codec="int8")
    generator = torch.Generator().manual_seed(0)
    scales = torch.exp(3 * torch.randn(LARGE, generator=generator))
    for _ in range(50):
        before = params[0].detach().clone()
        params[0].grad = (scales * torch.randn(LARGE, generator=generator)).to(device)
        optimizer.step()
        assert (params[0] - before).abs().max() < 20


@pytest.mark.parametrize("kind", CODED)
def test_state_dict_is_that_of_torch(kind, device):
    params, optimizer = trained(kind, device)
    state = optimizer.state_dict()
    for p, entry in zip(params, state["state"].values(), strict=True):
        assert all(entry[key].dtype == torch.float32 and entry[key].shape == p.shape for key in states_of(kind))
    if theirs := getattr(torch.optim, kind.__name__, None):
        other = theirs(make_params([LARGE, SMALL], device), lr=1e-2)
        other.load_state_dict(state)
        give_grads(other.param_groups[0]["params"], 0)
        other.step()
    assert entries(optimizer)[0][states_of(kind)[0]].dtype == torch.uint8  # the optimizer keeps its codes


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("kind", CODED)
def test_continuing_from_a_file_gives_the_same_bits(kind, compressed, device):
    params, optimizer = trained(kind, device)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(compressed=compressed), file)
    file.seek(0)
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    twin = make(kind, twins)
    twin.load_state_dict(torch.load(file))
    assert_equal_states(optimizer, twin)
    for each, of in ((params, optimizer), (twins, twin)):
        give_grads(each, 9)
        of.step()
    assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_parameters_have_float32_masters(dtype, device):
    params = [nn.Parameter(p.detach().to(dtype)) for p in make_params([LARGE], device)]
    optimizer = make(optim.AdamW, params)
    for seed in range(3):
        params[0].grad = torch.randn(LARGE, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
        optimizer.step()
    entry = optimizer.state[params[0]]
    assert entry["exp_avg"].dtype == torch.uint8 and entry["master_param"].dtype == torch.float32
    twin = make(optim.AdamW, [nn.Parameter(params[0].detach().clone())])
    twin.load_state_dict(optimizer.state_dict(compressed=True))
    assert_equal_states(optimizer, twin)


def test_options_decide_the_form_of_a_loaded_state(device):
    """torch's float32 is encoded, and codes are decoded, where the group says so."""
    theirs = torch.optim.AdamW(make_params([LARGE, SMALL], device), lr=1e-2)
    give_grads(theirs.param_groups[0]["params"], 0)
    theirs.step()
    optimizer = make(optim.AdamW, make_params([LARGE, SMALL], device))
    optimizer.load_state_dict(theirs.state_dict())
    assert entries(optimizer)[0]["exp_avg"].dtype == torch.uint8
    saved = optimizer.state_dict(compressed=True)
    saved["param_groups"][0]["state_codec"] = None
    plain = make(optim.AdamW, make_params([LARGE, SMALL], device), None)
    plain.load_state_dict(saved)
    assert entries(plain)[0]["exp_avg"].dtype == torch.float32
    torch.testing.assert_close(plain.state_dict()["state"], optimizer.state_dict()["state"], rtol=0, atol=0)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_any_layout_of_parameter_and_gradient(memory_format, device):
    """Codes are in the order of the indices, so a parameter may change its layout between steps."""
    shape = (16, 32, 3, 3)
    plain, other = (make_params([shape], device) for _ in range(2))
    optimizers = [make(optim.AdamW, params) for params in (plain, other)]
    for seed in range(4):
        give_grads(plain, seed)
        if seed == 2:
            other[0].data = other[0].data.to(memory_format=memory_format)
        other[0].grad = plain[0].grad.clone(memory_format=memory_format)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(*(params[0].detach() for params in (plain, other)))
    assert_equal_states(*optimizers)


def test_a_number_that_is_not_finite_spoils_one_block(device):
    params = make_params([LARGE], device)
    optimizer = make(optim.AdamW, params)
    give_grads(params, 0)
    params[0].grad.view(-1)[130] = float("inf")
    optimizer.step()
    give_grads(params, 1)
    optimizer.step()
    finite = params[0].detach().view(-1).isfinite()
    assert not finite[128:256].any() and finite[:128].all() and finite[256:].all()


def test_a_copy_has_states_of_its_own(device):
    params, optimizer = trained(optim.AdamW, device)
    before = copy.deepcopy(optimizer.state_dict(compressed=True)["state"])
    _, twin = copy.deepcopy((params, optimizer))
    give_grads(twin.param_groups[0]["params"], 3)
    twin.step()
    torch.testing.assert_close(optimizer.state_dict(compressed=True)["state"], before, rtol=0, atol=0)


@pytest.mark.parametrize("codec", ["int4", 8, True, ["int8"]])
def test_an_unknown_codec_is_refused(codec):
    with pytest.raises(ValueError, match=r"state_codec: expected None or 'int8', got "):
        optim.AdamW(make_params([SMALL]), state_codec=codec)


def test_optimizers_without_codes_refuse_them():
    with pytest.raises(ValueError, match="state_codec: expected None, since the states of LARS are always float32"):
        optim.LARS([{"params": make_params([SMALL]), "state_codec": "int8"}], lr=0.1)


def test_sparse_gradients_are_refused():
    p = nn.Parameter(torch.zeros(LARGE))
    p.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 100), LARGE)
    with pytest.raises(ValueError, match=r"state_codec: expected None in the group of params\[0\].* sparse"):
        optim.SGD([p], lr=0.1, momentum=0.9, state_codec="int8").step()


def _shorten(entry):
    entry["exp_avg"] = entry["exp_avg"][:-1]


def _negate(entry):
    entry["exp_avg_sq"][:4].view(torch.float32).neg_()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_shorten, r"state\['exp_avg'\]: expected 9900 codes, got codes of shape \[9899\]"),
        (_negate, r"state\['exp_avg_sq'\]: expected no scale below 0"),
    ],
)
def test_codes_that_no_step_can_make_are_refused(spoil, message):
    _, optimizer = trained(optim.AdamW, "cpu")
    state = copy.deepcopy(optimizer.state_dict(compressed=True))
    spoil(state["state"][0])
    twin = make(optim.AdamW, make_params([LARGE, SMALL]))
    with pytest.raises(ValueError, match=message):
        twin.load_state_dict(state)
    assert not twin.state


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (torch.zeros(12, dtype=torch.uint8), r"expected codes in 9900 adjacent bytes for params\[0\]"),
        (torch.zeros(9901, dtype=torch.uint8)[1:], r"expected codes that begin at a multiple of 4 bytes, got offset 1"),
    ],
)
def test_wrong_codes_in_the_state_are_refused_by_a_step(codes, message):
    params, optimizer = trained(optim.AdamW, "cpu")
    optimizer.state[params[0]]["exp_avg"] = codes
    with pytest.raises(ValueError, match=r"exp_avgs\[0\]: " + message):
        optimizer.step()
