"""optim.AdamW: its arithmetic compared with fp64 and with torch.optim.AdamW; options, layouts, streams, the op."""

import copy

import pytest
import torch
from optimizers import SHAPES, Pair, assert_same, assert_same_bits_for_any_number_of_threads, give_grads, make_params
from properties import property_test, st
from torch import library

from dltrain_ext import optim, reference

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
def test_like_torch(options, device):
    pair = Pair(device, **options)
    for _ in range(20):
        pair.step()
    pair.check()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_against_double(options, device):
    params = make_params(SHAPES, device)
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
            [],
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
        )
    for p, want in zip(params, exact, strict=True):
        torch.testing.assert_close(p.detach().double(), want, rtol=1e-5, atol=1e-6)


@property_test(
    60,
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=8),
    offset=st.integers(0, 3),
    lr=st.floats(1e-5, 0.5),
    beta1=st.floats(0, 0.99),
    beta2=st.floats(0, 0.9999),
    weight_decay=st.floats(0, 1),
    scale=st.sampled_from([1e-18, 1e-8, 1.0, 1e6]),
    seed=st.integers(0, 1000),
)
def test_any_sizes_alignments_and_magnitudes(sizes, offset, lr, beta1, beta2, weight_decay, scale, seed, device):
    generator = torch.Generator().manual_seed(seed)

    def unaligned(size):
        return torch.randn(size + offset, generator=generator).to(device)[offset:]

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


def test_groups_have_their_own_options(device):
    pair = Pair(
        device,
        groups=lambda params: [
            {"params": params[:2], "lr": 0.1},
            {"params": params[2:4], "weight_decay": 0.5, "amsgrad": True},
            {"params": params[4:], "betas": (0.8, 0.9), "maximize": True},
        ],
    )
    for _ in range(5):
        pair.step()
    pair.check()


def test_parameters_without_gradient_are_skipped(device):
    pair = Pair(device)

    def sometimes(params, optimizer):
        params[pair.seed % 3].grad = None
        params[5].grad = None

    for _ in range(7):
        pair.step(sometimes)
    pair.check()
    assert pair.params[0][5] not in pair.optimizers[0].state


def test_no_gradient_at_all(device):
    params = make_params(SHAPES, device)
    optimizer = optim.AdamW(params)
    optimizer.step()
    assert_same(params, make_params(SHAPES, device))
    assert not optimizer.state


def test_layouts(device):
    dense = torch.arange(24.0, device=device).reshape(2, 3, 4)
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


def test_closure_and_hooks(device):
    (p,) = make_params([(4,)], device)
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


def test_the_same_bits_for_any_number_of_threads():
    def run():
        params = make_params([(700_001,), (3,), (400_000,)])
        optimizer = optim.AdamW(params)
        for seed in range(3):
            give_grads(params, seed)
            optimizer.step()
        return params

    assert_same_bits_for_any_number_of_threads(run)


@pytest.mark.gpu
def test_many_elements_on_cuda_give_the_results_of_the_cpu():
    results = []
    for device in ("cpu", "cuda"):
        params = make_params([(10**8,)], device)
        optimizer = optim.AdamW(params)
        for seed in range(3):
            give_grads(params, seed)
            optimizer.step()
        results.append(params[0].detach().cpu())
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
def test_a_captured_step():
    """A graph reads gradients and learning rate at each replay, and counts its steps."""
    results = []
    for captured in (False, True):
        params = make_params(SHAPES, "cuda")
        lr = torch.tensor(0.1, device="cuda")
        optimizer = optim.AdamW(params, lr=lr)
        give_grads(params, 0)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            optimizer.step()  # makes the state, which a capture cannot do
        torch.cuda.current_stream().wait_stream(side)
        step = optimizer.step
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            step = graph.replay
        for seed in range(1, 4):
            for p, new in zip(params, make_params(SHAPES, "cuda", seed), strict=True):
                p.grad.copy_(new.detach())  # in place, because a graph contains addresses
            lr.fill_(0.1 / seed)
            step()
        results.append([*params, *(value for p in params for value in optimizer.state[p].values())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
def test_a_step_is_ordered_by_its_stream():
    """A side stream writes the gradients late, so a step on any other stream would not see them."""
    params, twins = make_params(SHAPES, "cuda"), make_params(SHAPES, "cuda")
    ours, plain = optim.AdamW(params), optim.AdamW(twins)
    for held, optimizer in ((params, ours), (twins, plain)):
        give_grads(held, 0)
        optimizer.step()
    give_grads(twins, 1)
    plain.step()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # cycles, about a tenth of a second
        for p, twin in zip(params, twins, strict=True):
            p.grad.copy_(twin.grad)
        ours.step()
        after = [p.detach().clone() for p in params]
    side.synchronize()
    assert all(torch.equal(a, twin.detach()) for a, twin in zip(after, twins, strict=True))


def op_arguments(device="cpu", amsgrad=False):
    shapes = [(3, 4), (5,), (0,)]
    params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs = (
        [p.detach().abs() for p in make_params(shapes, device, seed)] for seed in range(5)
    )
    steps = [torch.tensor(float(i), device=device) for i in range(3)]
    lists = [params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs if amsgrad else [], steps, []]
    return lists, {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}


@pytest.mark.parametrize("amsgrad", [False, True])
def test_the_op_equals_the_reference(amsgrad, device):
    ours, hyper = op_arguments(device, amsgrad)
    theirs = copy.deepcopy(ours)
    scale = torch.tensor(4.0, device=device)
    torch.ops.dltrain_ext.adamw_(*ours, **hyper, maximize=True, grad_scale=scale)
    reference.adamw_(*theirs, **hyper, maximize=True, grad_scale=scale)
    for a, b in zip(ours, theirs, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_opcheck(amsgrad, device):
    lists, hyper = op_arguments(device, amsgrad)
    library.opcheck(torch.ops.dltrain_ext.adamw_, tuple(lists), hyper)


def test_errors_of_the_op_name_the_argument():
    lists, hyper = op_arguments()
    lists[2] = lists[2][:2]
    with pytest.raises(ValueError, match="exp_avgs: expected 3 tensors, one for each of params, got 2"):
        torch.ops.dltrain_ext.adamw_(*lists, **hyper)
