"""comm.all_gather, broadcast and reduce over Gloo: the bits of their messages, and refused calls."""

import pytest
import torch
import torch.distributed as dist
from contributions import LOSSY, normal
from ranks import run_ranks

from dltrain_ext import codecs, comm

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ANY_DTYPE = (*DTYPES, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)


def decoded(tensor, codec, **options):
    """Return a tensor after encoding and decoding."""
    return codecs.decode(codecs.encode(tensor, codec, **options)).view(tensor.shape).to(tensor.dtype)


def of_any_dtype(rank, numel, dtype):
    values = (7 * torch.arange(numel) + 13 * rank) % 251
    return (values % 2 == 0) if dtype == torch.bool else values.to(dtype)


def check_gathers(rank, world_size):
    for algorithm in comm.COLLECTIVES["all_gather"]:
        for codec in codecs.CODECS:
            for numel in (0, 1, 127, 1000, 70_001):
                for dtype in DTYPES if numel < 70_000 else DTYPES[:1]:
                    inputs = [normal(r, numel).to(dtype) for r in range(world_size)]
                    output = torch.full((world_size, numel), 7.0, dtype=dtype)
                    comm.all_gather(output, inputs[rank], codec=codec, algorithm=algorithm)
                    assert torch.equal(output, torch.stack([decoded(given, codec) for given in inputs])), (codec, numel)
                    assert torch.equal(inputs[rank], normal(rank, numel).to(dtype)), "the input does not change"
        for dtype in ANY_DTYPE:
            sizes = [5 * r + 3 for r in range(world_size)]  # uint8 elements do not fill whole words
            outputs = [torch.zeros(size, dtype=dtype) for size in sizes]
            comm.all_gather(outputs, of_any_dtype(rank, sizes[rank], dtype), algorithm=algorithm)
            for r, output in enumerate(outputs):
                assert torch.equal(output, of_any_dtype(r, sizes[r], dtype)), dtype


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_all_gather_gives_what_the_messages_mean(world_size):
    run_ranks(world_size, check_gathers)


def check_uneven_lists(rank, world_size):
    sizes = [1001, 0, 70_000]
    for codec in ("raw", "int8"):
        parts = [normal(r, size) for r, size in enumerate(sizes)]
        outputs = [torch.zeros(size) for size in sizes]
        work = comm.all_gather(outputs, parts[rank], codec=codec, async_op=True)
        assert work.wait() and work.get_future().value()[2] is outputs[2]
        for output, part in zip(outputs, parts, strict=True):
            assert torch.equal(output, decoded(part, codec) if part.numel() else part)
        inputs = [[normal(10 * r + q, size) for q, size in enumerate(sizes)] for r in range(world_size)]
        share = torch.empty(sizes[rank])
        comm.reduce_scatter(share, inputs[rank], codec=codec)
        want = torch.zeros_like(share)
        for r in range(world_size):
            part = inputs[r][rank]
            want += decoded(part, codec) if r != rank and part.numel() else part
        assert torch.equal(share, want)
    together = normal(rank, 3 * 8).view(3, 8)
    comm.all_gather(together, together[rank])  # the input is already in the output
    assert torch.equal(together, torch.stack([normal(r, 3 * 8).view(3, 8)[r] for r in range(3)]))


def test_lists_may_have_tensors_of_any_size():
    run_ranks(3, check_uneven_lists)


def check_broadcasts(rank, world_size):
    for algorithm in comm.COLLECTIVES["broadcast"]:
        for src in {0, world_size - 1}:
            for codec in codecs.CODECS:
                for numel in (0, 1, 127, 70_001):
                    for dtype in DTYPES if numel < 70_000 else DTYPES[:1]:
                        given = normal(src, numel).to(dtype)
                        tensor = given.clone() if rank == src else torch.full_like(given, float("nan"))
                        comm.broadcast(tensor, src, codec=codec, algorithm=algorithm)
                        assert torch.equal(tensor, decoded(given, codec)), (algorithm, codec, numel, dtype)
            for dtype in ANY_DTYPE:
                given = of_any_dtype(src, 1003, dtype)
                tensor = given.clone() if rank == src else torch.zeros_like(given)
                comm.broadcast(tensor, src, algorithm=algorithm)
                assert torch.equal(tensor, given), dtype


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_broadcast_gives_what_the_message_means(world_size):
    run_ranks(world_size, check_broadcasts)


