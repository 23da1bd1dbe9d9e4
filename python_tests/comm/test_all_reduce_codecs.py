"""comm.all_reduce with codecs over Gloo: identical bits, the messages of the plan, error feedback, half dtypes."""

import time

import pytest
import torch
import torch.distributed as dist
from contributions import LOSSY, fitting, same_everywhere
from contributions import normal as given
from ranks import run_ranks

from dltrain_ext import codecs, comm


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def check_identical(rank, world_size):
    for codec in codecs.CODECS:
        block = max(codecs.block_size(codec), 16)
        lengths = [0, 1, world_size - 1, world_size + 1, world_size * block - 1, world_size * block + 1, 20_011]
        for algorithm in fitting(codec):
            for numel in lengths:
                parts = [given(r, numel) for r in range(world_size)]
                tensor = parts[rank].clone()
                comm.all_reduce(tensor, algorithm=algorithm, codec=codec)
                assert same_everywhere(tensor), (codec, algorithm, numel)
                if numel:
                    largest = sum(part.abs().max() for part in parts)
                    bound = (codecs.error_bound(codec).max * (world_size + 1) + 1e-5) * largest
                    assert (tensor - sum(parts)).abs().max() <= bound, (codec, algorithm, numel)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
def test_all_ranks_hold_the_same_bits(world_size):
    run_ranks(world_size, check_identical)


def check_millions(rank, world_size):
    numel = 3_000_017
    for codec, algorithm in (("raw", "double_tree"), ("int8", "ring"), ("int4", "tree"), ("sign", "halving_doubling")):
        for segments in (None, 7):
            tensor = given(rank, numel)
            comm.all_reduce(tensor, "avg", algorithm=algorithm, codec=codec, segments=segments)
            assert same_everywhere(tensor), (codec, algorithm, segments)


def test_millions_of_elements():
    run_ranks(3, check_millions)


