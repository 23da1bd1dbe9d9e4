"""codecs: encode, decode and reduce of every codec, against torch's conversions; sizes and errors (fp32)."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.harness import Keep, Progress, Row, Table, at_least, choices, interleave
from benchmarks.machine.memory import MemoryLimit, last_level_cache
from dltrain_ext import codecs

OVERVIEW = ["-n", "8000000", "--seconds", "1"]
ENCODE, DECODE, SUMMARY = "encode", "decode", "all"
SAMPLE, STEPS = 2**20, 30
ROUNDING = 1 + 1e-4  # tolerance for the rounding of fp32 in the bounds


class Bounds(NamedTuple):
    """The error bounds, relative to the largest magnitude of a block, or to `floor` if that is larger."""

    block: int
    nearest: codecs.ErrorBound
    stochastic: codecs.ErrorBound
    floor: float

    @classmethod
    def of(cls, codec: str) -> "Bounds":
        bounds = (codecs.error_bound(codec, rounding) for rounding in ("nearest", "stochastic"))
        return cls(codecs.block_size(codec), *bounds, {"fp16": 2.0**-14, "bf16": 2.0**-126}.get(codec, 2.0**-117))


UNSCALED_FP8 = Bounds(1, codecs.ErrorBound(2**-4, 2**-4), codecs.ErrorBound(2**-3, 2**-4), 2.0**-6)
BLOCK = max(map(codecs.block_size, codecs.CODECS))
TYPES = {"raw": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


class Buffers:
    """The tensors that the sides of a codec read and write. No side reads what another side writes."""

    def __init__(self, codec: str, n: int, device: str) -> None:
        self.x = torch.randn(n, generator=torch.Generator(device).manual_seed(0), device=device)
        self.residual = self.first_residual()
        self.sent, self.received = codecs.encode(self.x, codec), codecs.encode(self.x.flip(0), codec)
        self.message, self.values = codecs.empty(self.x, codec), torch.empty_like(self.x)
        self.written = [self.message.wire, self.values]
        if codec in TYPES:
            self.narrow_sent = self.x.to(TYPES[codec], copy=True)
            self.narrow = torch.empty_like(self.narrow_sent)
            self.written.append(self.narrow)

    def first_residual(self) -> Tensor:
        return self.x.flip(0) / 8


@dataclass(frozen=True)
class Side:
    """A call, and the bytes that it reads and writes. Its result has to equal `exact` within `bounds`."""

    name: str
    call: Callable[[Buffers], Any]
    bytes_moved: int
    bounds: Bounds
    exact: Callable[[Buffers], Tensor] = lambda buffers: buffers.x
    stochastic: bool = False
    feedback: bool = False
    peer_of: str = ""

    def verify(self, buffers: Buffers) -> Row:
        """Return the row of this side, which says whether its first call on these buffers is correct."""
        for tensor in buffers.written:
            tensor.view(torch.uint8).fill_(0xFF)  # NaN in every type, so an element that is not written is wrong
        exact, result = self.exact(buffers), self.call(buffers)
        got = codecs.decode(result) if isinstance(result, codecs.Encoded) else result.float()
        correct, error = compare(got, exact, self.bounds, self.stochastic)
        if self.feedback:
            correct &= torch.equal(buffers.residual, exact - got)
        return Row("", self.name, not self.peer_of, correct, f"{error:.1e}")


def make_sides(codec: str, n: int) -> list[Side]:
    """Return our sides, and torch's if torch has a corresponding dtype."""
    bounds, wire = Bounds.of(codec), codecs.nbytes(codec, n)

    def encode(**options: Any) -> Callable[[Buffers], codecs.Encoded]:
        return lambda b: codecs.encode(b.x, codec, out=b.message, **options)

    def feedback(b: Buffers) -> codecs.Encoded:
        return codecs.encode(b.x, codec, residual=b.residual, out=b.message)

    def hop(b: Buffers) -> codecs.Encoded:
        return codecs.reduce(b.x, [b.received], out=b.message)

    sides = [
        Side(ENCODE, encode(), 4 * n + wire, bounds),
        Side(DECODE, lambda b: codecs.decode(b.sent, b.values), 4 * n + wire, bounds),
        Side("hop (k = 1)", hop, 4 * n + 2 * wire, bounds, lambda b: b.x + codecs.decode(b.received)),
        Side("encode + feedback", feedback, 12 * n + wire, bounds, lambda b: b.x + b.first_residual(), feedback=True),
        Side("encode stochastic", encode(rounding="stochastic"), 4 * n + wire, bounds, stochastic=True),
    ]
    if dtype := TYPES.get(codec):
        bounds, moved = UNSCALED_FP8 if codec == "fp8" else bounds, (4 + dtype.itemsize) * n
        sides += [
            Side("torch copy_", lambda b: b.narrow.copy_(b.x), moved, bounds, peer_of=ENCODE),
            Side("torch copy_ back", lambda b: b.values.copy_(b.narrow_sent), moved, bounds, peer_of=DECODE),
        ]
        if dtype.itemsize == 2:
            sides += [
                Side("torch to", lambda b: b.x.to(dtype), moved, bounds, peer_of=ENCODE),
                Side("torch to back", lambda b: b.narrow_sent.to(torch.float32), moved, bounds, peer_of=DECODE),
            ]
    return sides


