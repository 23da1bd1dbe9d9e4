"""comm.reduce_scatter over Gloo: the bits of its messages, error feedback, and refused calls."""

import pytest
import torch
import torch.distributed as dist
from contributions import LOSSY, normal
from ranks import run_ranks

from dltrain_ext import codecs, comm

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def expected(inputs, rank, codec, average, rest=None):
    """Sum this rank's shard of all inputs in rank order; all but its own are encoded and decoded."""
    scale = torch.tensor(1 / len(inputs) if average else 1.0)
    total = None
    for r, given in enumerate(inputs):
        part = given[rank].float() * scale
        if r != rank:
            part = codecs.decode(codecs.encode(part, codec, residual=None if rest is None else rest[r][rank]))
        total = part if total is None else total + part
    return total


def check_sums(rank, world_size):
    for codec in codecs.CODECS:
        for numel in (0, 1, 3, 127, 1000, 70_001):
            for dtype in DTYPES if numel < 70_000 else DTYPES[:1]:
                for op in ("sum", "avg"):
                    inputs = [
                        normal(r, world_size * numel).view(world_size, numel).to(dtype) for r in range(world_size)
                    ]
                    given, output = inputs[rank].clone(), torch.full((numel,), 7.0, dtype=dtype)
                    comm.reduce_scatter(output, given, op, codec=codec)
                    want = expected(inputs, rank, codec, op == "avg").to(dtype)
                    assert torch.equal(output, want), (codec, numel, dtype, op)
                    assert torch.equal(given, inputs[rank]), "the input does not change"


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_result_is_the_sum_of_the_messages(world_size):
    run_ranks(world_size, check_sums)


def check_segments(rank, world_size):
    numel = 600_000  # elements of a shard; by default int8 uses three segments
    inputs = [normal(r, world_size * numel).view(world_size, numel) for r in range(world_size)]
    want = expected(inputs, rank, "int8", True)
    for segments in (None, 1, 7):
        output = torch.empty(numel)
        comm.reduce_scatter(output, inputs[rank], "avg", codec="int8", segments=segments)
        assert torch.equal(output, want), segments


def test_segments_change_nothing():
    run_ranks(3, check_segments)


def check_feedback(rank, world_size, codec):
    shape = (world_size, 1001)
    own = torch.zeros(shape)
    rest = [torch.zeros(shape) for _ in range(world_size)]
    sent, got = torch.zeros(1001), torch.zeros(1001)
    for step in range(5):
        inputs = [normal(100 * step + r, world_size * 1001).view(shape) for r in range(world_size)]
        output = torch.empty(1001)
        comm.reduce_scatter(output, inputs[rank], codec=codec, residual=own)
        assert torch.equal(output, expected(inputs, rank, codec, False, rest)), "bit by bit"
        sent, got = sent + sum(given[rank] for given in inputs), got + output
    assert torch.equal(own[rank], torch.zeros(1001)), "the rank's own shard is not encoded"
    others = own.clone()
    dist.all_reduce(others)
    assert torch.allclose(got + others[rank], sent, atol=1e-3), "the loss is in the residuals"
    assert not torch.equal(got, sent)


@pytest.mark.parametrize("codec", [codec for codec in LOSSY if codec not in ("fp16", "bf16")])
def test_feedback_sends_later_what_encoding_has_lost(codec):
    run_ranks(3, check_feedback, codec)


def check_noise(rank, world_size):
    given = normal(rank, world_size * 4097).view(world_size, 4097)
    outputs = []
    for seed, step in ((0, 1), (0, 1), (0, 2), (1, 1)):
        output = torch.empty(4097)
        comm.reduce_scatter(output, given, codec="int4", rounding="stochastic", seed=seed, step=step)
        outputs.append(output)
    same, again, later, other = outputs
    assert torch.equal(same, again)
    assert not torch.equal(same, later) and not torch.equal(same, other)


def test_stochastic_rounding_depends_on_seed_and_step():
    run_ranks(2, check_noise)


