"""optim.LARS: each preset compared with a formula in fp64, with changing learning rates; options; the op."""

import copy

import pytest
import torch
from optimizers import assert_same, assert_untouched, everything, give_grads, give_own_grads, make_params, through_file
from properties import property_test, st
from torch import library

from dltrain_ext import optim, reference
from dltrain_ext.amp import LossScaler

PRESETS = ["paper", "tensorflow", "larc"]
SHAPES = [(3, 5), (7,), (), (0, 4), (64, 33), (4, 4), (6, 6), (9,)]
ZERO_PARAM, ZERO_GRAD, ZERO_BIAS = 5, 6, 7
FLAGS = ["nesterov", "lr_inside", "clip", "decays_excluded", "decays_at_zero_norm", "adapt", "maximize"]
LRS = [0.5, 0.1, 2.0, 0.0, 1.0, 0.3, 30.0, 0.02]


def textbook(preset, w, b, g, adapts, lr, momentum=0.9, decay=0.0, nesterov=False, coefficient=None, eps=None):
    """Return the new parameter and momentum buffer by the formula of a preset."""
    coefficient = (0.02 if preset == "larc" else 0.001) if coefficient is None else coefficient
    eps = (1e-8 if preset == "larc" else 0.0) if eps is None else eps
    ratio, w_norm, g_norm = 1.0, float(w.norm()), float(g.norm())
    if adapts and w_norm > 0 and g_norm > 0:
        ratio = coefficient * w_norm / (g_norm + decay * w_norm + eps)
        if preset == "larc":
            ratio = min(ratio / lr, 1.0) if lr else 1.0
    elif (preset == "larc" and adapts) or (preset == "tensorflow" and not adapts):
        decay = 0.0
    inside, outside = (1.0, lr) if preset == "larc" else (lr, 1.0)
    d = inside * ratio * (g + decay * w)
    b = momentum * b + d
    return w - outside * (d + momentum * b if nesterov else b), b


def assert_near(ours, exact):
    """With a large learning rate elements cancel, so errors are relative to the largest element."""
    largest = exact.abs().max().item() if exact.numel() else 0.0
    torch.testing.assert_close(ours.detach().double(), exact, rtol=1e-5, atol=3e-6 * largest)


class Run:
    """An optimizer and the formula with the same gradients and learning rates."""

    def __init__(self, device, preset, adapts=lambda w: w.dim() > 1, options=None, seed=0, **hyper):
        self.preset, self.adapts, self.hyper = preset, adapts, hyper
        self.params = make_params(SHAPES, device, seed)
        with torch.no_grad():
            self.params[ZERO_PARAM].zero_()
            self.params[ZERO_BIAS].zero_()
        self.exact = [(p.detach().double(), torch.zeros_like(p, dtype=torch.float64)) for p in self.params]
        names = {"decay": "weight_decay", "coefficient": "trust_coefficient"}
        given = {names.get(key, key): value for key, value in hyper.items()} | (options or {})
        self.optimizer = optim.LARS(self.params, 1.0, preset=preset, **given)

    def step(self, seed, lr, size=1.0):
        give_grads(self.params, seed)
        self.params[ZERO_GRAD].grad.zero_()
        for p in self.params:
            p.grad *= size
        before = [p.grad.clone() for p in self.params]
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        assert_untouched([p.grad for p in self.params], before)
        self.exact = [
            textbook(self.preset, w, b, g.double(), self.adapts(w), lr, **self.hyper)
            for (w, b), g in zip(self.exact, before, strict=True)
        ]

    def check(self):
        for p, (w, b) in zip(self.params, self.exact, strict=True):
            assert_near(p, w)
            if p in self.optimizer.state:
                assert_near(self.optimizer.state[p]["momentum_buffer"], b)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("adapt", ["auto", True])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, False), (0.9, True), (0.0, False)])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_presets(preset, adapt, momentum, nesterov, decay, device):
    adapts = (lambda w: True) if adapt is True else (lambda w: w.dim() > 1)
    hyper = {"momentum": momentum, "nesterov": nesterov, "decay": decay}
    run = Run(device, preset, adapts, {"adapt": adapt}, **hyper)
    for seed, lr in enumerate(LRS):
        run.step(seed, lr)
        run.check()
    assert bool(run.optimizer.state) is (momentum > 0)


def test_the_presets_differ(device):
    """Otherwise the test above could not distinguish them."""
    runs = [Run(device, preset, decay=0.3) for preset in PRESETS]
    for run in runs:
        for seed, lr in enumerate(LRS):
            run.step(seed, lr)
    for place in (0, 1, ZERO_PARAM):
        values = [run.params[place].detach() for run in runs]
        differ = [not torch.allclose(values[a], values[b], rtol=1e-3) for a, b in ((0, 1), (0, 2), (1, 2))]
        assert sum(differ) >= 2, place


@pytest.mark.parametrize("preset", PRESETS)
def test_constants_given_by_the_user(preset, device):
    run = Run(device, preset, decay=0.1, coefficient=0.5, eps=3.0)
    for seed, lr in enumerate(LRS):
        run.step(seed, lr)
    run.check()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_norms_whose_squares_leave_fp32(preset, size, device):
    run = Run(device, preset, lambda w: True, {"adapt": True}, coefficient=0.01, eps=0.0)
    for seed in range(3):
        run.step(seed, 0.5, size)
        run.check()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("decay", [0.0, 0.2])
