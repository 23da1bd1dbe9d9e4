"""optim.AdamW: errors that name the argument, and special values and types."""

import copy
import math
from decimal import Decimal

import pytest
import torch
from optimizers import ATOL, RTOL, Pair, assert_same, give_grads, make_params

from dltrain_ext import amp, optim


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_gradients_give_the_results_of_torch(value, device):
    pair = Pair(device, shapes=[(4,), (5,)], amsgrad=True)

    def spoil(params, optimizer):
        params[0].grad[1] = value

    pair.step(spoil)
    pair.step()
    for p, twin in zip(*pair.params, strict=True):
        torch.testing.assert_close(p.detach(), twin.detach(), rtol=RTOL, atol=ATOL, equal_nan=True)


BAD_STATE = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}


@pytest.mark.parametrize(
    ("error", "match", "bad"),
    [
        (
            TypeError,
            r"params\[1\]: expected dtype float32, float16 or .*Double",
            lambda: (torch.zeros(2).double(), None),
        ),
        (TypeError, r"params\[1\]: expected dtype float32, .* ComplexFloat", lambda: (torch.zeros(2) + 0j, None)),
        (
            ValueError,
            r"params\[1\]: expected a tensor on the CPU.*, got one on meta",
            lambda: (torch.zeros(2).to("meta"), None),
        ),
        (
            ValueError,
            r"exp_avg_sqs\[1\]: expected shape \[2\].*, got \[3\]",
            lambda: (torch.zeros(2), {"exp_avg_sq": torch.zeros(3)}),
        ),
        (
            TypeError,
            r"exp_avgs\[1\]: expected dtype float32, got BFloat16",
            lambda: (torch.zeros(2), {"exp_avg": torch.zeros(2).bfloat16()}),
        ),
        (TypeError, r"steps\[1\]: expected one float32 number", lambda: (torch.zeros(2), {"step": torch.zeros(2)})),
    ],
)
def test_errors_name_the_argument_and_nothing_changes(error, match, bad):
    values, state = bad()
    params = [*make_params([(4,)]), torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(values)]
    optimizer = optim.AdamW([{"params": params[:1]}, {"params": params[1:]}])
    for p in params:
        p.grad = torch.ones_like(p)
    if state is not None:
        optimizer.state[params[2]] = {**BAD_STATE, **state}
    with pytest.raises(error, match=match):
        optimizer.step()
    assert_same(params[:2], [*make_params([(4,)]), torch.ones(2)])


def test_autograd_detects_a_step_between_forward_and_backward(device):
    (p,) = make_params([(3,)], device)
    optimizer = optim.AdamW([p])
    p.grad = torch.ones(3, device=device)
    y = (p * p).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_defaults_of_dtype_and_device(dtype):
    pair = Pair(shapes=[(3,)])
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        pair.optimizers[1].state[pair.params[1][0]] = {
            "step": torch.tensor(0.0, dtype=torch.float32),
            "exp_avg": torch.zeros(3, dtype=torch.float32),
            "exp_avg_sq": torch.zeros(3, dtype=torch.float32),
        }
        for params, optimizer in zip(pair.params, pair.optimizers, strict=True):
            params[0].grad = torch.ones(3, dtype=torch.float32)
            with torch.device("meta"):
                optimizer.step()
    finally:
        torch.set_default_dtype(before)
    pair.check()


def test_lazy_gradients(device):
    for grad in (torch._neg_view(torch.ones(4, device=device)), torch._efficientzerotensor(4, device=device)):
        pair = Pair(device, shapes=[(4,)], foreach=False)
        for params, optimizer in zip(pair.params, pair.optimizers, strict=True):
            params[0].grad = grad
            optimizer.step()
        pair.check()


def test_magnitudes_near_the_ends(device):
    for betas, grads in (((0.0, 0.9), (1e4, 1e-4)), ((0.9, 0.999), (1e20, 1.0))):
        params, twins = make_params([(2,)], device), make_params([(2,)])
        ours, theirs = optim.AdamW(params, betas=betas), torch.optim.AdamW(twins, betas=betas)
        # Both use torch on the CPU: on CUDA it squares the gradient first, which overflows.
        for value in grads:
            for (p,), optimizer in ((params, ours), (twins, theirs)):
                p.grad = torch.full_like(p, value)
                optimizer.step()
        assert_same(params, twins)
        state, wanted = ours.state[params[0]], theirs.state[twins[0]]
        assert state.keys() == wanted.keys()
        assert_same(state.values(), wanted.values())
        assert state["exp_avg_sq"].isfinite().all() and state["exp_avg"].count_nonzero() == 2