def compare(got: Tensor, exact: Tensor, bounds: Bounds, stochastic: bool = False) -> tuple[bool, float]:
    """Return whether the errors are within the bounds, and the largest error relative to its block's magnitude."""

    def blocks(tensor: Tensor) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, -len(tensor) % bounds.block)).reshape(-1, bounds.block)

    scales = blocks(exact).abs().amax(1, keepdim=True).clamp_(min=bounds.floor)
    errors = blocks(got - exact).div_(scales)
    largest, squares = errors.abs().max().item(), errors.square_().mean(1)
    bound = bounds.stochastic if stochastic else bounds.nearest
    # The rms bound of stochastic rounding is an expectation, so it applies to the mean over many blocks.
    rms = (squares.mean() if stochastic else squares.max()).sqrt().item()
    return largest <= bound.max * ROUNDING and rms <= bound.rms * ROUNDING, largest


def make_data(device: str) -> tuple[dict[str, Tensor], str]:
    """Return the data on which the errors are measured, by name, and a note that describes it."""
    random = torch.Generator().manual_seed(0)
    normal = torch.randn(SAMPLE, generator=random)
    heavy = torch.empty(SAMPLE).exponential_(generator=random).pow_(3).copysign_(torch.randn(SAMPLE, generator=random))
    data = {"normal": normal, "heavy": heavy}
    note = f"rms error of normal, heavy (the cube of a Laplace distribution; {SAMPLE:,} elements each)"
    try:
        data["real"] = record_gradients()
        note += f", real (gradients of the example's digits, step {STEPS}: {len(data['real']):,}): "
    except ModuleNotFoundError as missing:
        note += f" (real gradients are left out: no module {missing.name}; pip install '.[examples]'): "
    note += "the rms of the errors of nearest rounding over the rms of the data"
    return {name: values.to(device) for name, values in data.items()}, note


def record_gradients() -> Tensor:
    """Return the gradients of all parameters of the example's model, concatenated as in a bucket of DDP."""
    from examples.tasks import digits, loss

    task = digits()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = task.model()
        parameters = list(model.parameters())
        for _ in range(STEPS):
            batch = torch.randint(len(task.train[0]), (task.batch_size,))
            inputs, targets = (tensor[batch] for tensor in task.train)
            gradients = torch.autograd.grad(loss(model(inputs), targets), parameters)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter -= 0.1 * gradient
    return torch.cat([gradient.flatten() for gradient in gradients])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--codecs",
        type=choices(codecs.CODECS),
        default=list(codecs.CODECS),
        help=f"names out of {', '.join(codecs.CODECS)} (default: all)",
    )
    parser.add_argument(
        "-n",
        "--elements",
        type=at_least(1),
        help="elements of a tensor, rounded up to whole blocks (default: 2^24, on a GPU 2^27, --quick: 2^21)",
    )
    parser.add_argument("--seconds", type=at_least(1), help="time budget per codec (default: 7, --quick: 0.3)")