class Chunk:
    """The state of one rank for one chunk, with messages that are made and read only by the functions of codecs."""

    def __init__(self, rank: int, values: torch.Tensor, codec: str):
        self.rank, self.values, self.codec = rank, values, codec
        self.before, self.after = [], []  # contributions that are added before and after its own
        self.message = None

    def fold(self, arrived: dict[int, codecs.Encoded]) -> None:
        self.before = [message for peer, message in sorted(arrived.items()) if peer < self.rank] + self.before
        self.after += [message for peer, message in sorted(arrived.items()) if peer > self.rank]

    def encode(self) -> codecs.Encoded:
        received, position = [*self.before, *self.after], len(self.before)
        self.message = codecs.reduce(self.values, received, codec=self.codec, position=position)
        self.before, self.after = [], []
        return self.message

    def result(self) -> torch.Tensor:
        parts = [codecs.decode(message) for message in (*self.before, self.message, *self.after)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


def interpret(algorithm: str, inputs: list[torch.Tensor], codec: str) -> list[torch.Tensor]:
    """Compute the results of all ranks from their plans, for inputs whose chunks are whole blocks."""
    plans = [comm.plan(algorithm, rank, len(inputs)) for rank in range(len(inputs))]
    ranks = [
        [Chunk(rank, part.clone(), codec) for part in values.chunk(plans[rank].chunks)]
        for rank, values in enumerate(inputs)
    ]
    for steps in zip(*(plan.rounds for plan in plans), strict=True):
        sent, encoded = {}, set()
        for rank, mine in enumerate(steps):
            for step in sorted(mine, key=lambda step: step.op != "finalize"):
                for chunk in range(*step.chunks):
                    if step.op in ("finalize", "send_partial") and (rank, chunk) not in encoded:
                        ranks[rank][chunk].encode()
                        encoded.add((rank, chunk))
                    if step.op.startswith("send"):
                        sent[rank, step.peer, chunk] = ranks[rank][chunk].message
        for rank, mine in enumerate(steps):
            for chunk, state in enumerate(ranks[rank]):
                arrived = {
                    step.peer: sent[step.peer, rank, chunk]
                    for step in mine
                    if step.op == "recv_reduce" and step.chunks[0] <= chunk < step.chunks[1]
                }
                state.fold(arrived)
            for step in mine:
                if step.op == "recv_final":
                    for chunk in range(*step.chunks):
                        ranks[rank][chunk].message = sent[step.peer, rank, chunk]
    return [torch.cat([chunk.result() for chunk in chunks]) for chunks in ranks]


def check_meaning(rank, world_size):
    for codec in LOSSY:
        for algorithm in fitting(codec):
            chunks = comm.plan(algorithm, rank, world_size).chunks
            parts = [given(r, chunks * 512) for r in range(world_size)]
            expected = interpret(algorithm, parts, codec)
            tensor = parts[rank].clone()
            comm.all_reduce(tensor, algorithm=algorithm, codec=codec)
            assert torch.equal(bits(tensor), bits(expected[rank])), (codec, algorithm)


@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_the_result_has_the_bits_of_the_messages_in_the_plan(world_size):
    """The expected bits are computed from the plan with codecs.reduce and codecs.decode only."""
    run_ranks(world_size, check_meaning)


def check_feedback(rank, world_size):
    numel, steps = 3001, 60
    for codec in LOSSY:
        for algorithm in fitting(codec):
            for dtype, tolerance in (("fp32", 1e-4), ("bf16", 0.3)):
                residual = codecs.zero_residual(torch.empty(numel), feedback_dtype=dtype)
                received, exact = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
                for step in range(steps):
                    tensor = given(rank, numel, step)
                    exact += tensor.double() / world_size
                    comm.all_reduce(tensor, "avg", algorithm=algorithm, codec=codec, residual=residual)
                    received += tensor
                left = residual.double()
                dist.all_reduce(left)
                dist.all_reduce(exact)
                assert (received + left - exact).abs().max() < tolerance, (codec, algorithm, dtype)


def test_results_and_residuals_add_up_to_the_inputs():
    run_ranks(3, check_feedback)


def check_not_finite(rank, world_size):
    for codec in codecs.CODECS:
        tensor, residual = given(rank, 4000), torch.full((4000,), 0.25)
        if rank == 1:
            tensor[1234] = float("nan")
        comm.all_reduce(tensor, codec=codec, residual=residual, algorithm="oneshot")
        assert same_everywhere(tensor)
        assert tensor[1234].isnan()
        assert tensor[: 1234 - 256].isfinite().all()
        assert tensor[1234 + 256 :].isfinite().all()
        if rank == 1:
            assert residual[1234] == 0.25


def test_a_nan_reaches_every_rank_and_leaves_its_residual():
    run_ranks(3, check_not_finite)


def check_rounding(rank, world_size):
    def result(communicator, **options):
        tensor = given(rank, 10_000)
        communicator.all_reduce(tensor, codec="int4", algorithm="direct", rounding="stochastic", **options)
        return tensor

    communicator = comm.Communicator()
    first, second = result(communicator), result(communicator)
    assert not torch.equal(first, second)  # the number of the call is used as the step
    assert torch.equal(first, result(communicator, step=1))
    assert torch.equal(first, result(comm.Communicator()))
    assert not torch.equal(first, result(communicator, step=1, seed=1))


def test_stochastic_rounding_is_repeated_by_its_seed_and_step():
    run_ranks(3, check_rounding)


def check_halves(rank, world_size):
    for dtype in (torch.float16, torch.bfloat16):
        for algorithm in comm.ALGORITHMS:
            parts = [given(r, 5003).mul(100).to(dtype) for r in range(world_size)]
            tensor = parts[rank].clone()
            comm.all_reduce(tensor, algorithm=algorithm)
            assert same_everywhere(tensor), (dtype, algorithm)
            # Summed in fp32 and rounded once, to the nearest half.
            exact = sum(part.double() for part in parts)
            assert ((tensor.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps / 2 * 1.01).all()
    strided = torch.zeros(200, dtype=torch.float16)[::2]
    strided += rank + 1
    comm.all_reduce(strided, codec="int8", async_op=True).wait()
    assert torch.allclose(strided, torch.full_like(strided, world_size * (world_size + 1) / 2), rtol=0.02)


def test_half_tensors_are_summed_in_fp32():
    run_ranks(3, check_halves)


def check_native(rank, world_size):
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8):
        for algorithm in ("native", "auto"):
            tensor = torch.arange(10).to(dtype) + rank
            comm.all_reduce(tensor, algorithm=algorithm)
            assert torch.equal(tensor, (world_size * torch.arange(10) + sum(range(world_size))).to(dtype))
    large = torch.tensor([2**53 + 1 + rank])  # fp32 cannot represent these numbers
    comm.all_reduce(large)
    assert large == world_size * (2**53 + 1) + sum(range(world_size))
    mean = torch.full((3,), float(rank), dtype=torch.float64)
    assert comm.all_reduce(mean, "avg", algorithm="native", async_op=True).wait()
    assert torch.allclose(mean, torch.full_like(mean, (world_size - 1) / 2))
    for length in (0, 64, 100_000):
        tensor = torch.ones(length)
        comm.all_reduce(tensor, algorithm="butterfly")
        assert torch.equal(tensor, torch.full((length,), float(world_size)))


def test_native_and_butterfly():
    run_ranks(3, check_native)


def check_disagreement(rank, world_size):
    comm.all_reduce(torch.ones(4))
    cases = [
        (dict(), dict(tensor=torch.ones(2999)), "2999 elements"),
        (dict(), dict(tensor=torch.ones(300_000)), "300000 elements"),
        (dict(), dict(codec="int8"), "all_reduce in int8 by direct"),
        (dict(), dict(op="avg"), "averaged"),
        (dict(algorithm="ring"), dict(), "all_reduce in raw by direct"),
        (dict(), dict(algorithm="oneshot"), "all_reduce in raw by oneshot"),
    ]
    for others, mine, _ in cases:
        communicator = comm.Communicator()
        communicator.all_reduce(torch.ones(4), algorithm="direct")
        call = {"tensor": torch.ones(3000), "algorithm": "direct", **(mine if rank == 1 else others)}
        with pytest.raises(dist.DistBackendError) as error:
            communicator.all_reduce(**call)
        yield str(error.value)
        with pytest.raises(dist.DistBackendError, match="all_reduce with"):
            communicator.all_reduce(torch.ones(1))


def disagreements(rank, world_size):
    return list(check_disagreement(rank, world_size))


def test_errors_of_ranks_that_disagree_name_both():
    for texts in zip(*run_ranks(3, disagreements), strict=True):
        assert all("it is in call 2: " in text or "its latest is call 2: " in text for text in texts), texts
        assert sum("this rank is in call 2: " in text for text in texts) >= 2, texts  # both errors name both


def check_errors(rank, world_size):
    values = torch.zeros(8)
    wrong = [
        (TypeError, "tensor: expected dtype float32, float16, bfloat16, .* got ComplexFloat", dict(tensor=values + 0j)),
        (
            TypeError,
            "tensor: expected dtype float32, float16 or bfloat16 for the algorithm auto and the codec int8 .* got Long",
            dict(tensor=values.long(), codec="int8"),
        ),
        (
            TypeError,
            "tensor: expected dtype float32, .* for the algorithm ring and the codec raw .* got Double",
            dict(tensor=values.double(), algorithm="ring"),
        ),
        (TypeError, "expected a floating dtype for op 'avg', got Int", dict(tensor=values.int(), op="avg")),
        (TypeError, "layout Sparse", dict(tensor=values.to_sparse(), codec="int8")),
        (
            ValueError,
            r"algorithm \(for the codec int4\): expected one of ring, .*, got 'recursive_doubling'",
            dict(algorithm="recursive_doubling", codec="int4"),
        ),
        (ValueError, r"\(for the codec fp16\): expected .*, got 'native'", dict(algorithm="native", codec="fp16")),
        (ValueError, "rounding: expected 'nearest' or 'stochastic', got 'up'", dict(rounding="up")),
        (ValueError, "seed: expected 0 to 9223372036854775807, got -1", dict(seed=-1)),
        (ValueError, "step: expected 0 to 4294967295, got -1", dict(step=-1)),
        (ValueError, "segments: expected 0 to 65535, got -2", dict(segments=-2)),
        (ValueError, "segments: expected .*, got 2147483648", dict(segments=2**31)),
        (TypeError, "segments: expected an int, got 1.5", dict(segments=1.5)),
        (TypeError, "algorithm: expected a str, got 3", dict(algorithm=3)),
        (TypeError, "codec: expected a str, got None", dict(codec=None)),
        (TypeError, "residual: expected a torch.Tensor, got int", dict(residual=3)),
        (ValueError, "residual: expected 8 elements, got 7", dict(residual=torch.zeros(7))),
        (TypeError, "residual: expected dtype float32 or bfloat16, got Half", dict(residual=values.half())),
        (ValueError, "expected memory apart from that of", dict(residual=values)),
        (
            ValueError,
            "residual: expected none where the rounding is stochastic and the codec sign",
            dict(residual=torch.zeros(8), codec="sign", rounding="stochastic"),
        ),
        (
            ValueError,
            "residual: expected none for the algorithm native",
            dict(residual=torch.zeros(8), algorithm="native"),
        ),
    ]
    for error, match, change in wrong:
        for async_op in (False, True):
            with pytest.raises(error, match=match):
                comm.all_reduce(**{"tensor": values, "async_op": async_op, **change})
    comm.all_reduce(values)  # the refused calls have not put the ranks out of step


def test_bad_input_names_the_argument():
    run_ranks(2, check_errors)


def check_native_disagreement(rank, world_size):
    texts = []
    for mine in (
        dict(tensor=torch.ones(1000)),
        dict(tensor=torch.ones(10).int()),
        dict(op="avg"),
        dict(algorithm="ring"),
    ):
        communicator = comm.Communicator()
        with pytest.raises(dist.DistBackendError) as error:
            call = {"tensor": torch.ones(10), "algorithm": "native", **(mine if rank == 1 else {})}
            communicator.all_reduce(**call)
        texts.append(str(error.value))
    return texts


def test_ranks_that_disagree_on_a_native_call_raise():
    for texts in zip(*run_ranks(2, check_native_disagreement), strict=True):
        assert all("it is in call 1: " in text and "this rank is in call 1: " in text for text in texts), texts
        assert any("all_reduce natively in Float over 10 elements" in text for text in texts), texts


def drop_after_native(rank, world_size):
    for _ in range(8):
        communicator = comm.Communicator()
        communicator.all_reduce(torch.ones(1000), algorithm="native")
        del communicator  # the backend's threads release the tensor only with the GIL


def test_a_communicator_may_be_dropped_after_a_native_call():
    run_ranks(2, drop_after_native)


def close_while_native(rank, world_size):
    communicator = comm.Communicator()
    if rank == 0:
        communicator.all_reduce(torch.ones(1))
        work = communicator.all_reduce(torch.ones(10), algorithm="native", async_op=True)
        time.sleep(0.3)
        start = time.monotonic()
        communicator.close()
        assert time.monotonic() - start < 5
        with pytest.raises(dist.DistBackendError, match="the communicator was closed"):
            work.wait()
        dist.barrier()
    else:
        communicator.all_reduce(torch.ones(1))
        dist.barrier()
        # Either what rank 0 has sent of its other call arrives first, or that it has left.
        with pytest.raises(dist.DistBackendError, match="it has closed its end|does not agree with rank 0 on the call"):
            communicator.all_reduce(torch.ones(10))


def test_close_does_not_wait_for_a_native_call():
    run_ranks(2, close_while_native)


def check_odd_tensors(rank, world_size):
    for odd in (torch._efficientzerotensor(5), torch._neg_view(torch.ones(5))):
        with pytest.raises(TypeError, match="tensor: expected a plain dense tensor"):
            comm.all_reduce(odd)
        with pytest.raises(TypeError, match="tensor: expected a plain dense tensor"):
            torch.ops.dltrain_ext.all_reduce_(odd, group_name=dist.group.WORLD.group_name)
    freed = torch.ones(5)
    freed.untyped_storage().resize_(0)
    refused = (torch.ones(5).to_sparse(), "a plain dense tensor"), (freed, "a tensor whose elements are all in memory")
    for odd, expected in refused:
        with pytest.raises((TypeError, ValueError), match=f"residual: expected {expected}"):
            comm.reduce_scatter(torch.ones(5), torch.ones(5), codec="int8", residual=odd)
    memory = torch.ones(300)
    with pytest.raises(ValueError, match="expected memory apart"):
        comm.all_reduce(memory[::3], codec="int8", residual=memory[150:250])


def test_tensors_that_are_not_plain_are_refused():
    run_ranks(1, check_odd_tensors)
