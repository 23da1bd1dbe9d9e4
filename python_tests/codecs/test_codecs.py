"""Codecs: given bytes, comparisons with torch's dtypes and with the reference; arguments, results and errors."""

import functools
import hashlib
import itertools
import os
import random
import sys

import commands
import pytest
import torch
from ranks import run_ranks
from torch import library

from dltrain_ext import _ops, codecs, reference

BLOCK = {codec.name: codec.block for codec in _ops.codecs()}
SCALED = [codec.name for codec in _ops.codecs() if codec.scaled]
ROUNDINGS = ["nearest", "stochastic"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN, INF = float("nan"), float("inf")


def at(numel, values):
    """Return zeros, with the given values at their indices."""
    return [values.get(i, 0.0) for i in range(numel)]


GOLDEN = [
    ("raw", [1.0, -2.0, -0.0, 2.0**-149, NAN, -INF], "0000803f 000000c0 00000080 01000000 0000c07f 0000c07f"),
    # Ties are rounded to even.
    ("fp16", [1.0, -2.0, 1 + 2**-11, 1 + 3 * 2**-11, -0.0], "003c 00c0 003c 023c 0080"),
    ("fp16", [2**-24, 2**-25, 3 * 2**-25, -(2**-14)], "0100 0000 0200 0084"),
    ("fp16", [65504.0, 65519.0, 65520.0, -65520.0, NAN, INF], "ff7b ff7b 007e 007e 007e 007e"),
    ("bf16", [1.0, -2.0, 1 + 2**-8, 1 + 3 * 2**-8, 2.0**-133], "803f 00c0 803f 823f 0100"),
    ("bf16", [3.3895313892515355e38, -3.4e38, NAN, INF], "7f7f c07f c07f c07f"),
    # The scale is 448 / 448; 1 is 2^0, with exponent 7. Then ties of normal numbers and of the smallest ones.
    ("fp8", [448.0, -1.0, 0.5, 0.0], "0000803f 7e b8 30 00"),
    ("fp8", [448.0, 17.0, 19.0, 2**-9, 2**-10, 3 * 2**-10], "0000803f 7e 58 5a 01 00 02"),
    ("fp8", [-896.0, 2.0], "00000040 fe 38"),
    # Two scales, the whole first block, and a short second block.
    (
        "int8",
        [*at(256, {0: 127.0, 255: -127.0}), 31.75, -0.25, 0.125, 0.375],
        "0000803f 0000803e 7f" + "00" * 254 + "81 7f ff 00 02",
    ),
    # Element j is the low half of byte j, and element j + 64 the high half; 8 is added to each.
    (
        "int4",
        at(128, {0: 7.0, 64: -7.0, 1: 1.0, 65: 2.0, 63: -3.0, 127: -1.0}),
        "0000803f 1f a9" + "88" * 61 + "75",
    ),
    ("int4", at(66, {0: 3.5, 64: -3.5, 65: 0.5}), "0000003f 1f 98" + "08" * 62),
    ("int4", [7.0, -7.0, 0.5, 1.5, 2.5], "0000803f 0f 01 08 0a 0a"),
    (
        "int4",
        at(130, {0: 7.0, 128: -14.0, 129: 2.0}),
        "0000803f 00000040 8f" + "88" * 63 + "01 09",
    ),
    # Element j + 32 b is bit b of byte j.
    (
        "sign",
        [-2.0 if i in (0, 33, 255) else 2.0 for i in range(256)],
        "00000040 01 02" + "00" * 29 + "80",
    ),
    ("sign", [-0.5 if i in (0, 32, 63) else 0.5 for i in range(64)], "0000003f 03" + "00" * 30 + "02"),
    ("sign", [1.0, 3.0, -1.0, -3.0], "00000040 00 00 01 01"),
    *((codec, [1.0, value, -2.0], "0000c07f 00 00 00") for codec in SCALED for value in (NAN, INF, -INF)),
    *((codec, [0.0, 0.0], "00000000 08 08" if codec == "int4" else "00000000 00 00") for codec in SCALED),
    *((codec, [], "") for codec in codecs.CODECS),
]


@pytest.mark.parametrize(("codec", "values", "message"), GOLDEN, ids=[case[0] for case in GOLDEN])
def test_bytes_by_hand(codec, values, message, device):
    encoded = codecs.encode(torch.tensor(values, dtype=torch.float32, device=device), codec)
    assert encoded.wire.cpu().numpy().tobytes().hex() == message.replace(" ", "")
    assert encoded.nbytes == codecs.nbytes(codec, len(values)) == len(bytes.fromhex(message))
    written = torch.tensor(list(bytes.fromhex(message)), dtype=torch.uint8)
    want = torch.empty(len(values))
    reference.decode_(written, codec, want)
    assert_same_bits(codecs.decode(encoded), want)


def bits(tensor):
    return tensor.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[tensor.element_size()])


def assert_same_bits(ours, want):
    """Compare all bits, except those within a NaN."""
    ours = ours.detach().cpu()
    assert torch.equal(ours.isnan(), want.isnan())
    assert torch.equal(torch.where(ours.isnan(), 0, bits(ours)), torch.where(want.isnan(), 0, bits(want)))


def finite_patterns(dtype):
    patterns = torch.arange(2**16).to(torch.uint16).view(dtype)
    return patterns[patterns.isfinite()]


def around_ties(grid):
    """Return the midpoints between neighbours of a grid, and the floats next to them."""
    grid = grid.double().unique()
    halfway = ((grid[1:] + grid[:-1]) / 2).float()
    return torch.cat([halfway, halfway.nextafter(torch.tensor(INF)), halfway.nextafter(torch.tensor(-INF))])


