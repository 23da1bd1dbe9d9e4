"""Tools of the fuzz tests: values that no argument accepts, and the checks of a call that gets them.

With DLTRAIN_FUZZ_EXAMPLES=10000 the tests are long and random; without it they are short and always the same.
"""

import decimal
import faulthandler
import inspect
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

EXAMPLES = int(os.environ.get("DLTRAIN_FUZZ_EXAMPLES", "0"))
PATIENCE = 300  # s; a longer call hangs
REFUSALS = (TypeError, ValueError, RuntimeError, OSError, MemoryError)
# Errors of other code: of the argument itself, and of a failed allocation.
HELPFUL = (
    "an unhelpful object was asked|Wrapped: there is no|Boolean value of Tensor|truth value|0-d array|"
    "can't allocate memory"
)
covered: set[str] = set()


def fuzz(*names: str, examples: int = 25) -> Callable[[Any], Any]:
    """Mark a property test as a test of these public names."""
    covered.update(names)
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


class Unhelpful:
    """An object whose methods all raise."""

    def _refuse(self, *_: object) -> Any:
        raise ValueError("an unhelpful object was asked")

    __bool__ = __len__ = __iter__ = __getitem__ = __float__ = __int__ = __index__ = __eq__ = __lt__ = __le__ = _refuse
    __gt__ = __ge__ = __contains__ = __fspath__ = __str__ = _refuse  # type: ignore[assignment]
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return "Unhelpful()"


class Wrapped(Tensor):
    """A tensor subclass without memory of its own."""

    @staticmethod
    def __new__(cls) -> "Wrapped":
        return Tensor._make_wrapper_subclass(cls, (4,), dtype=torch.float32)

    def __repr__(self) -> str:  # type: ignore[override]
        return "Wrapped()"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"Wrapped: there is no {function}")


PLAIN: list[Any] = [
    None,
    *(False, True, 0, 1, -1, 3, 2**16, 2**31 - 1, 2**31, 2**32, 2**62, 2**63, 2**64, -(2**63), 2**200),
    *(0.0, -0.0, 0.5, -1.0, 1e-300, 1e300, math.nan, math.inf, -math.inf, 1j),
    *("", "x", "raw", "int8", "ring", "auto", "native", "sum", "nearest", "stochastic", "\0", "\udc80", "a\nb" * 99),
    *(b"", b"int8", b"\xff\xfe", (), (1,), (1, 2), (math.nan, "x"), range(3), slice(None), ...),
    *(torch.float32, torch.int8, torch.float64, torch.strided, torch.device("cpu"), torch.device("meta")),
    *(torch.device("cuda"), torch.Size([4]), decimal.Decimal("NaN"), numpy.float32(1), numpy.int64(3), int, print),
    numpy.str_("int8"),
]
# Mutable objects, which are made for each example.
MADE: list[Callable[[], Any]] = [
    list,
    dict,
    set,
    object,
    Unhelpful,
    lambda: [None],
    lambda: ["x", 1],
    lambda: {"x": 1},
    lambda: {1: None},
    lambda: [[[]]],
    lambda: (item for item in (1, 2)),
    lambda: numpy.ones(4, "float32"),
    lambda: numpy.ones(8, "float32")[::-2],
    lambda: numpy.broadcast_to(numpy.float32(1), (4,)),
    lambda: numpy.ones(4, ">f4"),
    lambda: numpy.array(["x", None], object),
    lambda: numpy.zeros((), "float32"),
    lambda: numpy.recarray((2,), [("x", "f4")]),
    bytearray,
    lambda: memoryview(b"1234"),
]


