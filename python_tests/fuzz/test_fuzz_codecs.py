"""Fuzz tests of the codecs: wrong arguments raise an error that names the argument, and nothing is written."""

import inspect
import math

import pytest
import torch
from fuzzing import anything, attempt, fuzz, numbers, plain, shapes, spoiled, tensors
from hypothesis import given
from hypothesis import strategies as st

from dltrain_ext import codecs, reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
codec_names = st.sampled_from(codecs.CODECS)
roundings = st.sampled_from(["nearest", "stochastic"])


@st.composite
def messages(draw, codec=None, shape=None):
    """Draw a message of arbitrary bytes, or one with a wrong field."""
    codec = draw(codec_names) if codec is None else codec
    shape = draw(shapes) if shape is None else shape
    size = codecs.nbytes(codec, math.prod(shape))
    fields = {
        "wire": st.just(as_wire(draw(st.binary(min_size=size, max_size=size)))),
        "codec": st.just(codec),
        "shape": st.just(shape),
        "dtype": st.sampled_from(DTYPES),
    }
    return codecs.Encoded(**draw(spoiled(fields, (size,), most=1)))


def as_wire(content):
    return torch.tensor(list(content), dtype=torch.uint8)


def names_of(function):
    """Return the accepted names; the fields of a message count, too."""
    return [*inspect.signature(function).parameters, "wire", "codec", "shape", "dtype"]


@fuzz("codecs.block_size", "codecs.error_bound", "codecs.nbytes", examples=60)
@given(st.data())
def test_facts(data):
    function, fits = data.draw(
        st.sampled_from(
            [
                (codecs.block_size, {"codec": codec_names}),
                (codecs.error_bound, {"codec": codec_names, "rounding": roundings}),
                (codecs.nbytes, {"codec": codec_names, "numel": numbers}),
            ]
        )
    )
    found, error = attempt(function, data.draw(spoiled(fits)))
    assert error or found is not None


@fuzz("codecs.empty", "codecs.zero_residual")
@given(spoiled({"tensor": tensors((3, 2)), "codec": codec_names}), st.one_of(st.sampled_from(["fp32", "bf16"]), plain))
def test_empty_and_zero_residual(arguments, feedback_dtype):
    attempt(codecs.empty, arguments)
    residual, _ = attempt(
        codecs.zero_residual, {"tensor": arguments["tensor"], "feedback_dtype": feedback_dtype}, keeps=lambda: arguments
    )
    assert residual is None or residual.is_meta or residual.numel() > 1000 or not residual.any()


def arguments_of_encode(shape, codec):
    return {
        "tensor": st.sampled_from(DTYPES).flatmap(lambda dtype: tensors(shape, dtype)),
        "codec": st.just(codec),
        "residual": st.one_of(st.none(), tensors(shape), tensors(shape, torch.bfloat16)),
        "scale": st.sampled_from([1.0, 0.5, -1.0, 0]),
        "loss_scale": st.one_of(st.none(), st.just(torch.tensor(2.0))),
        "rounding": roundings,
        "seed": st.integers(0, 2**63 - 1),
        "step": st.integers(0, 2**32 - 1),
        "rank": st.integers(0, 2**32 - 1),
        "first": st.integers(0, 2**40).map(lambda n: 4 * n),
        "decoded": st.one_of(st.none(), tensors(shape)),
        "out": st.none(),
    }


@fuzz("codecs.encode", "codecs.reduce", examples=60)
@given(st.data(), shapes, codec_names)
def test_encode_and_reduce(data, shape, codec):
    function = data.draw(st.sampled_from([codecs.encode, codecs.reduce]))
    fits = arguments_of_encode(shape, codec)
    if function is codecs.reduce:
        fits |= {"received": st.lists(messages(codec, shape), max_size=3), "position": st.integers(-1, 3)}
    arguments = data.draw(spoiled(fits, shape))
    if data.draw(st.booleans()):
        arguments["out"] = data.draw(messages(codec, shape))
    tensor = arguments["tensor"]
    comparable = function is codecs.encode and type(tensor) is torch.Tensor and tensor.numel() < 1000
    comparable = comparable and arguments["residual"] is None and arguments["decoded"] is None
    before = tensor.detach().clone() if comparable and tensor.is_cpu and tensor.layout == torch.strided else None
    made, _ = attempt(function, arguments, names=names_of(codecs.reduce))
    if made is not None and before is not None:
        wire = torch.empty(codecs.nbytes(made.codec, before.numel()), dtype=torch.uint8)
        options = {name: arguments[name] for name in ("seed", "step", "rank", "first", "scale", "loss_scale")}
        stochastic = arguments["rounding"] == "stochastic"
        reference.encode_sum_(before, [], made.codec, wire=wire, stochastic=stochastic, **options)
        torch.testing.assert_close(made.wire, wire, rtol=0, atol=0)