@pytest.mark.parametrize(("codec", "dtype", "nan"), [("fp16", torch.float16, 0x7E00), ("bf16", torch.bfloat16, 0x7FC0)])
def test_two_byte_codecs_equal_torchs_dtypes(codec, dtype, nan, device):
    exact = finite_patterns(dtype)
    generator = torch.Generator().manual_seed(0)
    anything = torch.randint(-(2**31), 2**31, (300_000,), generator=generator).to(torch.int32).view(torch.float32)
    for x in (exact.float(), around_ties(exact), anything):
        want = x.to(dtype)
        wire = codecs.encode(x.to(device), codec).wire.cpu().view(torch.int16)
        assert torch.equal(wire, torch.where(want.isfinite(), want.view(torch.int16), nan))
    for rounding in ROUNDINGS:
        encoded = codecs.encode(exact.to(device), codec, rounding=rounding)
        assert torch.equal(encoded.wire.cpu().view(torch.int16), exact.view(torch.int16)), "these do not change"
        assert_same_bits(codecs.decode(encoded), exact)


def test_fp8_equals_torchs_dtype(device):
    """With 448 in each block the scale is 1."""
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    exact = codes.float()[codes.float().isfinite()]
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(100_000, generator=generator) * torch.randint(-20, 7, (100_000,), generator=generator).exp2()
    for x in (exact, around_ties(exact), spread.clamp(-448, 448)):
        blocks = torch.nn.functional.pad(x, (0, -len(x) % 127)).reshape(-1, 127)
        blocks = torch.nn.functional.pad(blocks, (1, 0), value=448.0)
        encoded = codecs.encode(blocks.to(device), "fp8")
        want = blocks.to(torch.float8_e4m3fn)
        assert torch.equal(encoded.wire[4 * len(blocks) :].cpu(), want.view(torch.uint8).flatten())
        assert_same_bits(codecs.decode(encoded), want.float())
    message = codecs.encode(torch.full((256,), 448.0, device=device), "fp8")
    message.wire[8:] = torch.arange(256)
    assert_same_bits(codecs.decode(message).cpu(), codes.float())


