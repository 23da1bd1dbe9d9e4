"""What every op means, in plain torch: the yardstick of the tests, in whatever precision its arguments have."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


@torch.no_grad()
def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    masters: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    tensor_lr: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One AdamW step over lists of tensors, in place (the op: float32; params and grads also float16 or bfloat16).

    Loshchilov & Hutter 2019, Algorithm 2; with ``max_exp_avg_sqs``, else empty, AMSGrad (Reddi, Kale & Kumar 2018).
    The lists run in parallel, one entry a parameter, equal shapes within an entry; ``steps`` are one-element tensors
    and advance by one. With ``masters``, else empty, these are updated, and params become copies of them. Gradients are
    divided by ``grad_scale`` on the way and not written. One-element tensors on the device of the parameters:
    ``tensor_lr`` stands in for ``lr``, and where ``found_inf`` is not zero nothing changes. The op raises TypeError or
    ValueError naming the list and the index, what was expected and what came.
    """
    if found_inf is not None and found_inf.item() != 0:
        return
    lr = lr if tensor_lr is None else tensor_lr.item()
    for i, (p, g, m, v, step) in enumerate(zip(masters or params, grads, exp_avgs, exp_avg_sqs, steps, strict=True)):
        step += 1
        t = step.item()
        g = (-g if maximize else g) / (1.0 if grad_scale is None else grad_scale)
        p.mul_(1 - lr * weight_decay)
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).add_(g * g, alpha=1 - beta2)
        if max_exp_avg_sqs:
            v = torch.maximum(max_exp_avg_sqs[i], v, out=max_exp_avg_sqs[i])
        p.sub_(lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps))
    _copy_masters(params, masters)


