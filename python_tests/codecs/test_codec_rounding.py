"""Codecs: stochastic rounding and its random numbers, the same bits with any number of threads, and error feedback."""

import itertools

import pytest
import torch
from optimizers import assert_same_bits_for_any_number_of_threads

from dltrain_ext import _ops, codecs, reference

BLOCK = {codec.name: codec.block for codec in _ops.codecs()}
LOSSY = [codec for codec in codecs.CODECS if codec != "raw"]
ROUNDINGS = ["nearest", "stochastic"]


def with_feedback(names):
    """Parametrize with all pairs of a codec and a rounding that accept a residual."""
    pairs = [(codec, rounding) for codec in names for rounding in ROUNDINGS]
    return pytest.mark.parametrize(("codec", "rounding"), [pair for pair in pairs if pair != ("sign", "stochastic")])


# A normal number deviates by 6 standard deviations once in 500 million times; the seeds are fixed as well.
DEVIATIONS = 6

# Known answers of Philox4x32-10 from Random123: counter, key, words.
PI = "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    PI,
]


def numbers(text):
    return [int(word, 16) for word in text.split()]


def philox(counter, key):
    """Compute Philox with Python integers, to which both the reference and the compiled code are compared."""
    c0, c1, c2, c3 = counter
    for i in range(10):
        k0, k1 = (key[0] + i * 0x9E3779B9) % 2**32, (key[1] + i * 0xBB67AE85) % 2**32
        one, other = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (other >> 32) ^ c1 ^ k0, other % 2**32, (one >> 32) ^ c3 ^ k1, one % 2**32
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers(counter, key, words):
    assert philox(numbers(counter), numbers(key)) == numbers(words)


# Each has a value beyond 32 bits if possible, or all bits set.
STREAMS = [
    {"seed": 0, "step": 0, "rank": 0, "first": 0},
    {"seed": 2**32 - 1, "step": 1, "rank": 2, "first": 4},
    {"seed": 0x03707344A4093822, "step": 0x299F31D0, "rank": 0x13198A2E, "first": 4 * 0x05A308D3243F6A88},
    {"seed": 2**63 - 1, "step": 2**32 - 1, "rank": 2**32 - 1, "first": 4 * (2**32 - 1)},
]


