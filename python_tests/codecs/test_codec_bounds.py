"""Codecs: the documented error bounds for numbers of any magnitude; numbers that are not finite, or too large."""

import re

import pytest
import torch
from properties import property_test, st

from dltrain_ext import _ops, codecs

BLOCK = {codec.name: codec.block for codec in _ops.codecs()}
SCALED = [codec.name for codec in _ops.codecs() if codec.scaled]
ROUNDINGS = ["nearest", "stochastic"]
TINY, LARGEST = 2.0**-117, torch.finfo(torch.float32).max
SLACK = 1 + 1e-4  # tolerance for the rounding of fp32


def with_feedback(names):
    """Parametrize with all pairs of a codec and a rounding that accept a residual."""
    pairs = [(codec, rounding) for codec in names for rounding in ROUNDINGS]
    return pytest.mark.parametrize(("codec", "rounding"), [pair for pair in pairs if pair != ("sign", "stochastic")])


SMALLEST_NORMAL = {"fp16": 2.0**-14, "bf16": 2.0**-126}
NAN, INF = float("nan"), float("inf")


def documented():
    """Return codec -> rounding -> (largest, rms error), from the table in the documentation."""

    def number(text):
        if "^" in text:
            base, exponent = text.split("^")
            return float(base) ** float(exponent)
        numerator, _, denominator = text.partition("/")
        return float(numerator) / float(denominator or 1)

    lines = codecs.__doc__.splitlines()
    columns = [found.span() for found in re.finditer("=+", next(line for line in lines if line.startswith("===")))]
    rows = [[line[begin:end].strip() for begin, end in columns] for line in lines]
    table = {}
    for row in rows:
        if row[0] not in codecs.CODECS:
            continue
        assert int(row[1]) == BLOCK[row[0]]
        assert float(row[2]) == codecs.nbytes(row[0], 2**20) / 2**20
        errors = [[number(part) for part in column.split(",")] for column in row[4:6]]
        table[row[0]] = {rounding: (pair[0], pair[-1]) for rounding, pair in zip(ROUNDINGS, errors, strict=True)}
    return table


BOUNDS = documented()


def test_all_codecs_are_documented():
    assert tuple(BOUNDS) == codecs.CODECS


@pytest.mark.parametrize("codec", codecs.CODECS)
def test_the_functions_return_the_documented_values(codec):
    assert codecs.block_size(codec) == BLOCK[codec]
    for rounding in ROUNDINGS:
        assert codecs.error_bound(codec, rounding) == pytest.approx(BOUNDS[codec][rounding], rel=1e-12)
    assert codecs.error_bound(codec) == codecs.error_bound(codec, "nearest")


def in_blocks(x, codec):
    return torch.nn.functional.pad(x, (0, -x.numel() % BLOCK[codec])).reshape(-1, BLOCK[codec])


def counts(numel, codec):
    return in_blocks(torch.ones(numel), codec).sum(1)


def check_bounds(x, codec, rounding, device, **options):
    """Check the bounds for finite fp32 numbers within the range of the codec."""
    most, typical = BOUNDS[codec][rounding]
    given, decoded = x.to(device), torch.empty(x.shape, device=device)
    encoded = codecs.encode(given, codec, rounding=rounding, decoded=decoded, **options)
    assert torch.equal(codecs.decode(encoded), decoded)
    exact, decoded = in_blocks(x.double(), codec), in_blocks(decoded.cpu().double(), codec)
    assert decoded.isfinite().all()
    error, absmax = (decoded - exact).abs(), exact.abs().amax(1)
    if codec not in SCALED:
        absmax = absmax.clamp(min=SMALLEST_NORMAL.get(codec, 0.0))
    of_sign = codec == "sign" and rounding == "nearest"
    size = counts(x.numel(), codec)
    statistic = exact.abs().sum(1) / size if of_sign else absmax
    # The mean is computed in fp32, so a block at the threshold may be on either side of it.
    zero, kept = statistic < TINY / SLACK, statistic >= TINY * (SLACK if of_sign else 1)
    if codec in SCALED:
        assert (decoded[zero] == 0).all()
    else:
        kept = torch.ones_like(kept)
    assert (error[kept] <= (most * SLACK * absmax[kept])[:, None]).all()
    if rounding == "nearest":
        mean_square = (error / absmax.clamp(min=2.0**-149)[:, None]).square().sum(1) / size
        assert (mean_square[kept].sqrt() <= typical * SLACK).all()
    if codec == "fp8":
        of_element = 2.0**-4 if rounding == "nearest" else 2.0**-3
        floor = absmax * 2.0**-6 / 448
        assert (error[kept] <= of_element * SLACK * exact[kept].abs().maximum(floor[kept][:, None])).all()