def check_shapes(rank, world_size):
    given = normal(rank, 6 * 4 * world_size).view(world_size * 6, 4)
    output = torch.zeros(4, 6).t()  # not contiguous
    work = comm.reduce_scatter(output, given, dist.ReduceOp.AVG, async_op=True)
    assert work.wait() and work.get_future().value()[0].data_ptr() == output.data_ptr()
    want = sum(normal(r, 6 * 4 * world_size).view(world_size, 6, 4)[rank] / world_size for r in range(world_size))
    assert torch.allclose(output, want, atol=1e-6)
    strided = normal(rank, 8 * world_size).view(-1, 2)[:, 0]
    flat = torch.empty(4)
    comm.reduce_scatter(flat, strided, "sum")
    assert torch.allclose(
        flat, sum(normal(r, 8 * world_size).view(world_size, 4, 2)[rank, :, 0] for r in range(world_size))
    )
    comm.reduce_scatter(flat, torch.ones(1).expand(4 * world_size))
    assert torch.equal(flat, torch.full((4,), float(world_size))), "the input is only read"
    spoilt = torch.ones(world_size, 300)
    if rank == 0:
        spoilt[1, 5] = float("inf")
    output = torch.empty(300)
    comm.reduce_scatter(output, spoilt, codec="int8")
    assert output.isfinite().all() == (rank != 1), "an overflow is not dropped"


def test_any_shape_and_overflows():
    run_ranks(2, check_shapes)


def check_refusals(rank, world_size):
    given, output, buffer = torch.zeros(8), torch.zeros(4), torch.zeros(8)
    for error, text, arguments, options in (
        (TypeError, "output: expected a torch.Tensor, got list", ([], given), {}),
        (TypeError, "input: expected a torch.Tensor, got NoneType", (output, None), {}),
        (ValueError, "input: expected 2 times as many elements as output, 6, got 8", (torch.zeros(3), given), {}),
        (TypeError, "output: expected the dtype of input, Float, got Half", (output.half(), given), {}),
        (TypeError, "input: expected dtype float32, float16 or bfloat16, got Int", (output.int(), given.int()), {}),
        (ValueError, "memory apart", (given[4:], given), {}),
        (ValueError, "memory apart", (given[:4], given), {}),
        (ValueError, "output: expected elements that each have a place", (torch.zeros(1).expand(4), given), {}),
        (ValueError, "op: expected", (output, given, "max"), {}),
        (ValueError, "codec: expected", (output, given), {"codec": "nonsense"}),
        (ValueError, "codec: expected", (output, given), {"codec": "auto"}),
        (ValueError, "residual", (output, given), {"codec": "int8", "residual": torch.zeros(4)}),
        (
            ValueError,
            "residual: expected memory apart from that of output",
            (buffer[:4], given),
            {"codec": "int8", "residual": buffer},
        ),
        (
            ValueError,
            "residual: expected memory apart from that of input",
            (output, given),
            {"codec": "int8", "residual": given},
        ),
        (ValueError, "segments", (output, given), {"segments": -1}),
        (ValueError, "on the CPU", (output.to("meta"), given.to("meta")), {}),
    ):
        with pytest.raises(error, match=text):
            comm.reduce_scatter(*arguments, **options)
    comm.reduce_scatter(output, given + 1)
    assert torch.equal(output, torch.full((4,), 2.0)), "the communicator can still be used"


def test_errors_name_the_wrong_argument():
    run_ranks(2, check_refusals)


def check_disagreement(rank, world_size):
    with pytest.raises(dist.DistBackendError, match="reduce_scatter"):
        comm.reduce_scatter(torch.zeros(4 + rank), torch.zeros(2 * (4 + rank)))


def test_all_ranks_raise_if_they_disagree():
    run_ranks(2, check_disagreement)


def check_two_levels(rank, world_size):
    with pytest.raises(ValueError, match="ranks_per_host=1"):
        comm.Communicator(ranks_per_host=2).reduce_scatter(torch.zeros(2), torch.zeros(8))


def test_two_levels_are_refused():
    run_ranks(4, check_two_levels)
