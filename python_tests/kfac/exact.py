"""Kronecker factors and preconditioned gradients in fp64, from the gradients of every example's own loss."""

import copy
import itertools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Factors = dict[str, tuple[Tensor, Tensor]]


def layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d))


def rows(module: nn.Module, inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs with the bias's 1 and gradients, (examples, positions, features)."""
    if isinstance(module, nn.Conv2d):
        how = {name: getattr(module, name) for name in ("kernel_size", "dilation", "padding", "stride")}
        inputs, gradients = F.unfold(inputs, **how).transpose(1, 2), gradients.flatten(2).transpose(1, 2)
    else:
        inputs, gradients = (some.reshape(len(some), -1, some.shape[-1]) for some in (inputs, gradients))
    if module.bias is not None:
        inputs = torch.cat([inputs, torch.ones_like(inputs[..., :1])], -1)
    return inputs, gradients


def factors(model: nn.Module, data: Tensor, losses: Callable[[Tensor], Tensor], approximation: str) -> Factors:
    """Return A and G. `losses` returns the loss of each example or, for sequences with "expand", of each position."""
    model, seen = copy.deepcopy(model).double(), {}
    hooks = [
        module.register_forward_hook(lambda module, given, output, name=name: seen.update({name: (given[0], output)}))
        for name, module in layers_of(model)
    ]
    losses(model(data.double() if data.is_floating_point() else data)).sum().backward(
        inputs=[some for _, output in seen.values() for some in [output] if output.retain_grad() is None]
    )
    for hook in hooks:
        hook.remove()
    found = {}
    for name, module in layers_of(model):
        inputs, gradients = rows(module, seen[name][0].detach(), seen[name][1].grad)
        if approximation == "reduce":
            inputs, gradients = inputs.mean(1), gradients.sum(1)
            examples = len(gradients)
        else:
            examples = len(gradients) if isinstance(module, nn.Conv2d) else gradients[..., 0].numel()
            inputs, gradients = inputs.flatten(0, 1), gradients.flatten(0, 1)
        found[name] = inputs.t() @ inputs / len(inputs), gradients.t() @ gradients / examples
    return found


def damped(a: Tensor, g: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    pi = ((a.trace() / len(a)) / (g.trace() / len(g))).sqrt()
    eye = [torch.eye(len(some), dtype=some.dtype) for some in (a, g)]
    return a + pi * damping**0.5 * eye[0], g + damping**0.5 / pi * eye[1]


def preconditioned(a: Tensor, g: Tensor, gradient: Tensor, damping: float) -> Tensor:
    a, g = damped(a, g, damping)
    return torch.linalg.solve(g, torch.linalg.solve(a, gradient.double().t()).t())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients as matrices, with that of the bias as the last column."""
    return {
        name: torch.cat(
            [some.grad.flatten(1) if some.dim() > 1 else some.grad[:, None] for some in module.parameters()], 1
        )
        for name, module in layers_of(model)
    }


def means(found: list[Factors]) -> Factors:
    return {
        name: tuple(sum(some) / len(found) for some in zip(*(f[name] for f in found), strict=True)) for name in found[0]
    }


def batches(size: int, shape: tuple[int, ...], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    for index in itertools.count():
        generator = torch.Generator().manual_seed(1000 * seed + index)
        yield torch.randn(size, *shape, generator=generator), torch.randint(0, 5, (size,), generator=generator)