@fuzz("codecs.decode", "codecs.Encoded", examples=60)
@given(st.data(), shapes, codec_names, st.booleans())
def test_decode(data, shape, codec, return_stats):
    message = data.draw(st.one_of(messages(codec, shape), messages(codec, shape), plain))
    out = data.draw(st.one_of(st.none(), tensors(shape), anything(shape)))
    arguments = {"encoded": message, "out": out, "return_stats": return_stats}
    found, _ = attempt(codecs.decode, arguments, names=names_of(codecs.decode))
    if found is not None and return_stats:
        values, stats = found
        if isinstance(values, torch.Tensor) and values.is_cpu:
            assert bool(stats.found_inf) == (not values.float().isfinite().all())


@fuzz("codecs.decode", "codecs.Encoded.numel", "codecs.Encoded.nbytes", "ops.decode_")
@given(codec_names, st.integers(0, 600), st.data())
def test_any_bytes_decode(codec, numel, data):
    """Arbitrary bytes give the result of the reference, except for scales below zero."""
    size = codecs.nbytes(codec, numel)
    wire = as_wire(data.draw(st.binary(min_size=size, max_size=size)))
    if codec == "sign":
        wire[: 4 * -(-numel // 256)].view(torch.int32).bitwise_and_(2**31 - 1)
    message = codecs.Encoded(wire, codec, (numel,), torch.float32)
    assert (message.numel, message.nbytes) == (numel, size)
    expected = torch.empty(numel)
    reference.decode_(wire, codec, expected)
    found = codecs.decode(message)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


# Errors of torch's dispatcher before it calls an op.
DISPATCHER = "Could not run|Cannot access storage|no tensor arguments|Overflow when|NestedTensor"


@fuzz("ops.encode_sum_", "ops.decode_", examples=60)
@given(st.data(), shapes, codec_names)
def test_ops(data, shape, codec):
    library = torch.ops.dltrain_ext
    size = codecs.nbytes(codec, math.prod(shape))
    wires = st.integers(0, 255).map(lambda byte: torch.full((size,), byte, dtype=torch.uint8))
    maybe = lambda strategy: st.one_of(st.none(), strategy)  # noqa: E731
    encode_sum_ = {
        "tensor": tensors(shape),
        "received": st.lists(wires, max_size=2),
        "codec": st.just(codec),
        "position": st.integers(0, 2),
        "scale": st.floats(),
        "residual": maybe(tensors(shape)),
        "loss_scale": maybe(st.just(torch.ones(()))),
        "wire": maybe(wires),
        "decoded": maybe(tensors(shape)),
        "stochastic": st.booleans(),
        "seed": st.integers(-1, 2**63 - 1),
        "step": st.integers(-1, 2**32),
        "rank": st.integers(-1, 2**32),
        "first": st.integers(-4, 2**60).map(lambda n: 4 * n),
    }
    decode_ = {
        "wire": wires,
        "codec": st.just(codec),
        "out": tensors(shape),
        "sum_squares": maybe(st.just(torch.zeros((), dtype=torch.float64))),
        "found_inf": maybe(st.just(torch.zeros(()))),
    }
    op, fits = data.draw(st.sampled_from([(library.encode_sum_, encode_sum_), (library.decode_, decode_)]))
    attempt(op, data.draw(spoiled(fits, shape)), names=fits, also=DISPATCHER)


def test_lazy_views_are_not_written():
    """With ops that return nothing, torch's own handling of such tensors reads beyond its stack."""
    message = codecs.encode(torch.ones(4), "raw")
    for out in (torch._neg_view(torch.zeros(4)), torch._efficientzerotensor(4)):
        with pytest.raises(TypeError, match=r"out: expected a plain dense tensor"):
            codecs.decode(message, out)
    negated = codecs.encode(torch._neg_view(torch.ones(4)), "raw")
    assert torch.equal(codecs.decode(negated), -torch.ones(4))


def test_expanded_tensors_are_not_written():
    out = torch.zeros(1).expand(4)
    with pytest.raises(ValueError, match=r"out: expected elements that each have a place of their own"):
        codecs.decode(codecs.encode(torch.ones(4), "raw"), out)
    assert not out.any()


@pytest.mark.parametrize("codec", codecs.CODECS)
def test_a_tensor_beyond_its_storage_is_refused(codec):
    for numel in (4, 300):
        values = torch.ones(numel)
        values.untyped_storage().resize_(values.untyped_storage().nbytes() - 1)
        with pytest.raises(ValueError, match=r"tensor: expected a tensor whose elements are all in memory, got one of"):
            codecs.encode(values, codec)
        message = codecs.encode(torch.ones(numel), codec)
        message.wire.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=r"wire: expected a tensor whose elements are all in memory"):
            codecs.decode(message)