def words_of(seed, step, rank, first):
    """Return the words of eight elements: counter (element / 4, rank, upper half of seed), key (lower half, step)."""
    quads = [first // 4, first // 4 + 1]
    return [
        word for quad in quads for word in philox([quad % 2**32, quad >> 32, rank, seed >> 32], [seed % 2**32, step])
    ]


@pytest.mark.parametrize("stream", STREAMS, ids=str)
def test_the_words_of_the_reference(stream):
    for numel in range(9):
        assert reference.philox(**stream, numel=numel).tolist() == words_of(**stream)[:numel]


def rounds_up(x, codec, stream):
    """Return which of eight elements are rounded away from zero with the words of a stream."""
    wire = torch.empty(codecs.nbytes(codec, x.numel()), dtype=torch.uint8, device=x.device)
    decoded = torch.empty_like(x)
    _ops.encode_sum_(x, [], codec, wire=wire, decoded=decoded, stochastic=True, **stream)
    return decoded[:8].double() > x[:8].double()


@pytest.mark.parametrize("stream", STREAMS, ids=str)
def test_the_words_of_the_compiled_code(stream, device):
    """Find the words by bisection of the rounding: int8 compares the upper 31 bits, bf16 adds the lower 16 bits."""
    upper, lower = (torch.zeros(8, dtype=torch.int64, device=device) for _ in range(2))
    for bit in reversed(range(24)):
        # A fraction f is rounded up if the word is below f. In a block with 127 the scale is 1.
        fractions = (upper + 2**bit).double() * 2.0**-24
        x = torch.cat([fractions.float(), torch.full((1,), 127.0, device=device)])
        upper += torch.where(rounds_up(x, "int8", stream), 0, 2**bit)
    for bit in reversed(range(16)):
        # The bits below the last bit of bf16 and those of the word carry if their sum is at least 2^16.
        x = (0x3F800000 + 2**16 - (lower + 2**bit)).int().view(torch.float32)
        lower += torch.where(rounds_up(x, "bf16", stream), 2**bit, 0)
    want = words_of(**stream)
    uniform = torch.tensor([word >> 1 for word in want]).float() * 2.0**-31
    assert upper.tolist() == (uniform * 2**24).long().tolist()
    assert lower.tolist() == [word % 2**16 for word in want]


def block_of_values(codec, seed=0):
    """Make a block of many magnitudes; for codecs with blocks of one element, also subnormal numbers of the type."""
    generator = torch.Generator().manual_seed(seed)
    size = max(BLOCK[codec], 128)
    exponents = torch.linspace(-26 if codec == "fp16" else -12, 0, size).exp2()
    return torch.randn(size, generator=generator).clamp(-3, 3) * exponents


@pytest.mark.parametrize("codec", LOSSY)
def test_stochastic_rounding_is_unbiased(codec, device):
    """The mean error is tested for each element and for all together, over thousands of blocks with equal values."""
    x, times = block_of_values(codec), 2**13
    values = codecs.decode(codecs.encode(x.to(device).repeat(times), codec, rounding="stochastic", seed=11)).cpu()
    errors = values.double().reshape(times, -1) - x.double()
    span = errors.amax(0) - errors.amin(0)
    deviation = errors.std(0) / times**0.5
    # A neighbour may be too rare to occur: its probability, and thus the mean, is then below about 20 / times.
    rare = 20 / times * span.max() if codec in ("sign", "int8", "int4", "fp8") else 20 / times * 2.0**-7 * x.abs()
    assert (errors.mean(0).abs() <= DEVIATIONS * deviation + torch.where(span == 0, rare, 0) + 1e-7 * x.abs()).all()
    scaled = errors / deviation.clamp(min=1e-300) * (span > 0)
    together = scaled.mean(0).sum() / (span > 0).sum() ** 0.5
    assert abs(together) < DEVIATIONS
    assert (span > 0).double().mean() > 0.9, "nearly all elements have rounding errors"


@pytest.mark.parametrize("codec", LOSSY)
def test_the_probability_of_rounding_up(codec, device):
    """It is the distance from the lower neighbour, as a fraction: one quarter, and values near 0 and 1."""
    neighbours = {"fp16": (1, 1 + 2**-10), "bf16": (1, 1 + 2**-7), "fp8": (16, 18), "int8": (5, 6), "int4": (-2, -1)}
    low, high = neighbours.get(codec, (-1, 1))
    largest = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}.get(codec, float(high))
    for share in (0.25, 2.0**-7, 1 - 2.0**-7):
        x = torch.full((2**17,), low + share * (high - low), device=device)
        x[:: BLOCK[codec]] = largest if BLOCK[codec] > 1 else x[1]
        values = codecs.decode(codecs.encode(x, codec, rounding="stochastic", step=3))
        mine = torch.arange(2**17, device=device) % BLOCK[codec] > 0 if BLOCK[codec] > 1 else torch.ones_like(x).bool()
        values, count = values[mine], int(mine.sum())
        assert ((values == low) | (values == high)).all()
        went_up = (values == high).double().mean().item()
        assert abs(went_up - share) < DEVIATIONS * (share * (1 - share) / count) ** 0.5


def errors_of(codec, x, **options):
    return (codecs.decode(codecs.encode(x, codec, rounding="stochastic", **options)) - x).double().cpu()


def correlation(a, b):
    """Return the correlation in standard deviations of that of independent errors."""
    products = a * b
    return (products.sum() / products.square().sum().sqrt()).item()


KEYS = [
    {},
    {"rank": 1},
    {"rank": 2},
    {"rank": 2**31},
    {"step": 1},
    {"step": 2**32 - 1},
    {"seed": 1},
    {"seed": 2**32},
    {"seed": 1, "step": 1},
    {"seed": 1, "rank": 1},
    {"step": 1, "rank": 1},
]


@pytest.mark.parametrize("codec", LOSSY)
def test_errors_of_ranks_steps_and_seeds_are_independent(codec, device):
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(0)).to(device)
    errors = [errors_of(codec, x, **key) for key in KEYS]
    for (one, a), (other, b) in itertools.combinations(zip(KEYS, errors, strict=True), 2):
        assert not torch.equal(a, b), (one, other)
        assert abs(correlation(a, b)) < DEVIATIONS, (one, other)
    again = codecs.encode(x, codec, rounding="stochastic", **KEYS[-1])
    assert torch.equal(again.wire, codecs.encode(x, codec, rounding="stochastic", **KEYS[-1]).wire)


@pytest.mark.parametrize("codec", LOSSY)
def test_errors_of_neighbours_are_independent(codec, device):
    x = torch.randn(2**17, generator=torch.Generator().manual_seed(0)).to(device)
    error = errors_of(codec, x)
    for distance in (1, 2, 3, 4, 5, 8, 16, 32, 64, 128, 256, 512, 1024, 4096):
        assert abs(correlation(error[distance:], error[:-distance])) < DEVIATIONS, distance