def test_an_error_in_a_later_group_does_not_change_the_first(device):
    params = make_params([(3,), (3,)], device)
    optimizer = optim.AdamW([{"params": params[:1]}, {"params": params[1:]}])
    give_grads(params, 0)
    optimizer.param_groups[1]["eps"] = "x"
    with pytest.raises(TypeError, match="eps: expected a number, got 'x'"):
        optimizer.step()
    assert_same(params, make_params([(3,), (3,)], device))


def test_errors_name_what_is_not_a_tensor(device):
    (p,) = make_params([(3,)], device)
    optimizer = optim.AdamW([p])
    give_grads([p], 0)
    optimizer.step()
    optimizer.state[p]["exp_avg"] = None
    with pytest.raises(
        TypeError, match=r"state\['exp_avg'\] of a parameter of shape \[3\]: expected a tensor, got NoneType"
    ):
        optimizer.step()
    optimizer.param_groups[0]["params"].append("p")
    with pytest.raises(TypeError, match=r"params\[1\]: expected a tensor, got str"):
        optimizer.step()


def test_constructor_errors():
    params = make_params([(2,)])
    with pytest.raises(ValueError, match="differentiable: expected False, got True"):
        optim.AdamW(params, differentiable=True)
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        optim.AdamW(params, lr=-1)
    with pytest.raises(ValueError, match=r"lr: expected a number, got Decimal\('NaN'\)"):
        optim.AdamW(params, lr=Decimal("NaN"))
    with pytest.raises(TypeError, match="weight_decay: expected a number, got a tensor of torch.float8_e4m3fn"):
        optim.AdamW(params, weight_decay=torch.zeros(1, dtype=torch.float8_e4m3fn))
    for betas, got in ((0.9, "0.9"), ((0.9,), r"\(0.9,\)")):
        with pytest.raises(TypeError, match=f"betas: expected two numbers, got {got}"):
            optim.AdamW(params, betas=betas)
    with pytest.raises(TypeError, match="params: expected an iterable of tensors or of groups, got int"):
        optim.AdamW(3)
    with pytest.raises(ValueError, match="params: expected each parameter once"):
        optim.AdamW([params[0], params[0]])
    assert isinstance(optim.AdamW(params), torch.optim.AdamW)


def nest(entry, layout):
    entry["exp_avg"] = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("match", "spoil"),
    [
        (r"state\['step'\]: expected a number >= 0, got -1", lambda entry, _: entry["step"].fill_(-1)),
        (r"state\['step'\]: expected a number >= 0, got nan", lambda entry, _: entry["step"].fill_(math.nan)),
        (r"state\['exp_avg_sq'\]: expected no number below 0, got -2", lambda entry, _: entry["exp_avg_sq"].fill_(-2)),
        (r"max_exp_avg_sq'\]: expected no number below 0", lambda entry, _: entry["max_exp_avg_sq"][1].fill_(-1)),
        (r"\['exp_avg'\]: expected a plain dense tensor, got a nested", lambda entry, _: nest(entry, torch.strided)),
        (r"\['exp_avg'\]: expected a plain dense tensor, got a nested", lambda entry, _: nest(entry, torch.jagged)),
        (r"\['exp_avg'\]: expected shape \[3\], got \[1, 3\]", lambda entry, _: entry["exp_avg"].unsqueeze_(0)),
        ("lr: expected a finite number, got nan", lambda _, group: group.update(lr=math.nan)),
        ("eps: expected a finite number, got inf", lambda _, group: group.update(eps=math.inf)),
        ("betas: expected two numbers >= 0 and < 1", lambda _, group: group.update(betas=(1.0, 0.9))),
    ],
)
def test_states_that_no_step_can_make_are_refused(match, spoil, device):
    params = make_params([(3,)], device)
    optimizer = optim.AdamW(params, amsgrad=True)
    give_grads(params, 0)
    optimizer.step()
    before, spoilt = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
    spoil(spoilt["state"][0], spoilt["param_groups"][0])
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict(spoilt)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    assert_same(optimizer.state[params[0]].values(), before["state"][0].values())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_nested_state_is_refused(layout):
    params = make_params([(3,)])
    optimizer = optim.AdamW(params)
    give_grads(params, 0)
    optimizer.step()
    nest(optimizer.state[params[0]], layout)
    before = params[0].detach().clone()
    with pytest.raises(TypeError, match=r"exp_avgs\[0\]: expected a plain dense tensor, got layout"):
        optimizer.step()
    assert torch.equal(params[0], before)


def test_a_grad_scale_that_is_not_a_tensor_is_refused():
    params = make_params([(3,)])
    optimizer = optim.AdamW(params)
    give_grads(params, 0)
    optimizer.grad_scale = 2.0
    with pytest.raises(TypeError, match=r"grad_scale: expected a tensor of one number or None, got 2\.0"):
        optimizer.step()
    with pytest.raises(TypeError, match="grad_scale: expected a tensor of one number or None"):
        amp.LossScaler("cpu").step(optimizer, max_norm=1.0)
