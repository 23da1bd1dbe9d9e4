"""optim.AdamW: the arithmetic against fp64, the manners against torch.optim.AdamW."""

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dltrain_ext import _ops, optim, reference

RTOL, ATOL = 2e-5, 2e-6  # of torch's own fp32 variants among each other, over tens of steps


def make_params(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give_grads(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


def assert_untouched(grads, before):
    torch.testing.assert_close(grads, before, rtol=0, atol=0, equal_nan=True)


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=RTOL, atol=ATOL)


SHAPES = [(3, 5), (7,), (), (1, 1, 2), (0, 4), (64, 33)]


class Pair:
    """Our optimizer and torch's, on parameters of their own with the same values and gradients."""

    def __init__(self, shapes=SHAPES, groups=lambda params: params, **options):
        self.params = [make_params(shapes), make_params(shapes)]
        self.optimizers = [
            kind(groups(params), **options)
            for kind, params in zip((optim.AdamW, torch.optim.AdamW), self.params, strict=True)
        ]
        self.seed = 0

    def step(self, edit=lambda params, optimizer: None):
        self.seed += 1
        for params, optimizer in zip(self.params, self.optimizers, strict=True):
            give_grads(params, self.seed)
            edit(params, optimizer)
            before = [p.grad.clone() for p in params if p.grad is not None]
            optimizer.step()
            assert_untouched([p.grad for p in params if p.grad is not None], before)

    def check(self):
        assert_same(*self.params)
        ours, theirs = (
            [optimizer.state.get(p, {}) for p in params]
            for params, optimizer in zip(self.params, self.optimizers, strict=True)
        )
        for a, b in zip(ours, theirs, strict=True):
            assert a.keys() == b.keys()
            for key in a:
                torch.testing.assert_close(a[key], b[key], rtol=RTOL, atol=ATOL)


OPTIONS = [
    {},
    {"lr": 0.1, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.3},
    {"weight_decay": 0.0},
    {"maximize": True},
    {"amsgrad": True},
    {"amsgrad": True, "maximize": True, "weight_decay": 0.1},
    {"lr": torch.tensor(0.01)},
    {"foreach": True},
    {"fused": True},
    {"betas": (0.0, 0.0)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_like_torch(options):
    pair = Pair(**options)
    for _ in range(20):
        pair.step()
    pair.check()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_against_double(options):
    params = make_params(SHAPES)
    optimizer = optim.AdamW(params, **options)
    group = optimizer.param_groups[0]
    exact = [p.detach().double() for p in params]
    moments = [[torch.zeros_like(p) for p in exact] for _ in range(3 if group["amsgrad"] else 2)]
    steps = [torch.zeros((), dtype=torch.float64) for _ in exact]
    for seed in range(10):
        give_grads(params, seed)
        optimizer.step()
        reference.adamw_(
            exact,
            [p.grad.double() for p in params],
            moments[0],
            moments[1],
            moments[2] if group["amsgrad"] else [],
            steps,
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
        )
    for p, want in zip(params, exact, strict=True):
        torch.testing.assert_close(p.detach().double(), want, rtol=1e-5, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=8),
    offset=st.integers(0, 3),
    lr=st.floats(1e-5, 0.5),
    beta1=st.floats(0, 0.99),
    beta2=st.floats(0, 0.9999),
    weight_decay=st.floats(0, 1),
    scale=st.sampled_from([1e-18, 1e-8, 1.0, 1e6]),
    seed=st.integers(0, 1000),
)
def test_any_sizes_alignments_and_magnitudes(sizes, offset, lr, beta1, beta2, weight_decay, scale, seed):
    generator = torch.Generator().manual_seed(seed)

    def unaligned(size):
        return torch.randn(size + offset, generator=generator)[offset:]

    params = [torch.nn.Parameter(unaligned(size)) for size in sizes]
    for p in params:
        p.grad = unaligned(p.numel()) * scale
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    for p, twin in zip(params, twins, strict=True):
        twin.grad = p.grad.clone()
    options = {"lr": lr, "betas": (beta1, beta2), "weight_decay": weight_decay}
    ours, theirs = optim.AdamW(params, **options), torch.optim.AdamW(twins, **options)
    for _ in range(3):
        ours.step()
        theirs.step()
    for p, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(p.detach(), twin.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_gradients_go_where_torch_lets_them(value):
    pair = Pair(shapes=[(4,), (5,)], amsgrad=True)

    def spoil(params, optimizer):
        params[0].grad[1] = value

    pair.step(spoil)
    pair.step()
    for p, twin in zip(*pair.params, strict=True):
        torch.testing.assert_close(p.detach(), twin.detach(), rtol=RTOL, atol=ATOL, equal_nan=True)


def test_groups_have_their_own_options():
    pair = Pair(
        groups=lambda params: [
            {"params": params[:2], "lr": 0.1},
            {"params": params[2:4], "weight_decay": 0.5, "amsgrad": True},
            {"params": params[4:], "betas": (0.8, 0.9), "maximize": True},
        ]
    )
    for _ in range(5):
        pair.step()
    pair.check()


def test_parameters_without_gradient_are_passed_over():
    pair = Pair()

    def sometimes(params, optimizer):
        params[pair.seed % 3].grad = None
        params[5].grad = None

    for _ in range(7):
        pair.step(sometimes)
    pair.check()
    assert pair.params[0][5] not in pair.optimizers[0].state


def test_no_gradient_at_all():
    params = make_params(SHAPES)
    optimizer = optim.AdamW(params)
    optimizer.step()
    assert_same(params, make_params(SHAPES))
    assert not optimizer.state


def test_layouts():
    dense = torch.arange(24.0).reshape(2, 3, 4)
    layouts = [
        lambda t: t.permute(2, 0, 1),
        lambda t: torch.stack([t, t], -1)[..., 0],
        lambda t: t.contiguous(memory_format=torch.channels_last),
        lambda t: t[:, ::2],
    ]
    sources = [dense, dense, dense.reshape(1, 2, 3, 4), dense]
    for param_of in (True, False):
        for source, layout in zip(sources, layouts, strict=True):
            both = []
            for kind in (optim.AdamW, torch.optim.AdamW):
                values = layout(source.clone())
                p = torch.nn.Parameter(values if param_of else values.contiguous())
                assert p.stride() == (values if param_of else values.contiguous()).stride()
                p.grad = (values.detach() / 7 - 1).clone(memory_format=torch.contiguous_format)
                if not param_of:
                    p.grad = torch.stack([p.grad, p.grad], -1)[..., 0]
                optimizer = kind([p], lr=0.1)
                for _ in range(3):
                    optimizer.step()
                both.append(p)
            assert_same(both[:1], both[1:])


def test_parameters_come_and_are_replaced():
    pair = Pair()
    pair.step()
    for params, optimizer in zip(pair.params, pair.optimizers, strict=True):
        params += make_params([(9, 2), (3,)], seed=5)
        optimizer.add_param_group({"params": params[-2:], "lr": 0.05})
    pair.step()
    for params, optimizer in zip(pair.params, pair.optimizers, strict=True):
        (new,) = make_params([(11,)], seed=6)
        optimizer.state.pop(params[1])
        params[1] = optimizer.param_groups[0]["params"][1] = new
        params[0].data = torch.ones(6, 6)[:3, :5]  # new memory, holes in it
    for _ in range(3):
        pair.step()
    pair.check()


def test_state_edited_by_hand():
    pair = Pair()
    pair.step()

    def edit(params, optimizer):
        optimizer.state[params[0]]["exp_avg"] = torch.full((3, 5), 0.5)  # replaced
        optimizer.state[params[5]]["exp_avg_sq"].fill_(2.0)  # written into
        optimizer.state[params[1]] = {
            "step": torch.tensor(9.0),
            "exp_avg": torch.ones(7),
            "exp_avg_sq": torch.ones(14)[::2],
        }
        optimizer.param_groups[0]["lr"] = 0.3

    pair.step(edit)
    pair.step()
    pair.check()


def test_amsgrad_switched_on_later():
    pair = Pair()
    pair.step()
    pair.optimizers[0].param_groups[0]["amsgrad"] = True
    give_grads(pair.params[0], 1)
    pair.optimizers[0].step()
    assert "max_exp_avg_sq" in pair.optimizers[0].state[pair.params[0][0]]


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=12),  # turns the betas too
    ],
)
@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)])
def test_schedulers(schedule, lr):
    pair = Pair(lr=lr)
    schedulers = [schedule(optimizer) for optimizer in pair.optimizers]
    for _ in range(8):
        pair.step()
        for scheduler in schedulers:
            scheduler.step()
    pair.check()