@pytest.mark.parametrize("codec", LOSSY)
def test_errors_of_many_ranks_average_out(codec, device):
    """The mean error of 64 ranks with equal values is an eighth of that of one rank; nearest would not reduce it."""
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(0)).to(device)
    errors = [errors_of(codec, x, rank=rank) for rank in range(64)]
    ratio = (torch.stack(errors).mean(0).square().mean() / torch.stack(errors).square().mean()).sqrt().item()
    assert ratio == pytest.approx(1 / 8, rel=0.05)


@pytest.mark.parametrize("codec", codecs.CODECS)
def test_raw_and_nearest_have_no_randomness(codec, device):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(device)
    rounding = "stochastic" if codec == "raw" else "nearest"
    wires = [codecs.encode(x, codec, rounding=rounding, **key).wire for key in KEYS]
    assert all(torch.equal(wire, wires[0]) for wire in wires)


@pytest.mark.parametrize("stochastic", [False, True], ids=ROUNDINGS)
@pytest.mark.parametrize("codec", codecs.CODECS)
def test_pieces_have_the_bits_of_the_whole(codec, stochastic, device):
    """The tensor is divided at borders of blocks, and each piece is encoded with its position in the whole."""
    block = max(BLOCK[codec], 4)
    numel = 11 * block + 3
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(device)
    options = {"stochastic": stochastic, "seed": 2**33 + 1, "step": 5, "rank": 3}

    def encoded(begin, end, first):
        wire = torch.empty(codecs.nbytes(codec, end - begin), dtype=torch.uint8, device=device)
        _ops.encode_sum_(x[begin:end].clone(), [], codec, wire=wire, first=first, **options)
        scales = 4 * -(-(end - begin) // BLOCK[codec]) if BLOCK[codec] > 1 else 0
        return wire[:scales], wire[scales:]

    for start in (0, 2**34):
        whole = encoded(0, numel, start)
        for cuts in ([0, block, numel], [0, 3 * block, 4 * block, 11 * block, numel]):
            pieces = [encoded(begin, end, start + begin) for begin, end in itertools.pairwise(cuts)]
            for part, want in zip(zip(*pieces, strict=True), whole, strict=True):
                assert torch.equal(torch.cat(part), want)
    if stochastic and codec != "raw":
        assert not torch.equal(encoded(0, numel, 0)[1], encoded(0, numel, 4)[1])


@with_feedback(codecs.CODECS)
def test_the_same_bits_for_any_number_of_threads(codec, rounding):
    numel = 2_000_003
    generator = torch.Generator().manual_seed(0)
    own, kept = torch.randn(numel, generator=generator), torch.randn(numel, generator=generator)

    def run():
        residual, decoded = kept.clone(), torch.empty_like(own)
        options = {"residual": residual, "decoded": decoded, "rounding": rounding, "seed": 1}
        encoded = codecs.reduce(own, [codecs.encode(kept, codec, rounding=rounding)], **options)
        values, stats = codecs.decode(encoded, return_stats=True)
        return [encoded.wire, residual, decoded, values, *stats]

    assert_same_bits_for_any_number_of_threads(run)


# Error feedback.

LOSS_SCALES = [1024.0, 1000.0, 3.0, 4096.0, 0.3]


class Feedback:
    """Encodes gradients of many steps; sums up in fp64 what was given, what was sent, and the allowed rounding."""

    def __init__(self, codec, rounding, feedback_dtype, device, numel):
        self.codec, self.rounding, self.device, self.step = codec, rounding, device, 0
        self.residual = codecs.zero_residual(torch.empty(numel, device=device), feedback_dtype=feedback_dtype)
        self.rounds_to = torch.finfo(self.residual.dtype).eps / 2
        self.given, self.sent, self.allowed = (torch.zeros(numel, dtype=torch.float64) for _ in range(3))

    def __call__(self, gradient):
        up = LOSS_SCALES[self.step % len(LOSS_SCALES)]
        own, before = (gradient * up).float(), self.residual.cpu().double()
        options = {"rounding": self.rounding, "step": self.step, "loss_scale": torch.tensor(up, device=self.device)}
        encoded = codecs.encode(own.to(self.device), self.codec, residual=self.residual, **options)
        decoded = codecs.decode(encoded).cpu().double()
        after, exact_up = self.residual.cpu().double(), torch.tensor(up).double()
        seen = decoded.isfinite()
        self.given += torch.where(seen, own.double() / exact_up, 0)
        self.sent += torch.where(seen, decoded / exact_up, 0)
        sizes = before.abs() + after.abs() + (own.double().abs() + decoded.abs()) / exact_up
        self.allowed += torch.where(seen, 2.0**-22 * sizes + self.rounds_to * after.abs() + 1e-37, 0)
        self.step += 1
        return decoded, own.double() / exact_up + before, up

    def check(self):
        kept = self.residual.cpu().double()
        assert kept.isfinite().all()
        assert ((self.sent + kept - self.given).abs() <= self.allowed).all()


def gradients(numel, seed=0):
    """Yield gradients with a drift that in some elements is far below the resolution of the codecs."""
    generator = torch.Generator().manual_seed(seed)
    drift = torch.randn(numel, generator=generator, dtype=torch.float64)
    while True:
        noise = torch.randn(numel, generator=generator, dtype=torch.float64)
        yield drift * torch.logspace(-5, 0, numel, dtype=torch.float64) + 0.3 * noise


@pytest.mark.parametrize("feedback_dtype", ["fp32", "bf16"])
@with_feedback(LOSSY)
def test_feedback_sends_later_what_encoding_has_lost(codec, rounding, feedback_dtype, device):
    """After 300 steps the decoded sum plus the residual equals the given sum: no error is forgotten."""
    numel = 2 * 256 + 77
    feedback = Feedback(codec, rounding, feedback_dtype, device, numel)
    source = gradients(numel)
    for _ in range(300):
        feedback(next(source))
    feedback.check()
    assert feedback.residual.any(), "the last step has lost something"
    if feedback_dtype == "fp32":
        # Much less than the sum of the errors of the steps without feedback.
        assert feedback.allowed.max() < 1e-2 * feedback.given.abs().max()


@pytest.mark.parametrize("codec", LOSSY)
def test_feedback_sends_gradients_below_the_resolution(codec, device):
    """A gradient that each message alone rounds to zero, next to a large one; sign rounds it to a much larger value."""
    small, large = 1e-4, 1.0
    g = torch.full((128,), small).index_fill(0, torch.tensor([0]), large).to(device)
    residual, sent, plain = torch.zeros_like(g), torch.zeros(128), torch.zeros(128)
    steps = 400
    for _ in range(steps):
        sent += codecs.decode(codecs.encode(g, codec, residual=residual)).cpu()
        plain += codecs.decode(codecs.encode(g, codec)).cpu()
    relative = (sent[1:].sum() / (127 * small * steps) - 1).abs()
    left = residual[1:].abs().sum().item() / (127 * small * steps)
    assert relative <= left + 1e-3
    if codec in ("int8", "int4", "sign"):
        assert (plain[1:].sum() / (127 * small * steps) - 1).abs() > 0.9, "without feedback it is not sent"


@with_feedback(LOSSY)
def test_feedback_skips_blocks_that_are_not_finite(codec, rounding, device):
    """In every tenth step one block is not finite: its residual is kept, the others stay within the codec's bound."""
    block = max(BLOCK[codec], 1)
    numel = 256 * 2 + 77
    most = {"fp16": 2.0**-10, "bf16": 2.0**-7, "fp8": 1 / 14, "int8": 1 / 127, "int4": 1 / 7, "sign": 2.0}[codec]
    feedback = Feedback(codec, rounding, "fp32", device, numel)
    source = gradients(numel, seed=1)
    bad = torch.arange(numel) // block == 300 // block
    for step in range(60):
        gradient = next(source)
        if step % 10 == 9:
            gradient[300] = [float("nan"), float("inf")][step // 10 % 2]
        before = feedback.residual.cpu().clone()
        decoded, total, up = feedback(gradient)
        spoilt = bad if step % 10 == 9 else torch.zeros_like(bad)
        assert torch.equal(decoded.isnan(), spoilt)
        after = feedback.residual.cpu()
        assert torch.equal(after[spoilt], before[spoilt])
        blocks = torch.nn.functional.pad(torch.where(spoilt, 0, total.abs()), (0, -numel % block)).reshape(-1, block)
        absmax = blocks.amax(1).repeat_interleave(block)[:numel]
        smallest = 2.0**-14 / up if codec == "fp16" else 0.0
        bound = most * (1 + 1e-4) * absmax.clamp(min=smallest)
        assert (after.abs()[~spoilt] <= bound[~spoilt]).all()
    feedback.check()


def test_feedback_when_received_messages_are_added(device):
    """The residual then contains the error of the encoded sum."""
    numel, received = 300, []
    for seed in range(3):
        x = torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(device)
        received.append(codecs.encode(x, "int8"))
    own, residual = torch.ones(numel, device=device), torch.full((numel,), 0.01, device=device)
    total = sum(codecs.decode(message).double() for message in received) + own.double() + residual.double()
    decoded = codecs.decode(codecs.reduce(own, received, position=1, residual=residual))
    torch.testing.assert_close(decoded.double() + residual.double(), total, rtol=0, atol=1e-6)
