"""The ops of the optimizers and of clipping: the classes use them, and compiled steps contain them."""

import pytest
import torch
from optimizers import KINDS, OPS, assert_untouched, give_grads, make_params, op_lists, taken_by, telling
from torch import library

from dltrain_ext import optim, reference
from dltrain_ext.amp import LossScaler
from dltrain_ext.optim.rule import RULES

ops = torch.ops.dltrain_ext
SHAPES = [(3, 5), (7,), (64, 33)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_and_its_op_give_the_same_bits(kind, device):
    rule = RULES[kind.__name__.lower()]
    params = make_params(SHAPES, device)
    options = taken_by(kind, adapt=True, max_grad_norm=None)
    optimizer = kind(params, lr=0.1, **telling(kind, **options))
    for seed in range(2):
        give_grads(params, seed)
        optimizer.step()
    give_grads(params, 2)
    entries = [optimizer.state[p] for p in params]
    keys = [each.key for each in (*rule.states, *rule.counters)]
    lists = [[entry[key].detach().clone() for entry in entries if key in entry] for key in keys]
    values = [p.detach().clone() for p in params]
    hyper = optimizer._hyper(optimizer.param_groups[0])
    optimizer.step()
    getattr(torch.ops.dltrain_ext, f"{rule.name}_")(values, [p.grad for p in params], *lists, [], lr=0.1, **hyper)
    assert_untouched([p.detach() for p in params], values)
    for key, made in zip(keys, lists, strict=True):
        assert_untouched([entry[key] for entry in entries if key in entry], made)


@pytest.mark.parametrize("op", sorted(OPS))
def test_a_compiled_step_contains_the_op(op):
    def update(params, grads, *rest):
        grads = [2 * g for g in grads]
        getattr(torch.ops.dltrain_ext, op)(params, grads, *rest, **OPS[op])
        return [p.square().sum() for p in params]

    def run(function):
        params = [p.detach() for p in make_params(SHAPES)]
        states = [[p.abs() for p in params] for _ in range(3)]
        lists = op_lists(op, params, [p.clone() for p in params], states, [])
        return [*function(*lists), *(tensor for one in lists for tensor in one)]

    torch._dynamo.reset()
    assert_untouched(run(torch.compile(update, fullgraph=True, backend="aot_eager")), run(update))


def odd_gradients(device):
    plain = torch.randn(4, 6, 3, 5, generator=torch.Generator().manual_seed(0)).to(device)
    return [
        plain,
        plain.to(memory_format=torch.channels_last),
        plain[:, ::2],
        plain.half(),
        plain.bfloat16() * 1e30,
        torch.zeros(0, device=device),
        torch.ones((), device=device).expand(7),
    ]


def test_the_sum_of_squares_equals_the_reference(device):
    grads = odd_gradients(device)
    for some in (grads[:1], grads[1:3], grads):
        torch.testing.assert_close(ops.sum_squares(some), reference.sum_squares(some), rtol=1e-12, atol=0)
    grads[3][0, 0, 0, 0] = torch.inf
    assert not ops.sum_squares(grads).isfinite()
    library.opcheck(ops.sum_squares, (grads,))


@pytest.mark.parametrize("max_norm", [None, 0.0, 0.5, 1e9])
@pytest.mark.parametrize("total", [0.0, 36.0, 1e300, torch.inf, torch.nan])
def test_unscaling_and_clipping_equal_the_reference(total, max_norm, device):
    total = torch.tensor(total, dtype=torch.float64, device=device)
    for scale in (None, torch.tensor(4.0, device=device)):
        for flag in (None, torch.tensor([0.0], device=device), torch.tensor(2.0, device=device)):
            options = {"grad_scale": scale, "found_inf": flag, "max_norm": max_norm}
            found, expected = ops.unscale_and_clip(total, **options), reference.unscale_and_clip(total, **options)
            torch.testing.assert_close(found, expected, rtol=1e-7, atol=0, equal_nan=True)
    library.opcheck(ops.unscale_and_clip, (total,), options, test_utils=("test_schema", "test_faketensor"))


def test_a_scaled_and_clipped_step_with_ops_has_the_bits_of_the_classes(device):
    params = make_params(SHAPES, device)
    values = [p.detach().clone() for p in params]
    sums, steps = (
        [torch.zeros_like(each) for each in given] for given in (values, [torch.zeros((), device=device)] * 3)
    )
    optimizer, scaler = optim.Adagrad(params, lr=0.1), LossScaler(torch.device(device).type, init_scale=8.0)
    scale = scaler.scale(torch.ones((), device=device))
    for seed in range(3):
        give_grads(params, seed)
        grads = [p.grad.clone() for p in params]
        scaler.step(optimizer, max_norm=0.25)
        scaler.update()
        divisor, norm, skip = ops.unscale_and_clip(ops.sum_squares(grads), grad_scale=scale, max_norm=0.25)
        ops.adagrad_(values, grads, sums, steps, [], lr=0.1, grad_scale=divisor, found_inf=skip)
        assert_untouched([p.detach() for p in params], values)
        assert torch.equal(norm, scaler.total_norm)


@pytest.mark.parametrize(
    ("op", "given", "error", "says"),
    [
        (ops.sum_squares, [[torch.ones(2), torch.ones(2).double()]], TypeError, r"grads\[1\]: expected dtype float32"),
        (ops.sum_squares, [[torch.eye(2).to_sparse()]], (TypeError, NotImplementedError), r"grads\[0\]|Could not run"),
        (ops.unscale_and_clip, [torch.ones(())], ValueError, r"sum_squares: expected one float64 number"),
        (ops.unscale_and_clip, [torch.ones(2).double()], ValueError, r"sum_squares: expected one float64 number"),
    ],
)
def test_errors_for_wrong_gradients_and_numbers(op, given, error, says):
    with pytest.raises(error, match=says):
        op(*given)


def test_no_sum_of_squares_is_refused():
    for device in ("cpu", "meta"):
        with pytest.raises(TypeError, match="sum_squares: expected a tensor"):
            ops.unscale_and_clip(None, found_inf=torch.ones((), device=device))


def test_a_negative_max_norm_is_refused():
    for wrong in (-1.0, torch.nan):
        with pytest.raises(ValueError, match=r"max_norm: expected a number of at least 0, got (-1|nan)"):
            ops.unscale_and_clip(torch.ones(()).double(), max_norm=wrong)