def check_reduces(rank, world_size):
    for algorithm in comm.COLLECTIVES["reduce"]:
        for dst in {0, world_size - 1}:
            for numel in (0, 1, 127, 70_001):
                for op in ("sum", "avg"):
                    tensor = normal(rank, numel)
                    comm.reduce(tensor, dst, op, algorithm=algorithm)
                    want = sum(normal(r, numel).double() for r in range(world_size)) / (
                        world_size if op == "avg" else 1
                    )
                    if rank == dst:
                        assert torch.allclose(tensor.double(), want, atol=1e-5), (algorithm, numel, op)
            for codec in LOSSY:
                tensor = torch.full((1000,), float(rank + 1))  # one value, which codecs represent up to rounding
                comm.reduce(tensor, dst, codec=codec, algorithm=algorithm)
                if rank == dst:
                    total = world_size * (world_size + 1) / 2
                    assert torch.allclose(tensor, torch.full((1000,), total), rtol=2e-2), (algorithm, codec)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_reduce_gives_one_rank_the_sum(world_size):
    run_ranks(world_size, check_reduces)


def check_feedback(rank, world_size):
    """Over several steps, the results and the remaining residuals add up to the inputs."""
    numel, src = 1001, 1
    lost, sent, got = torch.zeros(numel), torch.zeros(numel), torch.zeros(numel)
    parts, gathered = torch.zeros(world_size, numel), torch.zeros(world_size, numel)
    mine = torch.zeros(numel)
    for step in range(5):
        given = normal(step, numel)
        tensor = given.clone()
        comm.broadcast(tensor, src, codec="int4", residual=lost)
        sent, got = sent + given, got + tensor
        inputs = [normal(10 * step + r, numel) for r in range(world_size)]
        output = torch.empty(world_size, numel)
        comm.all_gather(output, inputs[rank], codec="int4", residual=mine)
        parts, gathered = parts + torch.stack(inputs), gathered + output
    rest = lost.clone()
    dist.broadcast(rest, src)
    assert torch.allclose(got + rest, sent, atol=1e-4) and not torch.equal(got, sent)
    assert rank == src or not lost.any()
    rests = torch.empty(world_size, numel)
    dist.all_gather_into_tensor(rests.view(-1), mine)
    assert torch.allclose(gathered + rests, parts, atol=1e-4)


def test_feedback_sends_later_what_encoding_has_lost():
    run_ranks(3, check_feedback)


def check_group(rank, world_size):
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    tensor = torch.full((5,), float(rank))
    comm.broadcast(tensor, 2, group=group)
    assert torch.equal(tensor, torch.full((5,), 2.0)), "src is a rank of the default group"
    spoilt = torch.ones(300)
    if rank == 1:
        spoilt[5] = float("inf")
    comm.broadcast(spoilt, 1, group=group, codec="int8")
    assert spoilt[:256].isnan().all() and torch.equal(spoilt[256:], torch.ones(44)), "an overflow is not dropped"
    with pytest.raises(ValueError, match=r"src: expected a rank of the group, one of \[1, 2\], got 0"):
        comm.broadcast(tensor, 0, group=group)


def test_ranks_of_a_group_are_those_of_the_default_group():
    run_ranks(3, check_group)