@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"momentum": 0.0}, {"maximize": True}], ids=str)
def test_without_trust_ratios_it_is_sgd(preset, decay, options, device):
    """Presets with the learning rate outside the momentum need changing rates; tensorflow excludes decay, too."""
    options = {"momentum": 0.9, **options}
    results = []
    for sgd in (False, True):
        params = make_params(SHAPES, device)
        if sgd:
            optimizer = torch.optim.SGD(params, 1.0, weight_decay=0.0 if preset == "tensorflow" else decay, **options)
        else:
            optimizer = optim.LARS(params, 1.0, weight_decay=decay, preset=preset, adapt=False, **options)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [0.1, 1.0, 0.01, 0.3][step % 4])
        for seed in range(6):
            give_grads(params, seed)
            optimizer.step()
            schedule.step()
        results.append(params)
    assert_same(*results)


def test_zero_and_one_are_false_and_true(device):
    results = []
    for adapt in (False, 0, True, 1):
        params = make_params(SHAPES, device)
        optimizer = optim.LARS(params, 1.0, adapt=adapt)
        for seed, lr in enumerate(LRS):
            give_grads(params, seed)
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
        results.append(params)
    assert_untouched(results[1], results[0])
    assert_untouched(results[3], results[2])


def test_groups_have_their_own_preset_and_adapt(device):
    shapes = [(3, 4), (5,)]
    params = [make_params(shapes, device, seed) for seed in range(5)]
    kinds = [
        ("paper", lambda w: w.dim() > 1, {}),
        ("larc", lambda w: w.dim() > 1, {"preset": "larc"}),
        ("tensorflow", lambda w: True, {"preset": "tensorflow", "adapt": True}),
        ("paper", lambda w: True, {"adapt": True, "momentum": 0.5}),
        ("larc", lambda w: False, {"adapt": False}),  # with adapt=False, paper and larc are equal
    ]
    groups = [{"params": held, **options} for held, (_, _, options) in zip(params, kinds, strict=True)]
    optimizer = optim.LARS(groups, 1.0, weight_decay=0.1)
    exact = [[(p.detach().double(), p.detach().double() * 0) for p in held] for held in params]
    for seed, lr in enumerate(LRS):
        for index, held in enumerate(params):
            give_grads(held, seed)
            preset, adapts, options = kinds[index]
            optimizer.param_groups[index]["lr"] = lr
            exact[index] = [
                textbook(preset, w, b, p.grad.double(), adapts(w), lr, options.get("momentum", 0.9), 0.1)
                for p, (w, b) in zip(held, exact[index], strict=True)
            ]
        optimizer.step()
    for held, wanted in zip(params, exact, strict=True):
        for p, (w, _) in zip(held, wanted, strict=True):
            assert_near(p, w)


def test_a_learning_rate_may_be_a_tensor(device):
    results = []
    for lr in (0.5, torch.tensor(0.5), torch.tensor([0.5], device=device)):
        params = make_params(SHAPES, device)
        optimizer = optim.LARS(params, lr, preset="larc", weight_decay=0.1)
        for seed in range(4):
            give_grads(params, seed)
            optimizer.step()
            if isinstance(lr, torch.Tensor):
                lr.mul_(0.5)
            else:
                optimizer.param_groups[0]["lr"] *= 0.5
        results.append(params)
    for params in results[1:]:
        assert_untouched(params, results[0])


@pytest.mark.parametrize("preset", PRESETS)
def test_norms_are_those_of_unscaled_and_clipped_gradients(preset, device):
    """Otherwise eps would have another effect."""
    results = []
    for scaled in (False, True):
        params = make_params(SHAPES, device)
        optimizer = optim.LARS(params, 0.3, preset=preset, eps=1.0, trust_coefficient=0.1, weight_decay=0.1)
        scaler = LossScaler(device, init_scale=1024.0)
        for seed in range(4):
            give_grads(params, seed)
            if scaled:
                scaler.scale(torch.ones((), device=device))
                for p in params:
                    p.grad *= 1024.0
                scaler.step(optimizer, max_norm=2.0)
                scaler.update()
            else:
                torch.nn.utils.clip_grad_norm_(params, 2.0)
                optimizer.step()
        results.append(params)
    assert_same(*results)


@pytest.mark.parametrize("preset", PRESETS)
def test_norms_are_those_of_the_masters(preset, device):
    """A bfloat16 parameter has only 8 bits; the exact run starts from the same rounded values."""
    params = [torch.nn.Parameter(p.detach().bfloat16()) for p in make_params(SHAPES, device)]
    optimizer = optim.LARS(params, 1.0, weight_decay=0.1, preset=preset)
    exact = [(p.detach().double(), torch.zeros_like(p, dtype=torch.float64)) for p in params]
    for seed, lr in enumerate(LRS):
        give_own_grads(params, seed)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        exact = [
            textbook(preset, w, b, p.grad.double(), w.dim() > 1, lr, decay=0.1)
            for p, (w, b) in zip(params, exact, strict=True)
        ]
    for p, (w, _) in zip(params, exact, strict=True):
        assert_near(optimizer.state[p]["master_param"], w)
        assert torch.equal(p, optimizer.state[p]["master_param"].bfloat16())