def spread_out(numel, tops, spread, seed):
    """Make chunks of 64 numbers with magnitudes from the chunk's largest down to 2^-spread of it."""
    generator = torch.Generator().manual_seed(seed)
    top = torch.tensor(tops).repeat_interleave(64).repeat(numel // (64 * len(tops)) + 1)[:numel]
    exponents = (top - torch.randint(0, spread + 1, (numel,), generator=generator)).double()
    mantissas = 1 + torch.rand(numel, generator=generator, dtype=torch.float64)
    signs = 2.0 * torch.randint(0, 2, (numel,), generator=generator) - 1
    return (signs * mantissas * exponents.exp2()).float().clamp(-LARGEST, LARGEST)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("codec", codecs.CODECS)
@property_test(60, data=st.data())
def test_errors_are_within_bounds(codec, rounding, device, data):
    highest = {"fp16": 14, "bf16": 126}.get(codec, 127)
    exponents = st.one_of(st.integers(-150, highest), st.integers(-12, 12), st.sampled_from([highest, -117, -118]))
    x = spread_out(
        data.draw(st.integers(0, 700)),
        data.draw(st.lists(exponents, min_size=1, max_size=6)),
        data.draw(st.sampled_from([0, 1, 3, 10, 40, 150])),
        data.draw(st.integers(0, 10**6)),
    )
    seed, step = data.draw(st.integers(0, 2**63 - 1)), data.draw(st.integers(0, 2**32 - 1))
    check_bounds(x, codec, rounding, device, seed=seed, step=step)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("codec", codecs.CODECS)
@property_test(60, values=st.lists(st.floats(-LARGEST, LARGEST, width=32), max_size=40))
def test_errors_of_any_floats_are_within_bounds(codec, rounding, device, values):
    room = {"fp16": 65504.0, "bf16": torch.finfo(torch.bfloat16).max}.get(codec, LARGEST)
    check_bounds(torch.tensor(values).clamp(-room, room), codec, rounding, device)


# Blocks with the largest rounding error: numbers halfway between neighbours at the largest distance.
WORST = {
    "fp16": lambda n: torch.full((n,), 1 + 2.0**-11),
    "bf16": lambda n: torch.full((n,), 1 + 2.0**-8),
    "fp8": lambda n: torch.full((n,), 432.0).index_fill(0, torch.tensor([0]), 448.0),
    "int8": lambda n: torch.full((n,), 62.5).index_fill(0, torch.tensor([0]), 127.0),
    "int4": lambda n: torch.full((n,), -2.5).index_fill(0, torch.tensor([0]), 7.0),
    "sign": lambda n: torch.full((n,), 2.0**-20).index_fill(0, torch.tensor([0]), 1.0),
}


@pytest.mark.parametrize("codec", WORST)
def test_bounds_are_reached(codec, device):
    """The tests above fail if a documented bound is too small; this one fails if it is too large."""
    x = WORST[codec](BLOCK[codec])
    error = (codecs.decode(codecs.encode(x.to(device), codec)).cpu() - x).abs().max() / x.abs().max()
    assert BOUNDS[codec]["nearest"][0] == pytest.approx(error.item(), rel=0.01)


@pytest.mark.parametrize("codec", WORST)
def test_stochastic_errors_are_within_the_bound_on_average(codec, device):
    """Compare the mean of about 500,000 squared errors with the bound, which has to be reached here, too."""
    x = WORST[codec](BLOCK[codec]).repeat(2**19 // BLOCK[codec])
    rounded = codecs.decode(codecs.encode(x.to(device), codec, rounding="stochastic", seed=1)).cpu()
    square = (in_blocks((rounded - x).double(), codec) / in_blocks(x.double(), codec).amax(1, keepdim=True)).square()
    mean, deviation = square.mean().item(), square.std().item() / square.numel() ** 0.5
    bound = BOUNDS[codec]["stochastic"][1] ** 2
    assert 0.9 * bound <= mean <= bound * SLACK**2 + 5 * deviation
    assert square.max() <= (BOUNDS[codec]["stochastic"][0] * SLACK) ** 2


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("codec", codecs.CODECS)
def test_blocks_of_any_length(codec, rounding, device):
    generator = torch.Generator().manual_seed(0)
    for numel in range(2 * BLOCK[codec] + 40):
        check_bounds(torch.randn(numel, generator=generator), codec, rounding, device)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("codec", ["raw", *SCALED])
def test_the_largest_numbers(codec, rounding, device):
    for numel in range(1, BLOCK[codec] + 2):
        for value in (LARGEST, -LARGEST):
            check_bounds(torch.full((numel,), value), codec, rounding, device)
    generator = torch.Generator().manual_seed(0)
    mixed = (torch.rand(4096, generator=generator) * 2 - 1) * LARGEST
    mixed[::7] = LARGEST
    check_bounds(mixed, codec, rounding, device)


@with_feedback(["raw", *SCALED])
def test_feedback_of_the_largest_numbers_stays_finite(codec, rounding, device):
    """A residual that is not finite would be in all later sums."""
    residual = torch.zeros(4096, device=device)
    values = torch.linspace(-LARGEST, LARGEST, 4096, dtype=torch.float64).float().to(device)
    encoded = codecs.encode(values, codec, residual=residual, rounding=rounding)
    assert codecs.decode(encoded).isfinite().all()
    assert residual.isfinite().all()


@with_feedback(codecs.CODECS)
def test_the_smallest_numbers(codec, rounding, device):
    """A block at the threshold is encoded, and a smaller one becomes zero. Codecs without scales have no threshold."""
    below = torch.tensor(TINY).nextafter(torch.tensor(0.0)).item()
    for numel in (1, 2, 64, 128, 256):  # powers of two, whose mean is exact
        check_bounds(torch.full((numel,), TINY), codec, rounding, device)
        for value in (0.0, -0.0, 2.0**-149, -(2.0**-149), 2.0**-126, 2.0**-127, below, -below):
            x = torch.full((numel,), value, device=device)
            check_bounds(x.cpu(), codec, rounding, device)
            residual, encoded = torch.zeros_like(x), codecs.encode(x, codec, rounding=rounding)
            codecs.encode(x, codec, rounding=rounding, residual=residual)
            if codec in SCALED:
                assert not codecs.decode(encoded).any()
                assert torch.equal(residual, x), "a block below the threshold stays in the residual"
            elif codec == "raw":
                assert torch.equal(codecs.decode(encoded), x)


def clean(codec):
    """Make three whole blocks and a short one."""
    return torch.randn(3 * BLOCK[codec] + BLOCK[codec] // 2 + 1, generator=torch.Generator().manual_seed(0))


def places(codec):
    """Return elements of the middle block (its ends, and those of words and vectors), and the last element of all."""
    block = BLOCK[codec]
    inside = sorted({0, 1, 7, 31, 32, 63, 64, block // 2, block - 1} & set(range(block)))
    return [block + i for i in inside] + [clean(codec).numel() - 1]


@with_feedback(codecs.CODECS)
@pytest.mark.parametrize("value", [NAN, -NAN, INF, -INF])
def test_what_is_not_finite_makes_its_block_nan(codec, rounding, value, device):
    """The residual of the block is kept, and the neighbouring blocks do not change."""
    x = clean(codec)
    kept = torch.full_like(x, 0.125).to(device)
    plain, stats = codecs.decode(
        codecs.encode(x.to(device), codec, rounding=rounding, residual=kept), return_stats=True
    )
    assert stats.found_inf.item() == 0
    for place in places(codec):
        spoilt = x.clone()
        spoilt[place] = value
        residual, decoded = torch.full_like(x, 0.125).to(device), torch.empty_like(x).to(device)
        options = {"rounding": rounding, "residual": residual, "decoded": decoded}
        encoded = codecs.encode(spoilt.to(device), codec, **options)
        values, stats = codecs.decode(encoded, return_stats=True)
        block = torch.arange(x.numel()) // BLOCK[codec] == place // BLOCK[codec]
        for found in (values, decoded):
            assert found[block].isnan().all()
            assert torch.equal(found[~block], plain[~block])
        assert (residual[block] == 0.125).all()
        assert torch.equal(residual[~block], kept[~block])
        assert stats.found_inf.item() == 1
        again, stats = codecs.decode(encoded, torch.empty_like(x).half().to(device), return_stats=True)
        assert again[block].isnan().all() and stats.found_inf.item() == 1


@with_feedback(codecs.CODECS)
def test_nan_blocks_stay_nan_in_sums(codec, rounding, device):
    """A block of the second received message, another one of the third, and a third one of own are not finite."""
    block = BLOCK[codec]
    terms = [clean(codec) for _ in range(4)]
    terms[1][0], terms[2][block], terms[3][-1] = NAN, INF, -INF
    received = [codecs.encode(term.to(device), codec) for term in terms[:3]]
    residual = torch.zeros_like(terms[3]).to(device)
    want = torch.tensor([number in (0, 1, 3) for number in range(4)]).repeat_interleave(block)[: terms[0].numel()]
    for position in range(4):
        options = {"position": position, "rounding": rounding, "residual": residual}
        encoded = codecs.reduce(terms[3].to(device), received, **options)
        values, stats = codecs.decode(encoded, return_stats=True)
        assert torch.equal(values.isnan().cpu(), want) and not values.isinf().any()
        assert stats.found_inf.item() == 1
        assert residual.isfinite().all() and (residual.cpu()[want] == 0).all()


@pytest.mark.parametrize("codec", ["raw", *SCALED])
def test_sums_that_overflow(codec, device):
    own = clean(codec).to(device)
    own[BLOCK[codec]] = LARGEST
    received = [codecs.encode(own, codec, rounding="stochastic")]  # it keeps the largest number
    values, stats = codecs.decode(codecs.reduce(own, received), return_stats=True)
    spoilt = torch.arange(own.numel()) // BLOCK[codec] == 1
    assert torch.equal(values.isnan().cpu(), spoilt)
    assert stats.found_inf.item() == 1


@pytest.mark.parametrize("loss_scale", [0.5, 1e-40, 0.0])
@pytest.mark.parametrize("codec", codecs.CODECS)
def test_finite_blocks_leave_a_finite_residual(codec, loss_scale, device):
    """The loss may be too large for the residual, in its units, and is then not kept."""
    residual = torch.zeros(256, device=device)
    x = torch.full((256,), 1e30, device=device).index_fill(0, torch.tensor([0], device=device), 3e38)
    codecs.encode(x, codec, residual=residual, loss_scale=torch.tensor(loss_scale, device=device))
    assert residual.isfinite().all()


@pytest.mark.parametrize("what", ["residual", "scale", "loss_scale"])
@pytest.mark.parametrize("codec", codecs.CODECS)
def test_values_that_become_infinite_before_encoding(codec, what, device):
    x = torch.ones(BLOCK[codec], device=device)
    residual = torch.full_like(x, INF if what == "residual" else 0.5)
    up = torch.tensor(INF if what == "loss_scale" else 1.0, device=device)
    before = residual.clone()
    scale = INF if what == "scale" else 1.0
    encoded = codecs.encode(x, codec, residual=residual, scale=scale, loss_scale=up)
    assert codecs.decode(encoded).isnan().all()
    assert torch.equal(residual, before)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(("codec", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_overflow_in_two_byte_codecs(codec, dtype, rounding, device):
    """A number at or above halfway to the missing power of two is rounded up to it, which is an overflow."""
    largest = torch.finfo(dtype).max
    missing = 2.0**16 if codec == "fp16" else 2.0**128
    halfway = torch.tensor((largest + missing) / 2)
    fits = halfway.nextafter(torch.tensor(0.0))
    values = [largest, fits.item(), halfway.item(), LARGEST, 1.0]
    for sign in (1, -1):
        x = sign * torch.tensor(values, device=device)
        residual = torch.full_like(x, 2.0**-60)
        encoded = codecs.encode(x, codec, rounding=rounding, residual=residual)
        decoded, stats = codecs.decode(encoded, return_stats=True)
        assert (sign * decoded[:2]).tolist() == [largest] * 2
        assert decoded[2:4].isnan().all() and decoded[4] == sign
        assert (residual[2:4] == 2.0**-60).all() and residual.isfinite().all()
        assert stats.found_inf.item() == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("codec", SCALED)
def test_own_elements_in_half_types(codec, dtype, device):
    """The same bounds apply, relative to the given elements, and an infinity of the half type is an infinity."""
    x = (torch.randn(700, generator=torch.Generator().manual_seed(0)) * 1000).to(dtype)
    want = codecs.encode(x.float().to(device), codec)
    assert torch.equal(codecs.encode(x.to(device), codec).wire, want.wire)
    x[-1] = INF
    assert codecs.decode(codecs.encode(x.to(device), codec))[-1].isnan()