def check_refusals(rank, world_size):
    tensor, whole = torch.zeros(4), torch.zeros(8)
    for error, text, function, arguments, options in (
        (TypeError, "output: expected a torch.Tensor, got NoneType", comm.all_gather, (None, tensor), {}),
        (TypeError, "input: expected a torch.Tensor, got list", comm.all_gather, (whole, [tensor]), {}),
        (ValueError, "output: expected 2 times as many elements as input, 6", comm.all_gather, (whole, tensor[:3]), {}),
        (TypeError, "output: expected the dtype of input, Half", comm.all_gather, (whole, tensor.half()), {}),
        (ValueError, "output: expected a tensor for each rank, got none", comm.all_gather, ([], tensor), {}),
        (ValueError, "output: expected a tensor for each of 2 ranks, got 1", comm.all_gather, ([whole], tensor), {}),
        (ValueError, "memory apart", comm.all_gather, (whole, whole[1:5]), {}),
        (
            ValueError,
            r"output\[1\]: expected the dtype of output\[0\]",
            comm.all_gather,
            ([tensor, tensor.int()], tensor),
            {},
        ),
        (
            ValueError,
            r"output\[1\]: expected elements that each have a place of their own",
            comm.all_gather,
            ([tensor, torch.zeros(1).expand(4)], tensor),
            {},
        ),
        (ValueError, "input: expected as many elements as rank", comm.all_gather, ([whole, whole], tensor), {}),
        (TypeError, "input: expected dtype float32", comm.all_gather, (whole.int(), tensor.int()), {"codec": "int8"}),
        (
            ValueError,
            "algorithm: expected one of direct, ring, auto, got 'tree'",
            comm.all_gather,
            (whole, tensor),
            {"algorithm": "tree"},
        ),
        (ValueError, "codec: expected", comm.all_gather, (whole, tensor), {"codec": "auto"}),
        (ValueError, "src: expected a rank of the group", comm.broadcast, (tensor, 2), {}),
        (
            TypeError,
            "expected a plain dense tensor",
            comm.broadcast,
            (torch.zeros(2, dtype=torch.cfloat).conj(), 0),
            {},
        ),
        (TypeError, "tensor: expected a torch.Tensor, got list", comm.broadcast, ([1.0], 0), {}),
        (TypeError, "tensor: expected dtype float32", comm.broadcast, (tensor.int(), 0), {"codec": "int8"}),
        (ValueError, "dst: expected a rank of the group", comm.reduce, (tensor, "0"), {}),
        (TypeError, "tensor: expected dtype float32", comm.reduce, (tensor.int(), 0), {}),
        (ValueError, "op: expected", comm.reduce, (tensor, 0, "max"), {}),
        (ValueError, "residual", comm.reduce, (tensor, 0), {"codec": "int8", "residual": whole}),
        (
            ValueError,
            "tensor: expected elements that each have a place",
            comm.broadcast,
            (torch.zeros(1).expand(4), 0),
            {},
        ),
    ):
        with pytest.raises(error, match=text):
            function(*arguments, **options)
    comm.broadcast(tensor.add_(rank), 1)
    assert torch.equal(tensor, torch.ones(4)), "the communicator can still be used"


def test_errors_name_the_wrong_argument():
    run_ranks(2, check_refusals)


def check_two_levels(rank, world_size):
    with pytest.raises(ValueError, match="broadcast: expected a communicator with ranks_per_host=1"):
        comm.Communicator(ranks_per_host=2).broadcast(torch.zeros(2), 0)
    stats = comm.Communicator(ranks_per_host=1)
    stats.reduce(torch.zeros(256), 0)
    assert stats.stats()["calls"] == 1


def test_two_levels_are_refused():
    run_ranks(4, check_two_levels)


def check_disagreement(rank, world_size, sizes, dtypes):
    with pytest.raises(dist.DistBackendError, match="all_gather with direct on rank"):
        part = torch.zeros(sizes[rank], dtype=dtypes[rank])
        comm.all_gather(part.new_zeros(2 * part.numel()), part)


@pytest.mark.parametrize(
    ("sizes", "dtypes"),
    [
        ((4, 5), (torch.float32, torch.float32)),
        ((5, 6), (torch.bfloat16, torch.bfloat16)),  # the same number of words
        ((2, 4), (torch.float64, torch.float32)),
        ((4, 4), (torch.int32, torch.float32)),
    ],
)
def test_all_ranks_raise_if_they_disagree(sizes, dtypes):
    run_ranks(2, check_disagreement, sizes, dtypes)


def check_one_element(rank, world_size):
    """A tensor that torch calls contiguous, with any stride."""
    tensor = torch.full((1, 2), rank + 1.0, dtype=torch.bfloat16)[:, 0]
    comm.broadcast(tensor, 0)
    assert tensor.item() == 1.0


def test_tensors_of_one_element_with_any_stride():
    run_ranks(2, check_one_element)


def check_lists_fail(rank, world_size):
    communicator = comm.Communicator(ranks_per_host=1)
    outputs = [torch.zeros(3), torch.zeros(3)]
    if rank == 0:
        work = communicator.all_gather(outputs, torch.ones(3), async_op=True)
        assert outputs[0]._version == outputs[1]._version == 1, "the versions are incremented at once"
        with pytest.raises(dist.DistBackendError):
            work.wait()
    communicator.close()
    with pytest.raises(TypeError, match="broadcast: expected the options .*, got op"):
        communicator.broadcast(outputs[0], 0, op="avg")


def test_lists_raise_the_same_errors_as_tensors():
    run_ranks(2, check_lists_fail)
