"""Tools for the tests of optimizers: equal parameters and gradients on any device, and comparisons with torch."""

import inspect
import io

import pytest
import torch

from dltrain_ext import optim
from dltrain_ext.amp import LossScaler
from dltrain_ext.optim.fused import FusedStep
from dltrain_ext.optim.rule import RULES

RTOL, ATOL = 2e-5, 2e-6  # as between torch's own fp32 implementations, over tens of steps
FUSED = [name for name in optim.__all__ if issubclass(getattr(optim, name), FusedStep)]
KINDS = [getattr(optim, name) for name in FUSED]
PAIRS = [(kind, getattr(torch.optim, kind.__name__)) for kind in KINDS if hasattr(torch.optim, kind.__name__)]
IDS = [kind.__name__ for kind, _ in PAIRS]
# Options with values for which a test can detect more errors than with the defaults.
TELLING = {"beta2": 0.99, "eps": 1e-3, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "lr_decay": 0.1}
OPS = {
    f"{rule.name}_": {"lr": 0.1} | {name: TELLING.get(name, default) for name, default in rule.hyper.items()}
    for rule in RULES.values()
}
SHAPES = [(3, 5), (7,), (), (1, 1, 2), (0, 4), (64, 33)]


def telling(kind, **options):
    """Return options with which a test can detect more errors; these and ``lr`` are added."""
    return taken_by(kind, momentum=0.9, weight_decay=0.1) | options


def taken_by(kind, **options):
    """Return those of these options that the optimizer has."""
    return {name: value for name, value in options.items() if name in inspect.signature(kind).parameters}


def skip_unless_torch_unscales(dtype, device):
    """torch 2.11 cannot unscale gradients of bfloat16 on CUDA."""
    try:
        one = torch.ones((), device=device)
        torch._amp_foreach_non_finite_check_and_unscale_([one.to(dtype)], torch.zeros_like(one), one)
    except NotImplementedError as error:
        pytest.skip(str(error))


def make_params(shapes, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]


def give_grads(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p)


def assert_untouched(grads, before):
    torch.testing.assert_close(grads, before, rtol=0, atol=0, equal_nan=True)


def assert_same(ours, theirs, slack=1):
    """Assert that values are close; torch keeps step counts on the CPU, even if parameters are on CUDA."""
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=slack * RTOL, atol=slack * ATOL, check_device=False)


class Pair:
    """Our AdamW and torch's, with parameters of their own that have the same values and gradients."""

    def __init__(self, device="cpu", shapes=SHAPES, groups=lambda params: params, **options):
        self.params = [make_params(shapes, device), make_params(shapes, device)]
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
            assert_same(a.values(), [b[key] for key in a])


def everything(params, optimizer):
    """Return copies of the parameters and of all tensors of their state."""
    kept = [value for p in params for value in optimizer.state.get(p, {}).values()]
    return [tensor.detach().clone() for tensor in (*params, *kept)]


def assert_same_bits_for_any_number_of_threads(run):
    """Assert that the tensors that run() returns do not depend on the number of threads."""
    results, threads = [], torch.get_num_threads()
    try:
        for number in (1, 2, 3, 4):
            torch.set_num_threads(number)
            results.append(run())
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert_untouched(other, results[0])


def scaled_steps(params, optimizer, give, max_norm):
    """Return all results of three loss-scaled steps, including the last norm."""
    scaler = LossScaler("cpu", init_scale=8.0)
    for seed in range(3):
        scaler.scale(torch.ones(()))
        give(params, seed)
        scaler.step(optimizer, max_norm)
        scaler.update()
    return [*everything(params, optimizer), scaler.total_norm]


def through_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def give_own_grads(params, seed):
    """Set gradients of each parameter's dtype and device."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p)


def two_groups(kind, device="cpu", dtype=torch.float32, **options):
    """Return parameters and an optimizer of them in two groups."""
    shapes = [(3, 5), (7,), (), (0, 4), (33, 9)]
    params = [torch.nn.Parameter(p.detach().to(dtype)) for p in make_params(shapes, device)]
    return params, kind([{"params": params[:2], "lr": 0.05}, {"params": params[2:]}], lr=0.1, **options)


def give_scaled(params, seed, scaler, bad=None):
    """Set gradients as a backward pass through a scaled loss does; `bad` is one element of one of them."""
    give_own_grads(params, seed)
    scale = scaler.scale(torch.ones((), device=params[0].device))
    for p in params:
        p.grad *= scale
    if bad is not None:
        params[-1].grad[-1, -1] = bad


def by_hand(params, optimizer, scaler, max_norm):
    """Do a clipped step with torch's GradScaler and clip_grad_norm_; return the norm."""
    norm = None
    if max_norm is not None:
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
    scaler.step(optimizer)
    return norm


def strided(values, layout):
    """Return a tensor of these values with some layout, and its memory, with sentinels outside of the elements."""
    shape, numel = values.shape, values.numel()
    if layout == "transposed":
        memory = values.new_full((numel,), 77.0)
        view = memory.view(shape[3], shape[2], shape[1], shape[0]).permute(3, 2, 1, 0)
    elif layout == "channels_last":
        memory = values.new_full((numel,), 77.0)
        view = memory.view(shape[0], shape[2], shape[3], shape[1]).permute(0, 3, 1, 2)
    elif layout == "gaps":
        memory = values.new_full((*shape[:3], 2 * shape[3] + 1), 77.0)
        view = memory[..., 1::2]
    else:
        offset = 1 if layout == "unaligned" else 0
        memory = values.new_full((numel + 2 * offset,), 77.0)
        view = memory[offset : offset + numel].view(shape)
    view.copy_(values)
    return view, memory


def iterate(scaler, params, optimizer, text):
    """Do an iteration per letter, where x is one that overflows; return the scale after each."""
    scales = []
    for seed, letter in enumerate(text):
        give_scaled(params, seed, scaler, float("inf") if letter == "x" else None)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def run_steps(params, optimizer, seeds):
    """Do steps with gradients of each parameter's dtype."""
    for seed in seeds:
        give_own_grads(params, seed)
        optimizer.step()


def names_of_lists(op):
    """Return the names of the lists of an optimizer's states, and of its counters."""
    rule = RULES[op.rstrip("_")]
    return [f"{state.key}s" for state in rule.states], [f"{counter.key}s" for counter in rule.counters]


def op_lists(op, params, grads, states, masters):
    """Return the first arguments of an optimizer's op, with as many lists of states as it takes."""
    own, counters = names_of_lists(op)
    counts = [[torch.full((), 3.0, dtype=p.dtype, device=p.device) for p in states[0]] for _ in counters]
    return params, grads, *states[: len(own)], *counts, masters


def call_op(namespace, op, params, grads, states, masters, **more):
    getattr(namespace, op)(*op_lists(op, params, grads, states, masters), **OPS[op], **more)


STATES = max(len(rule.states) for rule in RULES.values())


def available_bytes():
    """Return the available memory in bytes."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