class Broken(Tensor):
    """A tensor without memory; printing it would crash the process."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Broken({tuple(self.shape)}, {self.dtype})"


def _freed(tensor: Tensor, left: float = 0.0) -> Tensor:
    storage = tensor.untyped_storage()
    storage.resize_(int(left * storage.nbytes()))
    return tensor.as_subclass(Broken)


def _nested(shape: Sequence[int], layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def _quantized(shape: Sequence[int]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(shape), 0.1, 0, torch.qint8)


def _inference(shape: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        return torch.ones(shape)


# Tensors of a given shape, as far as possible. The huge ones need little memory.
TENSORS: dict[str, Callable[[Sequence[int]], Tensor]] = {
    **{
        str(dtype): (lambda shape, dtype=dtype: torch.zeros(shape, dtype=dtype))
        for dtype in (
            *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16),
            *(torch.uint8, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16),
        )
    },
    "nan": lambda shape: torch.full(shape, math.nan),
    "inf": lambda shape: torch.full(shape, math.inf),
    "largest": lambda shape: torch.full(shape, torch.finfo(torch.float32).max),
    "denormal": lambda shape: torch.full(shape, 1e-42),
    "meta": lambda shape: torch.ones(shape, device="meta"),
    "sparse": lambda shape: torch.ones(shape).to_sparse(),
    "csr": lambda shape: torch.ones(2, 3).to_sparse_csr(),
    "mkldnn": lambda shape: torch.ones(2, 3).to_mkldnn(),
    "nested": lambda shape: _nested(shape, torch.strided),
    "jagged": lambda shape: _nested(shape, torch.jagged),
    "quantized": _quantized,
    "wrapped": lambda shape: Wrapped(),
    "expanded": lambda shape: torch.ones(()).expand(shape),
    "overlapping": lambda shape: torch.ones(999).as_strided(shape, [1] * len(shape)),
    "gaps": lambda shape: torch.ones(9, *shape)[::4][0] if not shape else torch.ones(*shape, 3)[..., 1],
    "transposed": lambda shape: torch.ones(tuple(reversed(shape))).permute(tuple(reversed(range(len(shape))))),
    "unaligned": lambda shape: (
        torch.zeros(4 * math.prod(shape) + 1, dtype=torch.uint8)[1:]
        if not shape
        else torch.ones(math.prod(shape) + 1)[1:].view(shape)
    ),
    "requires grad": lambda shape: torch.ones(shape, requires_grad=True),
    "of a graph": lambda shape: torch.ones(shape, requires_grad=True) * 2,
    "parameter": lambda shape: torch.nn.Parameter(torch.ones(shape)),
    "negated": lambda shape: torch._neg_view(torch.ones(shape)),
    "zero": lambda shape: torch._efficientzerotensor(shape),
    "inference": _inference,
    "one more": lambda shape: torch.ones(math.prod(shape) + 1),
    "one dimension more": lambda shape: torch.ones(*shape, 1),
    "none": lambda shape: torch.ones(0),
    "none of many": lambda shape: torch.ones(0, 2**40),
    "number": lambda shape: torch.tensor(3.0),
    "bytes": lambda shape: torch.arange(17, dtype=torch.uint8),
    "huge on meta": lambda shape: torch.ones(2**40, device="meta"),
    "huge by expanding": lambda shape: torch.ones(1).expand(2**40),
    "huge bytes": lambda shape: torch.ones(1, dtype=torch.uint8).expand(2**40),
    "huge by strides": lambda shape: torch.ones(1).as_strided((2**30, 2**30), (0, 0)),
}
BROKEN: dict[str, Callable[[Sequence[int]], Tensor]] = {
    "freed": lambda shape: _freed(torch.ones(shape)),
    "shrunk": lambda shape: _freed(torch.ones(shape), 0.9),
    "shrunk bytes": lambda shape: _freed(torch.ones(shape, dtype=torch.uint8), 0.9),
    "freed bytes": lambda shape: _freed(torch.ones(shape, dtype=torch.uint8)),
}

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
plain = st.one_of(st.sampled_from(PLAIN), st.sampled_from(MADE).map(lambda make: make()))
numbers = st.one_of(st.integers(), st.floats(), st.sampled_from([x for x in PLAIN if isinstance(x, int | float)]))


def odd_tensors(shape: Sequence[int] = (4,), broken: bool = False) -> st.SearchStrategy[Tensor]:
    kinds = {**TENSORS, **(BROKEN if broken else {})}
    return st.sampled_from(sorted(kinds)).map(lambda name: kinds[name](shape))


def anything(shape: Sequence[int] = (4,)) -> st.SearchStrategy[Any]:
    return st.one_of(plain, odd_tensors(shape), numbers, st.text(max_size=8))


def tensors(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> st.SearchStrategy[Tensor]:
    """Draw tensors of ordinary numbers."""

    def make(seed: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    return st.integers(0, 99).map(make)


@st.composite
def spoiled(
    draw: st.DrawFn, given: Mapping[str, st.SearchStrategy[Any]], shape: Sequence[int] = (4,), most: int = 2
) -> dict[str, Any]:
    """Draw arguments that are valid except for some."""
    values = {name: draw(strategy) for name, strategy in given.items()}
    for name in draw(st.lists(st.sampled_from(sorted(values)), max_size=most, unique=True)):
        others = [value for value in values.values() if isinstance(value, Tensor)]
        odd = anything(shape)
        if isinstance(values[name], Tensor):
            odd = st.one_of(odd, odd_tensors(tuple(values[name].shape), broken=True), st.sampled_from(others))
        values[name] = draw(odd)
    return values


def bits(*kept: Any) -> list[Any]:
    """Return all bytes of these objects, including those between the elements of strided tensors."""
    found: list[Any] = []
    for value in kept:
        if isinstance(value, Tensor):
            found.append(_memory(value))
            if value.is_leaf and value.layout == torch.strided and not value.is_nested and value.grad is not None:
                found.append(_memory(value.grad))
        elif isinstance(value, numpy.ndarray):
            found.append(value.tobytes() if value.dtype != object else None)
        elif isinstance(value, Mapping):
            found.append(
                [(repr(key) if isinstance(key, str | int) else id(key), bits(each)) for key, each in value.items()]
            )
        elif isinstance(value, list | tuple):
            found.append(bits(*value))
        elif isinstance(value, str | int | float | bool | None):
            found.append(repr(value))
    return found


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not isinstance(tensor, Wrapped)
    if not plain or tensor.is_nested or tensor._is_zerotensor():
        return (id(tensor),)
    storage = tensor.detach().untyped_storage()
    if storage.nbytes() > 2**20:
        return (id(tensor),)
    memory = torch.tensor([], dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))
    return tuple(tensor.shape), tensor.dtype, memory.numpy().tobytes()


def attempt(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    names: Iterable[str] | None = None,
    keeps: Callable[[], Any] | None = None,
    also: str = r"(?!)",
) -> tuple[Any, BaseException | None]:
    """Return the result of a call, or its error. An error has to be a sentence that names an argument or matches
    ``also``, and the arguments, or the result of ``keeps``, must not have changed.
    """
    keeps = arguments.values if keeps is None else keeps
    names = inspect.signature(function).parameters if names is None else names
    before = bits(*keeps())
    faulthandler.dump_traceback_later(PATIENCE, exit=True, file=sys.__stderr__)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(**arguments), None
    except REFUSALS as error:
        check_refusal(error, names, also)
        assert bits(*keeps()) == before, f"changed, and then refused: {error}"
        return None, error
    finally:
        faulthandler.cancel_dump_traceback_later()


def check_refusal(error: BaseException, names: Iterable[str], also: str) -> None:
    text = str(error)
    assert not isinstance(error, RecursionError) and "INTERNAL ASSERT" not in text, repr(error)
    assert len(text.split()) >= 3, repr(error)
    pattern = "|".join(rf"\b{re.escape(name)}\b" for name in names)
    helpful = re.search(rf"{pattern}|{HELPFUL}|{also}", text)
    assert helpful, f"{type(error).__name__} names no argument: {text}"
    assert "incompatible function arguments" not in text or re.search(also, text), text
