"""Defines the ops of optimizers in plain torch, as the reference of the tests: the update of one parameter.

Each op takes lists of tensors, with one entry for each parameter and equal shapes within an entry, and changes them in
place: ``params``; ``grads``, which are only read; the states and the counters that its update here names, in that order
(an optional state is an empty list where there is none); and ``masters``, float32 parameters that are updated instead
of ``params``, which then become copies of them, or an empty list. Counters are one-element tensors, and the op advances
them. The ops take float32 states, and parameters and gradients that are float32, float16 or bfloat16.

Keyword arguments beside those of the update: ``maximize``; ``tensor_lr``, which takes the place of ``lr``;
``grad_scale``, by which gradients are divided; ``found_inf``: nothing changes where it is not 0. The last three are
one-element tensors on the device of the parameters. An op raises TypeError or ValueError naming the list and the index,
what was expected and what came.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dltrain_ext.reference.codecs import philox

Update = Callable[..., None]


def _over_lists(update: Update) -> Update:
    """Makes the op of an update of one parameter: (parameter, gradient, states and counters, lr, hyper-parameters)."""

    @torch.no_grad()
    @functools.wraps(update)
    def op(
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        *lists: Sequence[Tensor],
        lr: float,
        maximize: bool = False,
        tensor_lr: Tensor | None = None,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        **hyper: Any,
    ) -> None:
        if found_inf is not None and found_inf.item() != 0:
            return
        *kept, masters = lists
        rate = lr if tensor_lr is None else tensor_lr.item()
        for i, (p, grad) in enumerate(zip(masters or params, grads, strict=True)):
            g = (-grad if maximize else grad) / (1.0 if grad_scale is None else grad_scale)
            update(p, g, *(tensors[i] if tensors else None for tensors in kept), lr=rate, **hyper)
        for p, master in zip(params, masters, strict=False):
            p.copy_(master)

    return op


def _moments(g: Tensor, m: Tensor, v: Tensor, beta1: float, beta2: float) -> None:
    m.mul_(beta1).add_(g, alpha=1 - beta1)
    v.mul_(beta2).add_(g * g, alpha=1 - beta2)


def _decayed(p: Tensor, g: Tensor, weight_decay: float) -> Tensor:
    """The gradient with weight decay. Without decay an infinite parameter has no influence: 0 * inf is NaN."""
    return g + weight_decay * p if weight_decay else g


def _decayed_as_asked(p: Tensor, g: Tensor, lr: float, weight_decay: float, decoupled: bool) -> Tensor:
    """The gradient with weight decay; decoupled, the decay is applied to the parameter instead."""
    if decoupled:
        p.mul_(1 - lr * weight_decay)
    return _decayed(p, g, 0.0 if decoupled else weight_decay)


def _adam(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    max_v: Tensor | None,
    step: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    step += 1
    t = step.item()
    _moments(g, m, v, beta1, beta2)
    if max_v is not None:
        v = torch.maximum(max_v, v, out=max_v)
    p.sub_(lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps))


@_over_lists
def adam_(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    max_v: Tensor | None,
    step: Tensor,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
) -> None:
    """Adam (Kingma & Ba 2015); with ``max_exp_avg_sqs``, AMSGrad (Reddi, Kale & Kumar 2018)."""
    d = _decayed_as_asked(p, g, lr, weight_decay, decoupled_weight_decay)
    _adam(p, d, m, v, max_v, step, lr, beta1, beta2, eps)


@_over_lists
def adamw_(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    max_v: Tensor | None,
    step: Tensor,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> None:
    """AdamW (Loshchilov & Hutter 2019, Algorithm 2); with ``max_exp_avg_sqs``, AMSGrad."""
    p.mul_(1 - lr * weight_decay)
    _adam(p, g, m, v, max_v, step, lr, beta1, beta2, eps)


@_over_lists
def nadam_(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    step: Tensor,
    mu_product: Tensor,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum_decay: float = 4e-3,
    decoupled_weight_decay: bool = False,
) -> None:
    """NAdam (Dozat 2016), with a momentum that grows."""
    step += 1
    t = step.item()
    mu, following = (beta1 * (1 - 0.5 * 0.96 ** (i * momentum_decay)) for i in (t, t + 1))
    mu_product *= mu
    d = _decayed_as_asked(p, g, lr, weight_decay, decoupled_weight_decay)
    _moments(d, m, v, beta1, beta2)
    ahead = (1 - mu) / (1 - mu_product) * d + following / (1 - mu_product * following) * m
    p.sub_(lr * ahead / ((v / (1 - beta2**t)).sqrt() + eps))


@_over_lists
def radam_(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    step: Tensor,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
) -> None:
    """RAdam (Liu et al. 2020, Algorithm 2)."""
    step += 1
    t = step.item()
    _moments(_decayed_as_asked(p, g, lr, weight_decay, decoupled_weight_decay), m, v, beta1, beta2)
    longest = 2 / (1 - beta2) - 1
    rho = longest - 2 * t * beta2**t / (1 - beta2**t)
    update = m / (1 - beta1**t)
    if rho > 5:
        variance = (rho - 4) * (rho - 2) * longest / ((longest - 4) * (longest - 2) * rho)
        update = update * (variance * (1 - beta2**t)) ** 0.5 / (v.sqrt() + eps)
    p.sub_(lr * update)


@_over_lists
def adamax_(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    u: Tensor,
    step: Tensor,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> None:
    """Adamax (Kingma & Ba 2015, Algorithm 2)."""
    step += 1
    d = _decayed(p, g, weight_decay)
    m.mul_(beta1).add_(d, alpha=1 - beta1)
    u.copy_(torch.maximum(beta2 * u, d.abs() + eps))
    p.sub_(lr / (1 - beta1 ** step.item()) * m / u)


@_over_lists
def rmsprop_(
    p: Tensor,
    g: Tensor,
    v: Tensor,
    buffer: Tensor | None,
    mean: Tensor | None,
    step: Tensor,
    *,
    lr: float,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
) -> None:
    """RMSprop (Hinton 2012; centered: Graves 2013), with eps added to the root."""
    step += 1
    d = _decayed(p, g, weight_decay)
    v.mul_(alpha).add_(d * d, alpha=1 - alpha)
    variance = v
    if centered:
        assert mean is not None
        mean.mul_(alpha).add_(d, alpha=1 - alpha)
        variance = v - mean * mean
    d = d / (variance.sqrt() + eps)
    if momentum:
        assert buffer is not None
        d = buffer.mul_(momentum).add_(d)
    p.sub_(lr * d)


@_over_lists
def adadelta_(
    p: Tensor,
    g: Tensor,
    v: Tensor,
    a: Tensor,
    step: Tensor,
    *,
    lr: float,
    rho: float = 0.9,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
) -> None:
    """Adadelta (Zeiler 2012, Algorithm 1)."""
    step += 1
    d = _decayed(p, g, weight_decay)
    v.mul_(rho).add_(d * d, alpha=1 - rho)
    delta = (a + eps).sqrt() / (v + eps).sqrt() * d
    a.mul_(rho).add_(delta * delta, alpha=1 - rho)
    p.sub_(lr * delta)


@_over_lists
def adagrad_(
    p: Tensor,
    g: Tensor,
    total: Tensor,
    step: Tensor,
    *,
    lr: float,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    eps: float = 1e-10,
) -> None:
    """Adagrad (Duchi, Hazan & Singer 2011); ``sums`` are of the squares of the gradients so far."""
    step += 1
    d = _decayed(p, g, weight_decay)
    total.add_(d * d)
    p.sub_(lr / (1 + (step - 1) * lr_decay) * d / (total.sqrt() + eps))


@_over_lists
def lion_(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    weight_decay: float = 0.0,
) -> None:
    """Lion (Chen et al. 2023, Algorithm 2)."""
    p.mul_(1 - lr * weight_decay).sub_(lr * torch.sign(beta1 * m + (1 - beta1) * g))
    m.mul_(beta2).add_(g, alpha=1 - beta2)


@_over_lists
def lamb_(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    step: Tensor,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 1e-2,
    adapt: bool = True,
) -> None:
    """LAMB (You et al. 2020, Algorithm 2); ``adapt``: with a trust ratio."""
    step += 1
    t = step.item()
    _moments(g, m, v, beta1, beta2)
    u = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps) + weight_decay * p
    norm, length = p.norm(), u.norm()
    p.sub_(lr * (norm / length if adapt and norm and length else 1.0) * u)


@_over_lists
def ftrl_(
    p: Tensor,
    g: Tensor,
    z: Tensor,
    n: Tensor,
    *,
    lr: float,
    beta: float = 1.0,
    lambda_1: float = 0.0,
    lambda_2: float = 0.0,
) -> None:
    """FTRL-Proximal (McMahan et al. 2013, Algorithm 1)."""
    total = n + g * g
    z.add_(g - (total.sqrt() - n.sqrt()) / lr * p)
    n.copy_(total)
    beyond = z - z.sign() * lambda_1
    p.copy_(torch.where(z.abs() <= lambda_1, 0.0, -beyond / ((beta + n.sqrt()) / lr + lambda_2)))


@_over_lists
def sgd_(
    p: Tensor,
    g: Tensor,
    buffer: Tensor | None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    first: bool = False,
) -> None:
    """SGD with the learning rate outside of the momentum (Polyak 1964; Nesterov's form: Sutskever et al. 2013).

    ``first``: the momentum buffers hold nothing yet.
    """
    d = _decayed(p, g, weight_decay)
    if momentum:
        assert buffer is not None
        buffer.copy_(d if first else momentum * buffer + (1 - dampening) * d)
        d = d + momentum * buffer if nesterov else buffer
    p.sub_(lr * d)


@_over_lists
def lars_(
    p: Tensor,
    g: Tensor,
    buffer: Tensor | None,
    *,
    lr: float,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    trust_coefficient: float = 0.001,
    eps: float = 0.0,
    nesterov: bool = False,
    lr_inside: bool = True,
    clip: bool = False,
    decays_excluded: bool = True,
    decays_at_zero_norm: bool = True,
    adapt: bool = True,
) -> None:
    """LARS (You, Gitman & Ginsburg 2017, Algorithm 1).

    ``adapt``: with a trust ratio; ``lr_inside``: the learning rate is inside of the momentum; ``clip``: the ratio is
    min(ratio / lr, 1); ``decays_excluded``, ``decays_at_zero_norm``: whether weight decay is applied to tensors without
    a trust ratio, and where a norm is 0.
    """
    norm, grad_norm = p.norm(), g.norm()
    ratio, decays = torch.ones_like(norm), decays_excluded
    if adapt:
        decays = decays_at_zero_norm
        if norm and grad_norm:
            decays = True
            ratio = trust_coefficient * norm / (grad_norm + weight_decay * norm + eps)
            ratio = (ratio / lr).clamp(max=1.0) if clip else ratio
    inside, outside = (lr, 1.0) if lr_inside else (1.0, lr)
    d = inside * ratio * (g + weight_decay * p * decays)
    if momentum:
        assert buffer is not None
        buffer.mul_(momentum).add_(d)
        d = d + momentum * buffer if nesterov else buffer
    p.sub_(outside * d)


@_over_lists
def sgld_(
    p: Tensor,
    g: Tensor,
    step: Tensor,
    number: Tensor,
    *,
    lr: float,
    weight_decay: float = 0.0,
    temperature: float = 1.0,
    seed: float = 0.0,
) -> None:
    """SGLD (Welling & Teh 2011), with noise by Box & Muller 1958 from Philox's words of an element."""
    step += 1
    words = philox(int(seed), int(step.item()), int(number.item()), 0, 4 * p.numel()).view(-1, 4) >> 8
    u, v = (words[:, 0] + 1) * 2.0**-24, words[:, 1] * 2.0**-24
    noise = (-2 * u.double().log()).sqrt() * (2 * torch.pi * v.double()).cos()
    noise = noise.to(p).view(p.shape)
    p.sub_(lr / 2 * _decayed(p, g, weight_decay)).add_(noise, alpha=temperature * lr**0.5)