def test_closure_and_hooks():
    (p,) = make_params([(4,)])
    optimizer = optim.AdamW([p])
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure():
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    before = (p.detach() ** 2).sum()
    assert optimizer.step(closure) == before
    assert (p.detach() ** 2).sum() < before
    assert seen == ["before", "after"]


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("through_file", [True, False])
def test_state_dict_goes_both_ways(options, through_file):
    def carried(state_dict):
        if not through_file:
            return copy.deepcopy(state_dict)
        file = io.BytesIO()
        torch.save(state_dict, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    pair = Pair(**options)
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


def test_state_survives_save_and_load_bit_for_bit():
    params = make_params(SHAPES)
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


def test_a_double_step_count_is_taken():
    default = torch.get_default_dtype()
    params, twins = make_params([(3,)]), make_params([(3,)])
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


def test_deepcopy_goes_on_by_itself():
    params = make_params(SHAPES)
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
def test_grad_scaler(unscale_first, fused):
    results = []
    for kind in (optim.AdamW, torch.optim.AdamW):
        params = make_params([(5,), (3, 2)])
        optimizer = kind(params, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
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
        assert optimizer.state[params[0]]["step"] == 5  # one of six was skipped
        results.append((params, scaler.get_scale()))
    assert_same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_any_found_inf_but_zero_skips():
    params = make_params([(3,)])
    optimizer = optim.AdamW(params)
    give_grads(params, 0)
    optimizer.found_inf = torch.tensor(2.0)
    optimizer.step()
    assert_same(params, make_params([(3,)]))
    assert not optimizer.state


def test_the_same_bits_for_any_number_of_threads():
    results = []
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            params = make_params([(700_001,), (3,), (400_000,)])
            optimizer = optim.AdamW(params)
            for seed in range(3):
                give_grads(params, seed)
                optimizer.step()
            results.append(params)
    finally:
        torch.set_num_threads(threads)
    for params in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], params, strict=True))