@torch.no_grad()
def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    masters: Sequence[Tensor],
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    first: bool = False,
    tensor_lr: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One SGD step over lists of tensors, in place.

    Momentum with the learning rate outside of it (Polyak 1964; Nesterov's form: Sutskever et al. 2013).
    ``momentum_buffers`` is empty without momentum. ``first``: the buffers hold nothing yet. The rest as in
    :func:`adamw_`.
    """
    if found_inf is not None and found_inf.item() != 0:
        return
    lr = lr if tensor_lr is None else tensor_lr.item()
    for i, (p, g) in enumerate(zip(masters or params, grads, strict=True)):
        d = (-g if maximize else g) / (1.0 if grad_scale is None else grad_scale)
        if weight_decay:
            d = d + weight_decay * p
        if momentum:
            b = momentum_buffers[i]
            b.copy_(d if first else momentum * b + (1 - dampening) * d)
            d = d + momentum * b if nesterov else b
        p.sub_(lr * d)
    _copy_masters(params, masters)


@torch.no_grad()
def lars_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    masters: Sequence[Tensor],
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    trust_coefficient: float = 0.001,
    eps: float = 0.0,
    nesterov: bool = False,
    lr_inside: bool = True,
    clip: bool = False,
    decays_excluded: bool = True,
    decays_at_zero_norm: bool = True,
    adapt: bool = True,
    maximize: bool = False,
    tensor_lr: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One LARS step over lists of tensors, in place (You, Gitman & Ginsburg 2017, Algorithm 1).

    ``adapt``: with a trust ratio. ``lr_inside``, of the momentum; ``clip``: the ratio becomes min(ratio / lr, 1). The
    two others: whether weight decay stays without a trust ratio, and where a norm is zero. The rest as in
    :func:`adamw_`.
    """
    if found_inf is not None and found_inf.item() != 0:
        return
    lr = lr if tensor_lr is None else tensor_lr.item()
    for i, (p, g) in enumerate(zip(masters or params, grads, strict=True)):
        d = (-g if maximize else g) / (1.0 if grad_scale is None else grad_scale)
        norm, grad_norm = p.norm(), d.norm()
        ratio, decays = torch.ones_like(norm), decays_excluded
        if adapt:
            decays = decays_at_zero_norm
            if norm and grad_norm:
                decays = True
                ratio = trust_coefficient * norm / (grad_norm + weight_decay * norm + eps)
                ratio = (ratio / lr).clamp(max=1.0) if clip else ratio
        d = ratio * (d + weight_decay * p * decays)
        inside, outside = (lr, 1.0) if lr_inside else (1.0, lr)
        d = inside * d
        if momentum:
            b = momentum_buffers[i]
            b.mul_(momentum).add_(d)
            d = d + momentum * b if nesterov else b
        p.sub_(outside * d)
    _copy_masters(params, masters)


@torch.no_grad()
def adagrad_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    sums: Sequence[Tensor],
    steps: Sequence[Tensor],
    masters: Sequence[Tensor],
    *,
    lr: float,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    eps: float = 1e-10,
    maximize: bool = False,
    tensor_lr: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One Adagrad step over lists of tensors, in place (Duchi, Hazan & Singer 2011).

    ``sums`` of the squares of gradients so far. The rest as in :func:`adamw_`.
    """
    if found_inf is not None and found_inf.item() != 0:
        return
    lr = lr if tensor_lr is None else tensor_lr.item()
    for p, g, total, step in zip(masters or params, grads, sums, steps, strict=True):
        step += 1
        d = (-g if maximize else g) / (1.0 if grad_scale is None else grad_scale)
        d = d + weight_decay * p
        total.add_(d * d)
        p.sub_(lr / (1 + (step - 1) * lr_decay) * d / (total.sqrt() + eps))
    _copy_masters(params, masters)


def _copy_masters(params: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    for p, master in zip(params, masters, strict=False):
        p.copy_(master)


class Format(NamedTuple):
    """How a codec writes a block: so many elements share a scale, and so many a unit of so many bits."""

    block: int
    codes: int
    unit: torch.dtype
    largest: float | None = None


FORMATS = {
    "raw": Format(1, 1, torch.int32),
    "fp16": Format(1, 1, torch.int16),
    "bf16": Format(1, 1, torch.int16),
    "fp8": Format(128, 1, torch.uint8, 448.0),
    "int8": Format(256, 1, torch.uint8, 127.0),
    "int4": Format(128, 2, torch.uint8, 7.0),
    "sign": Format(256, 8, torch.uint8, 1.0),
}
TINY = 2.0**-117
FLOATS = {  # stored bits of the mantissa, smallest normal exponent, largest number, first that rounds to infinity
    "fp16": (10, -14, 65504.0, 65520.0),
    "bf16": (7, -126, float.fromhex("0x1.fep127"), float.fromhex("0x1.ffp127")),
    "fp8": (3, -6, 448.0, torch.inf),
}


def sum_squares(grads: Sequence[Tensor]) -> Tensor:
    """The sum of squares of all gradients, float32, float16 or bfloat16 of any shapes on one device: a float64 number
    there, here within the rounding of its order. It is finite exactly if all of them are. The op takes at least one.
    """
    return torch.stack([grad.double().square().sum() for grad in grads]).sum()


def unscale_and_clip(
    sum_squares: Tensor,
    *,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    max_norm: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What becomes of a step whose gradients, ``grad_scale`` times too large, have this sum of squares: three numbers.

    What the gradients are to be divided by, to be unscaled and clipped to the 2-norm ``max_norm`` (float64); their norm
    once unscaled, before clipping (float32); and 1 where they are not all finite or ``found_inf`` is not 0, else 0
    (float32). The first and the last are what the optimizers' ops take as ``grad_scale`` and ``found_inf``.
    Pascanu, Mikolov & Bengio 2013, Algorithm 1, as ``torch.nn.utils.clip_grad_norm_`` has it.
    """
    scale = torch.ones(()).double() if grad_scale is None else grad_scale.double().reshape(())
    norm = sum_squares.double().sqrt().reshape(()) / scale
    factor = (math.inf if max_norm is None else max_norm) / (norm + 1e-6)
    skip = ~sum_squares.isfinite().reshape(())
    if found_inf is not None:
        skip = skip | (found_inf.reshape(()) != 0)
    return torch.where(factor >= 1, scale, scale / factor), norm.float(), skip.float()


def encode_sum_(
    tensor: Tensor,
    received: Sequence[Tensor],
    codec: str,
    *,
    position: int = 0,
    scale: float = 1.0,
    residual: Tensor | None = None,
    loss_scale: Tensor | None = None,
    wire: Tensor | None = None,
    decoded: Tensor | None = None,
    stochastic: bool = False,
    seed: int = 0,
    step: int = 0,
    rank: int = 0,
    first: int = 0,
) -> None:
    """The one operation of a codec. Unlike the other meanings it is in float32: it gives the very bytes.

    Adds, in this order, what ``received[:position]`` stand for, ``tensor * scale``, what ``received[position:]`` stand
    for, and ``residual * loss_scale``; encodes the sum into ``wire``, writes what that stands for to ``decoded`` and
    what encoding lost, over ``loss_scale``, to ``residual``. Without ``wire`` nothing is encoded: ``decoded`` is the
    sum. ``tensor`` begins at element ``first``, a multiple of 4, of what the rank encodes. The op raises TypeError or
    ValueError naming the argument, what was expected and what came.
    """
    numel, up = tensor.numel(), torch.tensor(1.0) if loss_scale is None else loss_scale
    terms = [_decoded(message, codec, numel) for message in received]
    terms.insert(position, tensor.float().flatten() * torch.tensor(scale, dtype=torch.float32))
    if residual is not None:
        terms.append(residual.float().flatten() * up)
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    if wire is not None:
        random = philox(seed, step, rank, first, numel) if stochastic else None
        wire.copy_(_encoded(total, codec, random))
        value = _decoded(wire, codec, numel)
        if residual is not None:
            lost = ((total - value) * (1.0 / up)).reshape(residual.shape).to(residual.dtype)
            kept = (lost.abs() < FLOATS["bf16"][3]) & value.isfinite().reshape(residual.shape)
            residual.copy_(torch.where(kept, lost, residual))
        total = value
    if decoded is not None:
        decoded.copy_(total.reshape(decoded.shape))


def decode_(
    wire: Tensor, codec: str, out: Tensor, *, sum_squares: Tensor | None = None, found_inf: Tensor | None = None
) -> None:
    """Write what ``wire`` stands for to ``out``.

    ``sum_squares`` (float64) becomes the sum of squares of ``out``, here within the rounding of its order, and
    ``found_inf`` (float32) 1 where it is not finite, else 0; both or neither.
    """
    out.copy_(_decoded(wire, codec, out.numel()).reshape(out.shape))
    if sum_squares is not None and found_inf is not None:
        sum_squares.fill_(out.double().square().sum())
        found_inf.fill_(not out.isfinite().all())


def philox(seed: int, step: int, rank: int, first: int, numel: int) -> Tensor:
    """Philox4x32-10 (Salmon et al. 2011): a word in [0, 2^32), as int64, for each element from ``first`` on."""
    low = 2**32 - 1

    def product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
        """The upper and lower half, of factors below 2^32: int64 has no room for the product itself."""
        upper, lower = a * (b >> 16), a * (b & 0xFFFF)
        middle = upper + (lower >> 16)
        return middle >> 16, (middle << 16 | (lower & 0xFFFF)) & low

    quad = torch.arange(first // 4, (first + numel + 3) // 4)
    c0, c1, c2, c3 = quad & low, quad >> 32, torch.full_like(quad, rank), torch.full_like(quad, seed >> 32)
    k0, k1 = seed & low, step
    for _ in range(10):
        high0, low0 = product(0xD2511F53, c0)
        high1, low1 = product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return torch.stack([c0, c1, c2, c3], 1).flatten()[:numel]


def _encoded(x: Tensor, codec: str, random: Tensor | None) -> Tensor:
    form = FORMATS[codec]
    if form.largest is None:
        codes = _codes(x, codec, random)
        return torch.where(_is_nan(codes, codec), _nan(codec), codes).to(form.unit).view(torch.uint8)
    blocks = _blocks(x, form.block)
    if codec == "sign" and random is None:
        counts = _blocks(torch.ones_like(x), form.block).sum(1)
        total = _added_halves_first(blocks.abs())
        # Those that overflow are divided before they are added.
        small = _added_halves_first(blocks.abs() / counts[:, None])
        small = torch.where(blocks.isfinite().all(1), small.clamp(max=torch.finfo(torch.float32).max), small)
        statistic = torch.where(total.isfinite(), total / counts, small)
    else:
        statistic = torch.where(blocks.isfinite().all(1), blocks.abs().amax(1), torch.nan)
    seen, tiny = statistic.isfinite(), statistic < TINY
    scales = torch.where(tiny, 0.0, statistic.clamp(max=float.fromhex("0x1.fffffcp127")) / form.largest)
    # Not number / tensor, which torch rounds twice.
    inverse = torch.where(tiny, 0.0, torch.full_like(statistic, form.largest) / statistic)
    words = None if random is None else _blocks(random, form.block).flatten()
    scaled = blocks if codec == "sign" and random is None else blocks * inverse[:, None]
    codes = _codes(scaled.nan_to_num(0.0).flatten(), codec, words).reshape(blocks.shape)
    codes = torch.where(seen[:, None], codes, 0).flatten()
    codes[x.numel() :] = 0
    units = form.block // form.codes
    shifts = torch.arange(form.codes) * (8 // form.codes)
    payload = (codes.reshape(-1, form.codes, units) << shifts[:, None]).sum(1).to(torch.uint8).flatten()
    rest = x.numel() % form.block
    kept = x.numel() // form.block * units + min(rest, units)
    return torch.cat([torch.where(seen, scales, torch.nan).view(torch.uint8), payload[:kept]])


def _decoded(wire: Tensor, codec: str, numel: int) -> Tensor:
    form = FORMATS[codec]
    if form.largest is None:
        kinds = {"raw": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
        return wire.view(kinds[codec]).float()
    count, units = -(-numel // form.block), form.block // form.codes
    scales, payload = wire[: 4 * count].view(torch.float32), wire[4 * count :].long()
    payload = torch.nn.functional.pad(payload, (0, count * units - payload.numel()))
    shifts = torch.arange(form.codes) * (8 // form.codes)
    codes = (payload.reshape(count, 1, units) >> shifts[:, None]) & (2 ** (8 // form.codes) - 1)
    if codec == "fp8":
        values = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    elif codec == "sign":
        values = 1.0 - 2.0 * codes.float()
    else:
        values = (codes.to(torch.int8) if codec == "int8" else codes - 8).float()
    scaled: Tensor = values.reshape(count, form.block) * scales[:, None]
    return scaled.flatten()[:numel]


def _codes(y: Tensor, codec: str, random: Tensor | None) -> Tensor:
    """What each number is rounded to, as the bits of its code in an int64; y is in units of the scale."""
    if random is not None and codec != "raw":
        y = _either_neighbour(y, codec, random)
    if codec == "raw":
        return y.view(torch.int32).long()
    if codec == "fp16":
        return y.half().view(torch.int16).long()
    if codec == "bf16":
        return y.bfloat16().view(torch.int16).long()
    if codec == "fp8":
        return y.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8).long()
    if codec == "sign":
        return y.signbit().long()
    return y.round().long() & 0xFF if codec == "int8" else y.round().long() + 8


def _either_neighbour(y: Tensor, codec: str, random: Tensor) -> Tensor:
    """One of the two numbers beside y that the codec has, so that the mean is y."""
    uniform = ((random >> 1).float() * 2.0**-31).clamp(max=1 - 2.0**-24)
    if codec == "sign":
        return torch.where(uniform < 0.5 - 0.5 * y.clamp(-1.0, 1.0), -1.0, 1.0)
    if codec in ("int8", "int4"):
        largest = 127.0 if codec == "int8" else 7.0
        y = y.clamp(-largest, largest)
        return y.trunc() + y.sign() * (uniform < (y - y.trunc()).abs())
    mantissa, smallest, largest, infinite = FLOATS[codec]
    size = y.abs().clamp(max=largest)
    # Of normal numbers the lower bits of the word are added below the last place; others are multiples of one step.
    below = 23 - mantissa
    normal = ((size.view(torch.int32).long() + (random & (2**below - 1))) >> below << below).to(torch.int32)
    step = 2.0 ** (smallest - mantissa)
    steps = size.double() / step
    subnormal = (steps.trunc() + (uniform < steps - steps.trunc())) * step
    if codec == "bf16":
        subnormal = normal.view(torch.float32)  # whose subnormals are float32's
    rounded = torch.where(size < 2.0**smallest, subnormal.float(), normal.view(torch.float32)).clamp(max=largest)
    return torch.where(y.abs() < infinite, rounded.copysign(y), y)


def _added_halves_first(tree: Tensor) -> Tensor:
    while tree.shape[1] > 1:
        half = tree.shape[1] // 2
        tree = tree[:, :half] + tree[:, half:]
    return tree[:, 0]


def _blocks(x: Tensor, block: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.numel() % block)).reshape(-1, block)


def _is_nan(codes: Tensor, codec: str) -> Tensor:
    exponent = {"raw": 0x7F800000, "fp16": 0x7C00, "bf16": 0x7F80}[codec]
    return codes & exponent == exponent


def _nan(codec: str) -> int:
    return {"raw": 0x7FC00000, "fp16": 0x7E00, "bf16": 0x7FC0}[codec]