def run(options: argparse.Namespace, progress: Progress, keep: Keep) -> None:
    device = options.device
    # A GPU processes 2^24 elements in about the time that a launch and the wait for it take.
    n = options.elements or (2**21 if options.quick else 2**27 if device == "cuda" else 2**24)
    n += -n % BLOCK
    limit = MemoryLimit(device) if 4 * n > last_level_cache(device) else None
    seconds = options.seconds or (0.3 if options.quick else 7)
    progress("data", 0.0)
    data, about_data = make_data(device)
    summary = []
    notes = [
        "ours are checked against codecs.error_bound; check shows the largest error over the largest magnitude of its "
        "block (torch's fp8 has no blocks: over the element, or over 2^-6 if that is larger)",
        "hop (k = 1): codecs.reduce of own elements and one received message",
        "GB/s: bytes that a side reads and writes, over its time; two sets of tensors are used alternately",
        "the sides of one codec are timed alternately, the codecs one after another: compare codecs by % of limit",
        "torch to allocates its result; torch's fp8 has no scales for blocks",
        about_data,
    ]
    if not limit:
        notes.append("no memory limit is shown, because the tensors fit into the last-level cache")
    where = torch.cuda.get_device_name(0) if device == "cuda" else "the CPU"
    table = Table(f"codecs of {n / 1e6:.3g}M fp32 elements on {where}", notes=notes, summary=SUMMARY)
    keep(table)
    for index, codec in enumerate(options.codecs):

        def advance(done: float, codec: str = codec, index: int = index) -> None:
            progress(codec, (index + done) / len(options.codecs))

        advance(0.0)
        new_rows, note = measure(codec, n, device, limit, seconds, advance)
        table.rows += new_rows
        summary.append(summarize(codec, new_rows[0], data))
        notes += [f"{codec}: {note}"] if note else []
    table.rows += summary


def measure(
    codec: str, n: int, device: str, limit: MemoryLimit | None, seconds: float, advance: Callable[[float], None]
) -> tuple[list[Row], str]:
    """Verify the sides and time the correct ones. Return their rows, encode's first, and a note on the memory limit."""
    turns = [Buffers(codec, n, device), Buffers(codec, n, device)]
    sides = make_sides(codec, n)
    rows = {side.name: side.verify(turns[0]) for side in sides}
    right = [side for side in sides if rows[side.name].correct]
    samples = interleave(
        {side.name: lambda side=side: side.call(turns[0]) for side in right} | (limit.sides if limit else {}),
        rounds=(3, 200),
        seconds=seconds,
        before=lambda side: turns.reverse(),
        device=device,
        progress=advance,
    )
    speeds = limit.speeds(samples) if limit else {}
    for side in right:
        row = rows[side.name]
        row.samples = samples[side.name]
        row.figures["GB/s"] = speed = side.bytes_moved / 1e9 / row.time.median
        row.figures["% of limit"] = 100 * speed / max(speeds.values()) if speeds else None
        if device == "cuda":
            row.figures["% of copy"] = 100 * speed / speeds["copy"] if speeds else None
    for side in right:
        if side.peer_of:
            rows[side.name].compare_with(rows[side.peer_of])
    for row in rows.values():
        row.workload = codec
    return list(rows.values()), limit.note(speeds) if limit else ""


def summarize(codec: str, encode: Row, data: Mapping[str, Tensor]) -> Row:
    """Return a row with speed, size and errors of a codec. Its errors on the data are checked as well."""
    size = codecs.nbytes(codec, SAMPLE) / SAMPLE
    correct, largest = True, 0.0
    figures = {"encode GB/s": encode.figures.get("GB/s"), "bytes/element": size, "bits/element": 8 * size}
    for name, exact in data.items():
        got = codecs.decode(codecs.encode(exact, codec))
        bounded, error = compare(got, exact, Bounds.of(codec))
        correct, largest = correct and bounded, max(largest, error)
        figures[f"rms error, {name}"] = ((got - exact).norm() / exact.norm()).item()
    return Row(SUMMARY, codec, True, correct, f"{largest:.1e}", figures=figures)
