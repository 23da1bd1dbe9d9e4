"""For the tests of optimizers: parameters and gradients of the same values on any device, comparisons with torch."""

import io

import torch

from dltrain_ext import optim

RTOL, ATOL = 2e-5, 2e-6  # of torch's own fp32 variants among each other, over tens of steps
SHAPES = [(3, 5), (7,), (), (1, 1, 2), (0, 4), (64, 33)]


def make_params(shapes, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]


def give_grads(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.device)


def assert_untouched(grads, before):
    torch.testing.assert_close(grads, before, rtol=0, atol=0, equal_nan=True)


def assert_same(ours, theirs):
    """Close in value; torch keeps the count of steps on the CPU even where the parameters are on CUDA."""
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=RTOL, atol=ATOL, check_device=False)


class Pair:
    """Our AdamW and torch's, on parameters of their own with the same values and gradients."""

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
    """Copies of the parameters and of all tensors that the optimizer keeps for them."""
    kept = [value for p in params for value in optimizer.state.get(p, {}).values()]
    return [tensor.detach().clone() for tensor in (*params, *kept)]


def through_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def give_own_grads(params, seed):
    """Of each parameter's dtype and device."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p)