@pytest.mark.parametrize("verdict", [1.0, 2.0])
def test_a_skipped_step_leaves_no_trace(verdict, device):
    run = Run(device, "paper", decay=0.1)
    run.optimizer.add_param_group({"params": make_params([(4, 4)], device), "adapt": True})
    params = [p for group in run.optimizer.param_groups for p in group["params"]]
    for steps in range(3):
        before = everything(params, run.optimizer)
        give_grads(params, steps)
        run.optimizer.found_inf = torch.full((), verdict, device=device)
        run.optimizer.step()
        assert_untouched(everything(params, run.optimizer), before)
        del run.optimizer.found_inf
        run.step(steps, LRS[steps])
    run.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_continuing_from_a_file_gives_the_same_bits(dtype, device):
    params = [torch.nn.Parameter(p.detach().to(dtype)) for p in make_params(SHAPES, device)]
    twins = copy.deepcopy(params)
    optimizer, twin = (
        optim.LARS(held, 1.0, weight_decay=0.1, preset=preset, adapt=adapt)
        for held, preset, adapt in ((params, "larc", True), (twins, "paper", "auto"))
    )
    for seed, lr in enumerate(LRS):
        if seed == 4:
            twin.load_state_dict(through_file(optimizer.state_dict()))
            for p, q in zip(params, twins, strict=True):
                q.data.copy_(p.data)
        for held, one in ((params, optimizer), (twins, twin)):
            give_own_grads(held, seed)
            one.param_groups[0]["lr"] = lr
            one.step()
    assert_untouched(everything(twins, twin), everything(params, optimizer))
    assert twin.param_groups[0]["preset"] == "larc"


@property_test(
    80,
    sizes=st.lists(st.sampled_from([0, 1, 7, 33, 4097]), min_size=1, max_size=5),
    momentum=st.sampled_from([0.0, 0.9]),
    zero=st.sampled_from(["params", "grads", None]),
    flags=st.fixed_dictionaries({name: st.booleans() for name in FLAGS}),
    hyper=st.fixed_dictionaries(
        {"lr": st.floats(1e-3, 2), "weight_decay": st.floats(0, 1), "eps": st.floats(0, 1)}
        # A step of the whole norm may end at 0, where a rounding decides the ratio of the next step.
        | {"trust_coefficient": st.floats(1e-4, 0.4)}
    ),
    tensors=st.sets(st.sampled_from(["tensor_lr", "grad_scale", "found_inf"])),
)
def test_the_op_equals_the_reference(sizes, momentum, zero, flags, hyper, tensors, device):
    params, grads, buffers = (
        [p.detach() for p in make_params([(n,) for n in sizes], device, seed)] for seed in range(3)
    )
    {"params": params, "grads": grads, None: [torch.ones(())]}[zero][0].zero_()
    lists = [params, grads, buffers if momentum else [], []]
    exact = [[t.double() for t in one] for one in lists]
    values = {"tensor_lr": 0.7, "grad_scale": 8.0, "found_inf": 0.0}
    scalars = {name: torch.full((), values[name], device=device) for name in tensors}
    for _ in range(2):
        torch.ops.dltrain_ext.lars_(*lists, momentum=momentum, **hyper, **flags, **scalars)
        reference.lars_(*exact, momentum=momentum, **hyper, **flags, **scalars)
    for ours, want in zip(params + lists[2], exact[0] + exact[2], strict=True):
        torch.testing.assert_close(ours.double(), want, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("half", [False, True])
def test_opcheck(momentum, half, device):
    params, grads, buffers, masters = ([p.detach() for p in make_params(SHAPES, device, seed)] for seed in range(4))
    params = [p.bfloat16() for p in params] if half else params
    lists = (params, grads, buffers if momentum else [], masters if half else [])
    library.opcheck(torch.ops.dltrain_ext.lars_, lists, {"lr": 0.1, "momentum": momentum, "weight_decay": 0.1})


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -0.1},
        {"lr": float("nan")},
        {"lr": torch.ones(2)},
        {"momentum": -1},
        {"weight_decay": float("inf")},
        {"trust_coefficient": -1.0},
        {"eps": -1e-3},
        {"preset": "apex"},
        {"adapt": "no"},
        {"master_weights": "yes"},
        {"nesterov": True, "momentum": 0},
    ],
    ids=str,
)
def test_errors_name_the_wrong_argument(options):
    params = make_params([(3,)])
    with pytest.raises(ValueError, match=next(iter(options))):
        optim.LARS(params, **{"lr": 0.1, **options})
    optimizer = optim.LARS(make_params([(2,)]), 0.1)
    with pytest.raises(ValueError, match=next(iter(options))):
        optimizer.add_param_group({"params": params, **options})
    assert len(optimizer.param_groups) == 1