BAD_STATE = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}


@pytest.mark.parametrize(
    ("error", "match", "bad"),
    [
        (TypeError, r"params\[1\]: expected dtype float32, got Half", lambda: (torch.zeros(2).half(), None)),
        (TypeError, r"params\[1\]: expected dtype float32, got Double", lambda: (torch.zeros(2).double(), None)),
        (TypeError, r"params\[1\]: expected dtype float32, got ComplexFloat", lambda: (torch.zeros(2) + 0j, None)),
        (
            ValueError,
            r"params\[1\]: expected a tensor on the CPU, got one on meta",
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
def test_what_does_not_fit_is_named_and_nothing_changes(error, match, bad):
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


def test_autograd_notices_a_step_between_forward_and_backward():
    (p,) = make_params([(3,)])
    optimizer = optim.AdamW([p])
    p.grad = torch.ones(3)
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


def test_lazy_gradients():
    for grad in (torch._neg_view(torch.ones(4)), torch._efficientzerotensor(4)):
        pair = Pair(shapes=[(4,)])
        for params, optimizer in zip(pair.params, pair.optimizers, strict=True):
            params[0].grad = grad
            optimizer.step()
        pair.check()


def test_magnitudes_near_the_ends():
    for betas, grads in (((0.0, 0.9), (1e4, 1e-4)), ((0.9, 0.999), (1e20, 1.0))):
        pair = Pair(shapes=[(2,)], betas=betas)
        for value in grads:
            for params, optimizer in zip(pair.params, pair.optimizers, strict=True):
                params[0].grad = torch.full((2,), value)
                optimizer.step()
        pair.check()
        state = pair.optimizers[0].state[pair.params[0][0]]
        assert state["exp_avg_sq"].isfinite().all() and state["exp_avg"].count_nonzero() == 2


def test_an_error_in_a_later_group_leaves_the_first_as_it_was():
    params = make_params([(3,), (3,)])
    optimizer = optim.AdamW([{"params": params[:1]}, {"params": params[1:]}])
    give_grads(params, 0)
    optimizer.param_groups[1]["eps"] = "x"
    with pytest.raises(ValueError, match="could not convert string to float"):
        optimizer.step()
    assert_same(params, make_params([(3,), (3,)]))


def test_what_is_no_tensor_is_named():
    (p,) = make_params([(3,)])
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


def test_sparse_gradients_are_refused():
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match=r"grads\[0\]: expected a plain dense tensor, got layout Sparse"):
        optim.AdamW(embedding.parameters()).step()


def test_constructor_errors():
    params = make_params([(2,)])
    with pytest.raises(ValueError, match="differentiable: expected False, got True"):
        optim.AdamW(params, differentiable=True)
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        optim.AdamW(params, lr=-1)
    with pytest.raises(ValueError, match="params: expected each parameter once"):
        optim.AdamW([params[0], params[0]])
    assert isinstance(optim.AdamW(params), torch.optim.AdamW)


def op_arguments(amsgrad=False):
    shapes = [(3, 4), (5,), (0,)]
    params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs = (
        [p.detach().abs() for p in make_params(shapes, seed)] for seed in range(5)
    )
    steps = [torch.tensor(float(i)) for i in range(3)]
    lists = [params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs if amsgrad else [], steps]
    return lists, {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}


@pytest.mark.parametrize("amsgrad", [False, True])
def test_the_op_is_the_reference(amsgrad):
    ours, hyper = op_arguments(amsgrad)
    theirs = copy.deepcopy(ours)
    _ops.adamw_(*ours, **hyper, maximize=True, grad_scale=torch.tensor(4.0))
    reference.adamw_(*theirs, **hyper, maximize=True, grad_scale=torch.tensor(4.0))
    for a, b in zip(ours, theirs, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_opcheck(amsgrad):
    lists, hyper = op_arguments(amsgrad)
    torch.library.opcheck(torch.ops.dltrain_ext.adamw_, tuple(lists), hyper)


def test_the_op_names_what_does_not_fit():
    lists, hyper = op_arguments()
    lists[2] = lists[2][:2]
    with pytest.raises(ValueError, match="exp_avgs: expected 3 tensors, one for each of params, got 2"):
        _ops.adamw_(*lists, **hyper)
