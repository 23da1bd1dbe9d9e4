"""Defines the ops of codecs in plain torch, as the reference of the tests."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Format(NamedTuple):
    """The layout of a codec's blocks: elements that share a scale, codes per word, dtype of a word, largest code."""

    block: int
    codes: int
    word: torch.dtype
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
FLOATS = {  # bits of the mantissa, smallest normal exponent, largest number, smallest number that rounds to infinity
    "fp16": (10, -14, 65504.0, 65520.0),
    "bf16": (7, -126, float.fromhex("0x1.fep127"), float.fromhex("0x1.ffp127")),
    "fp8": (3, -6, 448.0, torch.inf),
}


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
    """Adds messages, a tensor and a residual, and encodes the sum. It is in float32 and gives the same bytes as the op.

    The terms are added in this order: the decoded ``received[:position]``, ``tensor * scale``, the decoded
    ``received[position:]``, and ``residual * loss_scale``. The sum is encoded into ``wire``, the decoded ``wire`` is
    written to ``decoded``, and the encoding error, divided by ``loss_scale``, to ``residual``. Without ``wire`` nothing
    is encoded, and ``decoded`` is the sum. ``first``, a multiple of 4, is the number of the tensor's first element
    among the elements that the rank encodes. The op raises TypeError or ValueError that names the argument, the
    expected and the actual value.
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
    """Decodes ``wire`` and writes the values to ``out``.

    ``sum_squares`` (float64) becomes the sum of squares of ``out``, which the op may add in another order.
    ``found_inf`` (float32) becomes 1 if a value is not finite, else 0. Either both are passed, or both are None.
    """
    out.copy_(_decoded(wire, codec, out.numel()).reshape(out.shape))
    if sum_squares is not None and found_inf is not None:
        sum_squares.fill_(out.double().square().sum())
        found_inf.fill_(not out.isfinite().all())


def philox(seed: int, step: int, rank: int, first: int, numel: int) -> Tensor:
    """Returns a word below 2^32, as int64, for each element from ``first`` on: Philox4x32-10 (Salmon et al. 2011)."""
    low = 2**32 - 1

    def product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the upper and lower half of a product of factors below 2^32, which int64 cannot hold."""
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
        return torch.where(_is_nan(codes, codec), _nan(codec), codes).to(form.word).view(torch.uint8)
    blocks = _blocks(x, form.block)
    if codec == "sign" and random is None:
        counts = _blocks(torch.ones_like(x), form.block).sum(1)
        total = _added_halves_first(blocks.abs())
        # If a sum overflows, its terms are divided before they are added.
        small = _added_halves_first(blocks.abs() / counts[:, None])
        small = torch.where(blocks.isfinite().all(1), small.clamp(max=torch.finfo(torch.float32).max), small)
        statistic = torch.where(total.isfinite(), total / counts, small)
    else:
        statistic = torch.where(blocks.isfinite().all(1), blocks.abs().amax(1), torch.nan)
    seen, tiny = statistic.isfinite(), statistic < TINY
    scales = torch.where(tiny, 0.0, statistic.clamp(max=float.fromhex("0x1.fffffcp127")) / form.largest)
    # The dividend is a tensor, because torch would round number / tensor twice.
    inverse = torch.where(tiny, 0.0, torch.full_like(statistic, form.largest) / statistic)
    random_words = None if random is None else _blocks(random, form.block).flatten()
    scaled = blocks if codec == "sign" and random is None else blocks * inverse[:, None]
    codes = _codes(scaled.nan_to_num(0.0).flatten(), codec, random_words).reshape(blocks.shape)
    codes = torch.where(seen[:, None], codes, 0).flatten()
    codes[x.numel() :] = 0
    words = form.block // form.codes
    shifts = torch.arange(form.codes) * (8 // form.codes)
    payload = (codes.reshape(-1, form.codes, words) << shifts[:, None]).sum(1).to(torch.uint8).flatten()
    rest = x.numel() % form.block
    kept = x.numel() // form.block * words + min(rest, words)
    return torch.cat([torch.where(seen, scales, torch.nan).view(torch.uint8), payload[:kept]])


def _decoded(wire: Tensor, codec: str, numel: int) -> Tensor:
    form = FORMATS[codec]
    if form.largest is None:
        kinds = {"raw": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
        return wire.view(kinds[codec]).float()
    count, words = -(-numel // form.block), form.block // form.codes
    scales, payload = wire[: 4 * count].view(torch.float32), wire[4 * count :].long()
    payload = torch.nn.functional.pad(payload, (0, count * words - payload.numel()))
    shifts = torch.arange(form.codes) * (8 // form.codes)
    codes = (payload.reshape(count, 1, words) >> shifts[:, None]) & (2 ** (8 // form.codes) - 1)
    if codec == "fp8":
        values = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    elif codec == "sign":
        values = 1.0 - 2.0 * codes.float()
    else:
        values = (codes.to(torch.int8) if codec == "int8" else codes - 8).float()
    scaled: Tensor = values.reshape(count, form.block) * scales[:, None]
    return scaled.flatten()[:numel]


def _codes(y: Tensor, codec: str, random: Tensor | None) -> Tensor:
    """Rounds each number, which is in multiples of the scale, and returns the bits of its code as int64."""
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
    """Rounds stochastically to one of the codec's two numbers next to y, so that the expected value is y."""
    uniform = ((random >> 1).float() * 2.0**-31).clamp(max=1 - 2.0**-24)
    if codec == "sign":
        return torch.where(uniform < 0.5 - 0.5 * y.clamp(-1.0, 1.0), -1.0, 1.0)
    if codec in ("int8", "int4"):
        largest = 127.0 if codec == "int8" else 7.0
        y = y.clamp(-largest, largest)
        return y.trunc() + y.sign() * (uniform < (y - y.trunc()).abs())
    mantissa, smallest, largest, infinite = FLOATS[codec]
    size = y.abs().clamp(max=largest)
    # For normal numbers low bits of the random word are added below the last bit; others are multiples of one step.
    below = 23 - mantissa
    normal = ((size.view(torch.int32).long() + (random & (2**below - 1))) >> below << below).to(torch.int32)
    step = 2.0 ** (smallest - mantissa)
    steps = size.double() / step
    subnormal = (steps.trunc() + (uniform < steps - steps.trunc())) * step
    if codec == "bf16":
        subnormal = normal.view(torch.float32)  # bfloat16 and float32 have the same exponents
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