def sample(numel, dtype, seed):
    """Make chunks of many magnitudes, of zeros, of tiny and of huge numbers, with some elements that are not finite."""
    generator = torch.Generator().manual_seed(seed)

    def pick(low, high, size):
        return torch.randint(low, high, (size,), generator=generator)

    chunks = max(1, -(-numel // 32))
    exponents = torch.where(pick(0, 4, chunks) == 0, pick(-140, 124, chunks), pick(-12, 12, chunks))
    x = torch.randn(32 * chunks, generator=generator) * pick(-3, 4, 32 * chunks).exp2()
    x = x * (exponents.exp2() * (pick(0, 8, chunks) > 0)).repeat_interleave(32)
    for value in (NAN, INF):
        if pick(0, 4, 1) == 0:
            x[pick(0, 32 * chunks, 1)] = value
    return x[:numel].to(dtype)


@functools.cache
def message(codec, numel, seed):
    wire = torch.empty(codecs.nbytes(codec, numel), dtype=torch.uint8)
    reference.encode_sum_(sample(numel, torch.float32, seed), [], codec, wire=wire)
    return wire


def lengths(codec):
    block = BLOCK[codec] if BLOCK[codec] > 1 else 256
    return [0, 1, 5, block // 2 + 1, block - 1, block, block + 1, 2 * block, 12 * block + 77]


class Case:
    """The arguments of one call, which are the same on the CPU and on another device."""

    def __init__(self, codec, stochastic, draw, encodes=True):
        self.numel, self.codec = draw.choice(lengths(codec)), codec
        self.count = draw.choice([0, 1, 3])
        self.options = {
            "position": draw.randint(0, self.count),
            "scale": draw.choice([1.0, 0.5, 1 / 3]),
            "stochastic": stochastic,
            "seed": draw.choice([0, 7, 2**40 + 3]),
            "step": draw.choice([0, 9, 2**32 - 1]),
            "rank": draw.choice([0, 5]),
            "first": draw.choice([0, 4 * 77, 2**35]),
        }
        self.dtype, self.seed, self.encodes = draw.choice(DTYPES), draw.randint(0, 10**6), encodes
        feeds = encodes and not (codec == "sign" and stochastic)
        self.feedback = draw.choice([None, torch.float32, torch.bfloat16]) if feeds else None
        self.loss_scale = draw.choice([None, 1024.0, 1000.0, 2.0**-6])
        self.decoded = draw.choice([None, "in place", *DTYPES]) if encodes else draw.choice(["in place", *DTYPES])

    def __str__(self):
        return str(vars(self))

    def run(self, operation, device="cpu"):
        own = sample(self.numel, self.dtype, self.seed).to(device)
        received = [message(self.codec, self.numel, seed).to(device) for seed in range(self.count)]
        written = {"wire": None, "residual": None, "decoded": None}
        if self.encodes:
            written["wire"] = torch.full((codecs.nbytes(self.codec, self.numel),), 0xAA, dtype=torch.uint8).to(device)
        if self.feedback:
            written["residual"] = sample(self.numel, self.feedback, self.seed + 1).to(device)
        if self.decoded == "in place":
            written["decoded"] = own
        elif self.decoded:
            written["decoded"] = torch.full((self.numel,), -7.0, dtype=self.decoded, device=device)
        up = None if self.loss_scale is None else torch.tensor(self.loss_scale, device=device)
        before = own.clone()
        operation(own, received, self.codec, loss_scale=up, **written, **self.options)
        if self.decoded != "in place":
            assert_same_bits(own, before.cpu())
        return written


@pytest.mark.parametrize("stochastic", [False, True], ids=ROUNDINGS)
@pytest.mark.parametrize("codec", codecs.CODECS)
def test_encoding_equals_the_reference(codec, stochastic, device):
    draw = random.Random(f"{codec} {stochastic}")
    for _ in range(200):
        case = Case(codec, stochastic, draw)
        ours, want = case.run(_ops.encode_sum_, device), case.run(reference.encode_sum_)
        assert torch.equal(ours["wire"].cpu(), want["wire"]), case
        for name in ("residual", "decoded"):
            if want[name] is not None:
                assert_same_bits(ours[name], want[name])


@pytest.mark.parametrize("codec", codecs.CODECS)
def test_sums_that_are_not_encoded(codec, device):
    draw = random.Random(codec)
    for _ in range(60):
        case = Case(codec, False, draw, encodes=False)
        ours, want = case.run(_ops.encode_sum_, device), case.run(reference.encode_sum_)
        assert_same_bits(ours["decoded"], want["decoded"])


@pytest.mark.parametrize("codec", codecs.CODECS)
def test_decoding_equals_the_reference(codec, device):
    for numel, dtype in itertools.product(lengths(codec), DTYPES):
        wire = message(codec, numel, 3)
        ours = {"out": torch.full((numel,), -7.0, dtype=dtype, device=device)}
        want = {"out": torch.empty(numel, dtype=dtype)}
        for held, place in ((ours, device), (want, "cpu")):
            held["sum_squares"] = torch.full((), -7.0, dtype=torch.float64, device=place)
            held["found_inf"] = torch.full((), -7.0, device=place)
        _ops.decode_(wire.to(device), codec, **ours)
        reference.decode_(wire, codec, **want)
        assert_same_bits(ours["out"], want["out"])
        assert ours["found_inf"].item() == want["found_inf"].item()
        assert ours["found_inf"].item() or ours["sum_squares"].item() == pytest.approx(
            want["sum_squares"].item(), 1e-12
        )


def test_sums_of_squares_of_many_elements(device):
    """There are more tiles than one pass adds up."""
    x = torch.randn(70_000, generator=torch.Generator().manual_seed(0)).to(device)
    for codec in codecs.CODECS:
        values, stats = codecs.decode(codecs.encode(x, codec), return_stats=True)
        assert stats.sum_squares.item() == pytest.approx(values.double().square().sum().item(), 1e-12)
        assert stats.found_inf.item() == 0
        assert (stats.sum_squares.dtype, stats.found_inf.dtype) == (torch.float64, torch.float32)


def test_sums_have_the_given_order(device):
    """1 is lost if it is added to 1e8."""
    big, small = (codecs.encode(torch.tensor([value], device=device), "raw") for value in (1e8, -1e8))
    own = torch.ones(1, device=device)
    sums = [codecs.decode(codecs.reduce(own, [big, small], position=position)).item() for position in range(3)]
    assert sums == [0.0, 0.0, 1.0]


def digest():
    """Return the instruction set and a digest of what the codecs compute with it."""
    generator = torch.Generator().manual_seed(0)
    seen = hashlib.sha256()
    for numel in (1, 31, 256, 30001):
        own, residual, other = torch.randn(3, numel, generator=generator)
        own *= torch.randint(-20, 20, (numel,), generator=generator).exp2()
        own[numel // 2 :: 5000] = float("nan")
        for codec, rounding in itertools.product(codecs.CODECS, ROUNDINGS):
            decoded, kept = torch.empty(numel, dtype=torch.bfloat16), residual.clone()
            options = {"decoded": decoded, "rounding": rounding, "seed": 5, "scale": 0.3}
            if (codec, rounding) != ("sign", "stochastic"):
                options["residual"] = kept
            encoded = codecs.reduce(own, [codecs.encode(other, codec)], position=1, **options)
            values, stats = codecs.decode(encoded, return_stats=True)
            for tensor in (decoded, values, stats.sum_squares):
                tensor.nan_to_num_(7.0)
            for tensor in (encoded.wire, decoded.float(), kept, values, *stats):
                seen.update(tensor.numpy().tobytes())
    large = torch.randn(2**22 + 77, generator=generator)  # larger than a cache, so non-temporal stores are used
    for codec in codecs.CODECS:
        encoded = codecs.encode(large, codec)
        narrow = codecs.decode(encoded, torch.empty_like(large).half()).float()
        for tensor in (encoded.wire, codecs.decode(encoded), narrow):
            seen.update(tensor.numpy().tobytes())
    return _ops.instruction_set(), seen.hexdigest()


def test_every_instruction_set_gives_the_same_bytes():
    """Each other instruction set needs a process of its own, because it is selected when the package is loaded."""
    chosen, expected = digest()
    others = {*_ops.instruction_sets()} - {chosen}
    assert "portable" in others
    for name in others:
        environment = {"PYTHONPATH": os.pathsep.join(sys.path), "DLTRAIN_INSTRUCTION_SET": name}
        done = commands.python("-c", "import test_codecs; print(*test_codecs.digest())", **environment)
        assert done.stdout.split() == [name, expected], done.stderr


@pytest.mark.parametrize("codec", codecs.CODECS)
def test_tensors_larger_than_a_cache(codec, device):
    """These are written with non-temporal stores in whole lines, and small tensors and all ends with usual stores."""
    piece, numel = 2**20, 2**24 + 256 * 5 + 77
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(device)
    whole = codecs.encode(x, codec)
    pieces = [codecs.encode(part, codec) for part in x.split(piece)]
    scales = [part.wire[: part.nbytes - payload(codec, part.numel)] for part in pieces]
    units = [part.wire[part.nbytes - payload(codec, part.numel) :] for part in pieces]
    assert torch.equal(whole.wire, torch.cat([*scales, *units]))
    expected = torch.cat([codecs.decode(part) for part in pieces])
    for dtype in DTYPES:
        room = torch.full((numel + 2,), -7.0, dtype=dtype, device=device)
        codecs.decode(whole, room[1:-1])
        assert torch.equal(room[1:-1], expected.to(dtype))
        assert room[0] == room[-1] == -7.0


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("codec", codecs.CODECS)
def test_a_hundred_million_elements_have_the_bits_of_the_cpu(codec, rounding):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10**8, generator=generator)
    x *= torch.randint(-30, 30, (10**8 // 1000, 1), generator=generator).float().exp2().expand(-1, 1000).reshape(-1)
    there = codecs.encode(x.cuda(), codec, rounding=rounding, seed=1)
    here = codecs.encode(x, codec, rounding=rounding, seed=1)
    assert torch.equal(there.wire.cpu(), here.wire)
    (values, stats), (want, known) = (codecs.decode(message, return_stats=True) for message in (there, here))
    assert_same_bits(values, want)
    for number, other in zip(stats, known, strict=True):
        assert_same_bits(number, other)


def payload(codec, numel):
    """Return the bytes of a message without its scales."""
    return codecs.nbytes(codec, numel) - (4 * -(-numel // BLOCK[codec]) if BLOCK[codec] > 1 else 0)


# Arguments and results of the API.


def values_of(numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


class Foreign:
    """An array of a library that torch does not know."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __array_namespace__(self, **options):
        return type(self)

    @classmethod
    def from_dlpack(cls, other):
        return cls(torch.from_dlpack(other))

    @property
    def shape(self):
        return self.tensor.shape


def numpy_array(tensor):
    return pytest.importorskip("numpy").from_dlpack(tensor).copy()


def jax_array(tensor):
    return pytest.importorskip("jax.numpy").asarray(tensor.numpy())


def cupy_array(tensor):
    return pytest.importorskip("cupy").asarray(tensor.numpy())


@pytest.mark.parametrize("array_of", [numpy_array, Foreign, jax_array, pytest.param(cupy_array, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_arrays_give_arrays_of_the_same_library(array_of, dtype):
    x = values_of(15).to(dtype).reshape(3, 5)
    array = array_of(x)
    for codec in codecs.CODECS:
        encoded, want = codecs.encode(array, codec), codecs.encode(x, codec)
        assert type(encoded.wire) is type(array)
        assert (encoded.codec, encoded.shape, encoded.dtype, encoded.nbytes) == (codec, (3, 5), dtype, want.nbytes)
        assert torch.equal(torch.from_dlpack(encoded.wire).cpu(), want.wire)
        values = codecs.decode(encoded)
        assert type(values) is type(array)
        assert_same_bits(torch.from_dlpack(values), codecs.decode(want))
        again = codecs.reduce(array, [encoded])
        assert torch.equal(torch.from_dlpack(again.wire).cpu(), codecs.reduce(x, [want]).wire)


@pytest.mark.parametrize("array_of", [numpy_array, Foreign])
def test_arrays_as_outputs(array_of):
    x = values_of(300)
    room = codecs.Encoded(array_of(torch.zeros(codecs.nbytes("int4", 300), dtype=torch.uint8)), "int4", (300,), x.dtype)
    assert codecs.encode(array_of(x), "int4", out=room) is room
    assert torch.equal(torch.from_dlpack(room.wire), codecs.encode(x, "int4").wire)
    values = array_of(torch.zeros(300))
    assert codecs.decode(room, values) is values
    assert torch.equal(torch.from_dlpack(values), codecs.decode(codecs.encode(x, "int4")))


def test_arrays_of_numpy_that_are_not_dense():
    numpy = pytest.importorskip("numpy")
    array = values_of(60).numpy().reshape(6, 10)
    for view in (
        array.T,
        array[::2, 1:],
        array[:0],
        numpy.array(2.5, numpy.float32),
        numpy.broadcast_to(array[:1], (4, 10)),
    ):
        dense = torch.tensor(view)
        encoded = codecs.encode(view, "int8")
        assert torch.equal(torch.from_dlpack(encoded.wire), codecs.encode(dense, "int8").wire)
        assert encoded.shape == view.shape
    target = numpy.zeros((10, 6), dtype=numpy.float32)
    codecs.decode(codecs.encode(array, "raw"), target.T)
    assert numpy.array_equal(target.T, array)


class Unheard:
    """An array of a library that does not accept arrays of other libraries."""

    def __dlpack__(self, **_):
        raise BufferError("no memory")


class Empty(Unheard):
    def __array_namespace__(self):
        return torch


@pytest.mark.parametrize(
    ("match", "array"),
    [
        (r"tensor: expected a tensor or an object with __dlpack__, got list", [1.0]),
        (r"tensor: expected an array of a library with from_dlpack, got Unheard", Unheard()),
        (r"tensor: expected an array that torch.from_dlpack accepts, got the error", Empty()),
    ],
)
def test_errors_for_arrays_that_torch_cannot_convert(match, array):
    with pytest.raises((TypeError, ValueError), match=match):
        codecs.encode(array, "int8")


def go_backwards(rank, world_size):
    import numpy

    array = numpy.arange(5, dtype=numpy.float32)[::-1]
    try:
        return codecs.decode(codecs.encode(array, "raw")).tolist() == array.tolist()
    except (TypeError, ValueError) as error:
        return str(error).startswith("tensor: ")


def test_arrays_with_negative_strides_do_not_crash():
    assert run_ranks(1, go_backwards, fresh=True) == [True]


def test_read_only_arrays_are_not_written():
    array = values_of(5).numpy()
    array.setflags(write=False)
    before, encoded = array.copy(), codecs.encode(array, "int4")
    with pytest.raises((TypeError, ValueError, BufferError)):
        codecs.decode(encoded, array)
    assert (array == before).all()


LAYOUTS = [
    lambda x: x.reshape(6, 10).T,
    lambda x: x[::3],
    lambda x: x.reshape(1, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    lambda x: x[:1].expand(9),
    lambda x: torch._neg_view(x),
    lambda x: x[1:],
    lambda x: x.requires_grad_(),
    lambda x: torch.nn.Parameter(x),
    lambda x: x.reshape(0, 5) if x.numel() == 0 else x[:0].reshape(0, 5),
    lambda x: x[7],
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codec", codecs.CODECS)
def test_layouts(layout, codec, device):
    x = layout(values_of(60).to(device))
    dense = torch.tensor(x.tolist(), device=device).reshape(x.shape)
    encoded = codecs.encode(x, codec)
    assert torch.equal(encoded.wire, codecs.encode(dense, codec).wire)
    assert encoded.shape == tuple(x.shape)
    values = codecs.decode(encoded)
    assert (values.shape, values.dtype, values.requires_grad) == (x.shape, x.dtype, False)


def test_decoding_to_layouts(device):
    x = values_of(60).to(device)
    encoded = codecs.encode(x.reshape(6, 10), "int8")
    want = codecs.decode(encoded)
    target = torch.zeros(10, 6, device=device)
    assert codecs.decode(encoded, target.T) is not None
    assert torch.equal(target.T, want)
    strided = torch.full((120,), -7.0, device=device)
    codecs.decode(encoded, strided[::2])
    assert torch.equal(strided[::2], want.flatten()) and (strided[1::2] == -7).all()
    unaligned = torch.zeros(61, dtype=torch.float16, device=device)
    codecs.decode(encoded, unaligned[1:])
    assert torch.equal(unaligned[1:], want.half().flatten()) and unaligned[0] == 0


@pytest.mark.parametrize("codec", codecs.CODECS)
@pytest.mark.parametrize("numel", [0, 1, 700])
def test_nothing_outside_of_the_tensors_is_written(codec, numel, device):
    size = codecs.nbytes(codec, numel)
    held = {
        "wire": torch.full((size + 64,), 0xAA, dtype=torch.uint8, device=device),
        "residual": torch.full((numel + 64,), -7.0, device=device),
        "decoded": torch.full((numel + 64,), -7.0, dtype=torch.bfloat16, device=device),
    }
    inside = {"wire": slice(32, 32 + size), "residual": slice(32, 32 + numel), "decoded": slice(32, 32 + numel)}
    _ops.encode_sum_(
        values_of(numel).to(device), [], codec, **{name: tensor[inside[name]] for name, tensor in held.items()}
    )
    out = torch.full((numel + 64,), -7.0, device=device)
    _ops.decode_(held["wire"][inside["wire"]], codec, out[32 : 32 + numel])
    for tensor, edge in ((held["wire"], 0xAA), (held["residual"], -7), (held["decoded"], -7), (out, -7)):
        assert (tensor[:32] == edge).all() and (tensor[-32:] == edge).all()


def test_messages_need_not_be_aligned(device):
    x = values_of(300).to(device)
    for codec in codecs.CODECS:
        encoded = codecs.encode(x, codec)
        for offset in (1, 2, 3):
            room = torch.zeros(encoded.nbytes + offset, dtype=torch.uint8, device=device)
            room[offset:] = encoded.wire
            moved = codecs.Encoded(room[offset:], codec, (300,), x.dtype)
            assert torch.equal(codecs.decode(moved), codecs.decode(encoded))
            assert torch.equal(codecs.reduce(x, [moved]).wire, codecs.reduce(x, [encoded]).wire)


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_and_decoded(dtype, device):
    x = values_of(300).to(device=device, dtype=dtype).reshape(3, 100)
    for codec in codecs.CODECS:
        want = codecs.encode(x, codec)
        values = codecs.decode(want)
        assert (values.shape, values.dtype) == (x.shape, dtype)
        room = codecs.Encoded(torch.zeros_like(want.wire), codec, (3, 100), dtype)
        decoded = torch.empty_like(x)
        assert codecs.encode(x, codec, out=room, decoded=decoded) is room
        assert torch.equal(room.wire, want.wire)
        assert torch.equal(decoded, values)
        own = x.clone()
        assert torch.equal(codecs.encode(own, codec, decoded=own).wire, want.wire)
        assert torch.equal(own, values)
        for other in DTYPES:
            target = torch.empty(300, dtype=other, device=device)
            assert codecs.decode(want, target) is target
            exact = codecs.decode(want, torch.empty(300, device=device))
            assert torch.equal(target, exact.to(other))


def test_statistics_are_those_of_the_written_elements(device):
    encoded = codecs.encode(torch.tensor([1e5, 1.0], device=device), "raw")
    _, stats = codecs.decode(encoded, return_stats=True)
    assert (stats.sum_squares.item(), stats.found_inf.item()) == (1e10 + 1, 0)
    out, stats = codecs.decode(encoded, torch.empty(2, dtype=torch.float16, device=device), return_stats=True)
    assert out[0].isinf() and stats.found_inf.item() == 1
    _, stats = codecs.decode(codecs.encode(torch.empty(0, device=device), "int8"), return_stats=True)
    assert (stats.sum_squares.item(), stats.found_inf.item()) == (0, 0)
    _, stats = codecs.decode(codecs.encode(torch.full((9,), 3e38, device=device), "raw"), return_stats=True)
    assert stats.sum_squares.item() == pytest.approx(9 * 9e76, 1e-6) and stats.found_inf.item() == 0


def test_nbytes_of_messages():
    per_element = {"raw": 4, "fp16": 2, "bf16": 2, "fp8": 1 + 4 / 128, "int8": 1 + 4 / 256}
    per_element |= {"int4": 1 / 2 + 4 / 128, "sign": 1 / 8 + 4 / 256}
    assert list(codecs.CODECS) == list(per_element)
    for codec in codecs.CODECS:
        assert codecs.nbytes(codec, 0) == 0
        assert codecs.nbytes(codec, 2**40) == 2**40 * per_element[codec]
        for numel in range(1, 600):
            assert codecs.encode(torch.zeros(numel), codec).nbytes == codecs.nbytes(codec, numel)
            assert codecs.nbytes(codec, numel) <= codecs.nbytes(codec, numel + 1)


def test_empty_makes_a_message_to_write_to(device):
    for shape in ((), (0,), (3, 100)):
        x = torch.ones(shape, dtype=torch.bfloat16, device=device)
        for codec in codecs.CODECS:
            room, want = codecs.empty(x, codec), codecs.encode(x, codec)
            assert (room.codec, room.shape, room.dtype) == (want.codec, want.shape, want.dtype)
            assert (room.nbytes, room.wire.device) == (want.nbytes, x.device)
            assert codecs.encode(x, codec, out=room) is room
            assert torch.equal(room.wire, want.wire)


def test_zero_residual(device):
    x = torch.ones(3, 4, dtype=torch.float16, device=device)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        residual = codecs.zero_residual(x, feedback_dtype=name)
        assert (residual.shape, residual.dtype, residual.device) == (x.shape, dtype, x.device)
        assert not residual.any()
        codecs.encode(x, "int8", residual=residual)
    assert codecs.zero_residual(numpy_array(torch.ones(7))).shape == (7,)


def test_scale_and_loss_scale(device):
    """The sum is half of own plus 8 times the residual. raw leaves no residual; int8 leaves an eighth of its loss."""
    own, residual = torch.tensor([2.0, 6.0], device=device), torch.tensor([1.0, -1.0], device=device)
    up = torch.tensor(8.0, device=device)
    encoded = codecs.encode(own, "raw", residual=residual, scale=0.5, loss_scale=up)
    assert codecs.decode(encoded).tolist() == [9.0, -5.0]
    assert residual.tolist() == [0.0, 0.0]
    own, residual = torch.tensor([127.0, 16.25], device=device), torch.zeros(2, device=device)
    codecs.encode(own, "int8", residual=residual, loss_scale=up)
    assert residual.tolist() == [0.0, 0.25 / 8]


def test_writes_increment_the_version_of_a_tensor(device):
    x, residual, decoded = values_of(300).to(device), torch.zeros(300, device=device), torch.zeros(300, device=device)
    encoded = codecs.encode(x, "int8")
    held = {"residual": residual, "decoded": decoded, "out": encoded.wire}
    versions = {name: tensor._version for name, tensor in held.items()}
    own = x._version
    codecs.reduce(x, [codecs.encode(x, "int8")], residual=residual, decoded=decoded, out=encoded)
    assert all(tensor._version > versions[name] for name, tensor in held.items())
    assert x._version == own
    wire, seen = encoded.wire._version, decoded._version
    codecs.decode(encoded, decoded)
    assert decoded._version > seen and encoded.wire._version == wire
    stats = [torch.zeros((), dtype=torch.float64, device=device), torch.zeros((), device=device)]
    _ops.decode_(encoded.wire, "int8", decoded, sum_squares=stats[0], found_inf=stats[1])
    assert all(tensor._version > 0 for tensor in stats)
    leaf = torch.ones(3, device=device, requires_grad=True)
    squares = leaf * leaf
    product = (squares * squares).sum()
    codecs.decode(codecs.encode(squares, "int8"), squares.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_writes_do_not_change_lazy_clones(device):
    """A lazy clone shares memory that has to be copied before it is written."""
    for write in (
        lambda tensor: codecs.encode(torch.ones(512, device=device), "raw", decoded=tensor),
        lambda tensor: codecs.decode(codecs.encode(torch.ones(512, device=device), "raw"), tensor),
    ):
        original = torch.zeros(512, device=device)
        clone = torch._lazy_clone(original)
        write(clone)
        assert clone.sum() == 512 and original.sum() == 0


def test_a_message_may_overwrite_a_received_one(device):
    x = values_of(5000).to(device)
    for codec in codecs.CODECS:
        received = codecs.encode(x.flip(0), codec)
        want = codecs.reduce(x, [received]).wire.clone()
        assert torch.equal(codecs.reduce(x, [received], out=received).wire, want)


def test_in_inference_mode(device):
    x = values_of(300).to(device)
    with torch.inference_mode():
        encoded = codecs.encode(x, "int8", residual=torch.zeros(300, device=device))
        assert torch.equal(codecs.decode(encoded), codecs.decode(codecs.encode(x, "int8")))


@pytest.mark.parametrize("codec", ["raw", "int4"])
def test_opcheck(codec, device):
    own, numel = values_of(300).to(device), 300
    received = [message(codec, numel, seed).to(device) for seed in (0, 1)]
    written = {
        "residual": torch.zeros(numel, device=device),
        "wire": torch.zeros_like(received[0]),
        "decoded": torch.zeros(numel, dtype=torch.bfloat16, device=device),
    }
    up = torch.tensor(4.0, device=device)
    options = {"position": 1, "scale": 0.5, "loss_scale": up, "stochastic": True, "seed": 3, **written}
    library.opcheck(torch.ops.dltrain_ext.encode_sum_, (own, received, codec), options)
    library.opcheck(torch.ops.dltrain_ext.encode_sum_, (own, [], codec), {"wire": written["wire"]})
    stats = {
        "sum_squares": torch.zeros((), dtype=torch.float64, device=device),
        "found_inf": torch.zeros((), device=device),
    }
    library.opcheck(torch.ops.dltrain_ext.decode_, (written["wire"], codec, own))
    library.opcheck(torch.ops.dltrain_ext.decode_, (written["wire"], codec, own), stats)


# Arguments that are refused.

X = values_of(100)


def int8(**changes):
    given = {"wire": codecs.encode(X, "int8").wire, "codec": "int8", "shape": (100,), "dtype": torch.float32}
    return codecs.Encoded(**given | changes)


def uint8(size):
    return torch.zeros(size, dtype=torch.uint8)


names = ", ".join(codecs.CODECS)
REFUSED = {
    "codec": (ValueError, f"codec: expected one of {names}, got 'int9'", lambda: codecs.encode(X, "int9")),
    "no codec": (ValueError, f"codec: expected one of {names} .*, got None", lambda: codecs.reduce(X, [])),
    "a list of codecs": (
        TypeError,
        rf"codec: expected one of {names}, got \['raw'\]",
        lambda: codecs.encode(X, ["raw"], out=codecs.encode(X, "raw")),
    ),
    "rounding": (
        ValueError,
        "rounding: expected 'nearest' or 'stochastic', got 'up'",
        lambda: codecs.encode(X, "int8", rounding="up"),
    ),
    "seed": (ValueError, "seed: expected 0 to 9223372036854775807, got -1", lambda: codecs.encode(X, "int8", seed=-1)),
    "step": (ValueError, "step: expected 0 to 4294967295, got 4294967296", lambda: codecs.encode(X, "raw", step=2**32)),
    "rank": (ValueError, "rank: expected 0 to 4294967295, got -1", lambda: codecs.encode(X, "int8", rank=-1)),
    "list": (TypeError, "tensor: expected a tensor or .*__dlpack__, got list", lambda: codecs.encode([1.0], "int8")),
    "own of another kind": (
        TypeError,
        "tensor: expected a tensor or .*__dlpack__, got list",
        lambda: codecs.reduce([1.0], [int8()]),
    ),
    "integers": (
        TypeError,
        "tensor: expected dtype float32, float16 or bfloat16, got Long",
        lambda: codecs.encode(torch.arange(3), "int8"),
    ),
    "doubles": (
        TypeError,
        "tensor: expected dtype float32, float16 or bfloat16, got Double",
        lambda: codecs.reduce(X.double(), [int8()]),
    ),
    "position": (ValueError, "position: expected 0 to 1, got 2", lambda: codecs.reduce(X, [int8()], position=2)),
    "position below": (
        ValueError,
        "position: expected 0 to 1, got -1",
        lambda: codecs.reduce(X, [int8()], position=-1),
    ),
    "a sparse position": (
        TypeError,
        "position: expected an int",
        lambda: codecs.reduce(X, [int8()], position=torch.ones(2, 2).to_sparse_csr()),
    ),
    "a sparse first": (
        TypeError,
        "first: expected an int",
        lambda: codecs.encode(X, "raw", first=torch.ones(2, 2).to_sparse_csr()),
    ),
    "received in another codec": (
        ValueError,
        r"received\[1\]: expected a message in int8, got one in int4",
        lambda: codecs.reduce(X, [int8(), codecs.encode(X, "int4")]),
    ),
    "received too short": (
        ValueError,
        r"received\[0\]: expected 104 bytes, which 100 elements are in int8, got 103",
        lambda: codecs.reduce(X, [int8(wire=uint8(103))]),
    ),
    "received of other elements": (
        ValueError,
        r"received\[0\]: expected .*100.*, got .*99",
        lambda: codecs.reduce(X, [codecs.encode(X[:99], "int4")]),
    ),
    "received of another dtype": (
        TypeError,
        r"received\[0\]: expected dtype uint8, got Float",
        lambda: codecs.reduce(X, [int8(wire=torch.zeros(104))]),
    ),
    "feedback that would grow": (
        ValueError,
        "residual: expected none where the rounding is stochastic and the codec sign",
        lambda: codecs.encode(X, "sign", residual=torch.zeros(100), rounding="stochastic"),
    ),
    "a tensor for the received": (
        TypeError,
        r"received\[0\]: expected an Encoded, got int",
        lambda: codecs.reduce(X, [5]),
    ),
    "what is written twice": (
        ValueError,
        "decoded: expected memory apart from that of residual, got some that both use",
        lambda: codecs.encode(X, "int8", residual=(r := torch.zeros(100)), decoded=r),
    ),
    "a message over its tensor": (
        ValueError,
        "wire: expected memory apart from that of tensor",
        lambda: codecs.encode(y := torch.zeros(100), "int8", out=int8(wire=y.view(torch.uint8)[:104])),
    ),
    "decoded that is shifted": (
        ValueError,
        "decoded: expected memory apart from that of tensor",
        lambda: codecs.encode((z := torch.zeros(101))[:-1], "int8", decoded=z[1:]),
    ),
    "what a graph would need": (
        ValueError,
        "decoded: expected a tensor that requires no grad",
        lambda: codecs.encode(X, "int8", decoded=torch.zeros(100, requires_grad=True)),
    ),
    "elements between their borders": (
        ValueError,
        "tensor: expected elements that are aligned to their size, got address",
        lambda: codecs.encode(torch.frombuffer(bytearray(401), dtype=torch.float32, offset=1), "int8"),
    ),
    "residual of another shape": (
        ValueError,
        r"residual: expected shape \(100,\), got \(10, 10\)",
        lambda: codecs.encode(X, "int8", residual=torch.zeros(10, 10)),
    ),
    "residual of another dtype": (
        TypeError,
        "residual: expected dtype float32 or bfloat16, got Half",
        lambda: codecs.encode(X, "int8", residual=torch.zeros(100).half()),
    ),
    "residual that is not dense": (
        ValueError,
        r"residual: expected a contiguous tensor, got shape \[100\] with strides \[2\]",
        lambda: codecs.encode(X, "int8", residual=torch.zeros(200)[::2]),
    ),
    "decoded of another shape": (
        ValueError,
        r"decoded: expected shape \(100,\), got \(99,\)",
        lambda: codecs.encode(X, "int8", decoded=torch.zeros(99)),
    ),
    "decoded of another dtype": (
        TypeError,
        "decoded: expected dtype float32, float16 or bfloat16, got Int",
        lambda: codecs.encode(X, "int8", decoded=torch.zeros(100, dtype=torch.int32)),
    ),
    "loss_scale of another dtype": (
        TypeError,
        "loss_scale: expected one .*, got torch.DoubleTensor",
        lambda: codecs.encode(X, "int8", loss_scale=torch.tensor(2.0).double()),
    ),
    "loss_scale of another shape": (
        TypeError,
        r"loss_scale: expected one .*, got torch.FloatTensor of shape \[2\]",
        lambda: codecs.encode(X, "int8", loss_scale=torch.ones(2)),
    ),
    "out in another codec": (
        ValueError,
        "out: expected a message in int4, got one in int8",
        lambda: codecs.encode(X, "int4", out=int8()),
    ),
    "out of another shape": (
        ValueError,
        r"out: expected a message of torch.float32 \(10, 10\), got one of torch.float32 \(100,\)",
        lambda: codecs.encode(X.reshape(10, 10), "int8", out=int8()),
    ),
    "out of another dtype": (
        ValueError,
        "out: expected a message of torch.float16 .*, got one of torch.float32",
        lambda: codecs.encode(X.half(), "int8", out=int8()),
    ),
    "out that begins anywhere": (
        ValueError,
        "wire: expected memory aligned to 4 bytes, got address",
        lambda: codecs.encode(X, "int8", out=int8(wire=uint8(105)[1:])),
    ),
    "message too long": (
        ValueError,
        "encoded: expected 104 bytes, which 100 elements are in int8, got 105",
        lambda: codecs.decode(int8(wire=uint8(105))),
    ),
    "message of another dtype": (
        TypeError,
        "wire: expected dtype uint8, got Char",
        lambda: codecs.decode(int8(wire=uint8(104).to(torch.int8))),
    ),
    "message that is not dense": (
        ValueError,
        r"wire: expected a contiguous tensor, got shape \[104\] with strides \[2\]",
        lambda: codecs.decode(int8(wire=uint8(208)[::2])),
    ),
    "message in a list": (
        TypeError,
        "encoded: expected a tensor or .*__dlpack__, got list",
        lambda: codecs.decode(int8(wire=[0] * 104)),
    ),
    "target of integers": (
        TypeError,
        "out: expected dtype float32, float16 or bfloat16, got Long",
        lambda: codecs.decode(int8(), torch.zeros(100, dtype=torch.int64)),
    ),
    "target too short": (ValueError, "expected .*, got ", lambda: codecs.decode(int8(), torch.zeros(99))),
    "target too long for its message": (
        ValueError,
        "out: expected .*100.*, got .*128",
        lambda: codecs.decode(codecs.encode(X, "int4"), torch.zeros(128)),
    ),
    "feedback_dtype": (
        ValueError,
        "feedback_dtype: expected one of fp32, bf16, got 'fp16'",
        lambda: codecs.zero_residual(X, feedback_dtype="fp16"),
    ),
    "bytes of a codec": (ValueError, f"codec: expected one of {names}, got 'int9'", lambda: codecs.nbytes("int9", 1)),
    "block of a codec": (ValueError, f"codec: expected one of {names}, got 'int9'", lambda: codecs.block_size("int9")),
    "bound of a codec": (ValueError, f"codec: expected one of {names}, got 'int9'", lambda: codecs.error_bound("int9")),
    "bound of a rounding": (
        ValueError,
        "rounding: expected 'nearest' or 'stochastic', got 'up'",
        lambda: codecs.error_bound("int8", "up"),
    ),
    "numel": (ValueError, "numel: expected 0 to 1152921504606846976, got -1", lambda: codecs.nbytes("int8", -1)),
    "first": (
        ValueError,
        "first: expected a multiple of 4, got 2",
        lambda: _ops.encode_sum_(X, [], "int8", wire=uint8(104), first=2),
    ),
    "nothing to do": (
        ValueError,
        "wire, decoded: expected at least one of them",
        lambda: _ops.encode_sum_(X, [], "int8"),
    ),
    "residual of a sum": (
        ValueError,
        "residual: expected none where no wire is encoded",
        lambda: _ops.encode_sum_(X, [], "int8", decoded=torch.zeros(100), residual=torch.zeros(100)),
    ),
    "half of the statistics": (
        ValueError,
        "sum_squares, found_inf: expected both or neither",
        lambda: _ops.decode_(int8().wire, "int8", torch.zeros(100), found_inf=torch.zeros(())),
    ),
    "sum_squares of another dtype": (
        TypeError,
        "sum_squares: expected one .*, got torch.FloatTensor",
        lambda: _ops.decode_(
            int8().wire, "int8", torch.zeros(100), found_inf=torch.zeros(()), sum_squares=torch.zeros(())
        ),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_errors_name_the_wrong_argument(case):
    error, match, call = REFUSED[case]
    with pytest.raises(error, match=match):
        call()


UNTYPED = {
    "seed": lambda: codecs.encode(X, "int8", seed=2**63),
    "residual": lambda: codecs.encode(X, "int8", residual=X.numpy()),
    "loss_scale": lambda: codecs.encode(X, "int8", loss_scale=2.0),
    "codec": lambda: codecs.encode(X, 8),
    "received": lambda: codecs.reduce(X, [X], codec="int8"),
    "out": lambda: codecs.encode(X, "int8", out=uint8(104)),
    "encoded": lambda: codecs.decode(uint8(104)),
}


@pytest.mark.parametrize("name", UNTYPED)
def test_errors_name_an_argument_of_the_wrong_type(name):
    with pytest.raises((TypeError, ValueError), match=rf"^{name}.*: expected .*, got "):
        UNTYPED[name]()


ELSEWHERE = {
    "residual": lambda x, place: codecs.encode(x, "int8", residual=torch.zeros(100, device=place)),
    "decoded": lambda x, place: codecs.encode(x, "int8", decoded=torch.zeros(100, device=place)),
    "loss_scale": lambda x, place: codecs.encode(x, "int8", loss_scale=torch.ones((), device=place)),
    r"received\[0\]": lambda x, place: codecs.reduce(x, [int8(wire=uint8(104).to(place))]),
    "(out|wire)": lambda x, place: codecs.encode(x, "int8", out=int8(wire=uint8(104).to(place))),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_errors_name_a_tensor_on_another_device(name, device):
    x = X.to(device)
    for place in {"meta", "cpu"} - {device}:
        with pytest.raises(ValueError, match=rf"^{name}: expected a tensor on .*{device}.*, got one on {place}"):
            ELSEWHERE[name](x, place)


def test_errors_name_an_output_on_another_device(device):
    for place in {"meta", "cpu"} - {device}:
        with pytest.raises(ValueError, match="^(out|wire): expected a tensor on .*, got one on"):
            codecs.decode(codecs.encode(X.to(device), "int8"), torch.zeros(100, device=place))


def test_a_refused_call_changes_nothing():
    residual, decoded, room = torch.full((100,), 3.0), torch.full((100,), 4.0), int8(wire=uint8(104))
    with pytest.raises(ValueError, match="step"):
        codecs.encode(X, "int8", residual=residual, decoded=decoded, out=room, step=-1)
    assert (residual == 3).all() and (decoded == 4).all() and (room.wire == 0).all()
