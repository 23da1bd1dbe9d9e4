"""comm.all_reduce over Gloo: exact sums, identical bits, order, errors."""

import itertools
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from contributions import whole as given
from contributions import whole_total as total
from ranks import run_ranks
from torch import library

from dltrain_ext import comm

WORLDS = [1, 2, 3, 4, 5, 8]


def check_exact_sums(rank, world_size):
    for algorithm in (*comm.ALGORITHMS, "auto"):
        for numel in (0, 1, max(world_size - 1, 1), world_size + 1, 15, 16, 17, 1000, 300_001):
            tensor = given(rank, numel)
            assert comm.all_reduce(tensor, algorithm=algorithm) is None
            assert torch.equal(tensor, total(world_size, numel)), (algorithm, numel)
    large = given(rank, 6_000_001)  # several segments
    comm.all_reduce(large, dist.ReduceOp.SUM, algorithm="ring")
    assert torch.equal(large, total(world_size, large.numel()))


@pytest.mark.parametrize("world_size", WORLDS)
def test_sums_are_exact(world_size):
    run_ranks(world_size, check_exact_sums)


def averages(rank, world_size):
    torch.manual_seed(rank)
    given = torch.randn(10_007)
    everyone = [torch.empty_like(given) for _ in range(world_size)]
    dist.all_gather(everyone, given)
    mean = torch.stack(everyone).double().mean(0)
    results = []
    for algorithm in comm.ALGORITHMS:
        for op in ("avg", dist.ReduceOp.AVG):
            result = given.clone()
            comm.all_reduce(result, op, algorithm=algorithm)
            assert (result - mean).abs().max() < 1e-6
            results.append(result)
    return results


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_averages_are_right_and_identical_on_all_ranks(world_size):
    first, *others = run_ranks(world_size, averages)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def check_op(rank, world_size):
    op, name = torch.ops.dltrain_ext.all_reduce_, dist.group.WORLD.group_name
    for codec in ("raw", "int8"):
        by_op, by_function = given(rank, 10_007), given(rank, 10_007)
        assert op(by_op, "avg", algorithm="ring", codec=codec, group_name=name) is None
        comm.all_reduce(by_function, "avg", algorithm="ring", codec=codec)
        assert torch.equal(by_op, by_function)
    half = dist.new_group([0, 1])
    if rank < 2:
        op(by_op := torch.ones(5), group_name=half.group_name)
        assert torch.equal(by_op, torch.full((5,), 2.0))
    with pytest.raises(ValueError, match="group_name: expected the group_name of a group of this rank, got 'none'"):
        op(torch.ones(5), group_name="none")
    library.opcheck(op, (torch.ones(5),), {"group_name": name})


def test_the_op_is_the_function():
    run_ranks(3, check_op)


def overflowing_average(rank, world_size):
    tensor = torch.full((100,), torch.finfo(torch.float32).max)
    comm.all_reduce(tensor, "avg")
    return tensor


def test_an_average_that_fits_does_not_overflow():
    for result in run_ranks(2, overflowing_average):
        assert torch.equal(result, torch.full((100,), torch.finfo(torch.float32).max))


def check_layouts(rank, world_size):
    dense = given(rank, 24).reshape(4, 6)
    expected = total(world_size, 24).reshape(4, 6)
    # The ranks use different layouts for the same elements.
    transposed = dense.t().contiguous().t() if rank == 0 else dense.clone()
    comm.all_reduce(transposed)
    assert torch.equal(transposed, expected)

    wide = torch.zeros(4, 12)
    strided = wide[:, ::2]
    strided.copy_(dense)
    comm.all_reduce(strided, async_op=True).wait()
    assert torch.equal(strided, expected)
    assert wide[:, 1::2].count_nonzero() == 0

    scalar = torch.tensor(float(rank))
    comm.all_reduce(scalar)
    assert scalar == sum(range(world_size))


def test_any_layout():
    run_ranks(3, check_layouts)


def check_async(rank, world_size):
    tensors = [given(rank, 1000 + i) for i in range(20)]
    works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors[:-1]]
    comm.all_reduce(tensors[-1])  # waits for the earlier calls
    assert all(work.is_completed() for work in works)
    for work, tensor in zip(works, tensors, strict=False):
        assert work.wait() is True
        assert isinstance(value := work.get_future().value(), list) and len(value) == 1 and value[0] is tensor
    for i, tensor in enumerate(tensors):
        assert torch.equal(tensor, total(world_size, 1000 + i))

    chained = comm.all_reduce(given(rank, 10), async_op=True).get_future().then(lambda future: future.value()[0] * 2)
    assert torch.equal(chained.wait(), total(world_size, 10) * 2)


def test_async_works_keep_their_order():
    run_ranks(3, check_async)


def check_wait_with_a_timeout(rank, world_size):
    communicator = comm.Communicator(timeout=timedelta(seconds=60))
    tensor = given(rank, 1000)
    if rank == 0:
        work = communicator.all_reduce(tensor, async_op=True)
        with pytest.raises(dist.DistBackendError, match=r"wait: the work was not complete after 0\.1 s; it goes on"):
            work.wait(timedelta(seconds=0.1))
        assert not work.is_completed()
    dist.barrier()
    if rank > 0:
        work = communicator.all_reduce(tensor, async_op=True)
    assert work.wait(timedelta(seconds=30)) and work.wait(timedelta(milliseconds=1))
    assert torch.equal(tensor, total(world_size, 1000))
    for wrong, error in ((1.0, TypeError), (timedelta(0), ValueError), (timedelta.max, ValueError)):
        with pytest.raises(error, match="timeout: expected"):
            work.wait(wrong)


def test_after_a_wait_that_times_out_the_work_continues():
    run_ranks(2, check_wait_with_a_timeout)


def check_groups_and_threads(rank, world_size):
    pair = dist.new_group([0, 1])
    rest = dist.new_group([1, 2])
    mine = [group for group, members in ((pair, (0, 1)), (rest, (1, 2))) if rank in members]
    for group in mine:
        tensor = given(rank, 100)
        comm.all_reduce(tensor, group=group)
        members = dist.get_process_group_ranks(group)
        assert torch.equal(tensor, sum(given(member, 100) for member in members))
    if rank == 0:
        with pytest.raises(TypeError, match="group: expected .* that this rank belongs to"):
            comm.all_reduce(torch.zeros(1), group=rest)

    # Two communicators of one group are used at once, each from a thread of its own.
    communicators = [comm.Communicator(), comm.Communicator(timeout=timedelta(seconds=30))]
    results = [given(rank, 50_000) for _ in communicators]

    def work(communicator, tensor):
        for _ in range(10):
            tensor.copy_(given(rank, 50_000))
            communicator.all_reduce(tensor, algorithm="direct")

    threads = [threading.Thread(target=work, args=pair) for pair in zip(communicators, results, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for communicator, result in zip(communicators, results, strict=True):
        assert torch.equal(result, total(world_size, 50_000))
        stats = communicator.stats()
        assert stats["calls"] == 10
        assert stats["wire_bytes"] == pytest.approx(10 * 2 * 50_000 * 4 * (world_size - 1) / world_size, rel=0.01)


def test_groups_and_threads():
    run_ranks(3, check_groups_and_threads)


def check_errors(rank, world_size):
    values = torch.zeros(8)
    wrong = [
        (TypeError, "tensor: expected a plain dense tensor, got layout Sparse", dict(tensor=values.to_sparse())),
        (ValueError, "tensor: expected a tensor on the CPU.*, got one on meta", dict(tensor=values.to("meta"))),
        (ValueError, r"tensor: expected elements .* got shape \[8, 3\]", dict(tensor=values[:, None].expand(8, 3))),
        (ValueError, "op: expected 'sum', 'avg', ReduceOp.SUM or ReduceOp.AVG, got 'max'", dict(op="max")),
        (ValueError, "op: expected .* got <RedOpType.MAX", dict(op=dist.ReduceOp.MAX)),
        (ValueError, "algorithm: expected one of ring, tree.*, native, auto, got 'rign'", dict(algorithm="rign")),
        (ValueError, "codec: expected one of raw, fp16.*, got 'int3'", dict(codec="int3")),
        (ValueError, r"op: expected .*, got \['sum'\]", dict(op=["sum"])),
        (TypeError, "tensor: expected a torch.Tensor, got list", dict(tensor=[1.0])),
        (TypeError, "group: expected a torch.distributed.ProcessGroup", dict(group=7)),
    ]
    for error, match, change in wrong:
        for async_op in (False, True):
            with pytest.raises(error, match=match):
                comm.all_reduce(**{"tensor": values, "async_op": async_op, **change})
    for name, none in (("timeout", ", or None"), ("answer_timeout", "")):
        said = f"^{name}: expected a datetime.timedelta of 1 ms to 365 days{none}, got 5"
        with pytest.raises(ValueError, match=said):
            comm.Communicator(**{name: 5})
    tensor = given(rank, 8)
    comm.all_reduce(tensor)  # the refused calls have not put the ranks out of step
    assert torch.equal(tensor, total(world_size, 8))

    communicator = comm.Communicator()
    communicator.drain()
    communicator.close()
    for call in (communicator.drain, lambda: communicator.all_reduce(values)):
        with pytest.raises(dist.DistBackendError, match="the communicator was closed"):
            call()


def test_bad_input_names_the_argument():
    run_ranks(2, check_errors)


def close_beside_calls(rank, world_size, async_op):
    """Return the errors of calls in one thread while another one closes the communicator."""
    errors = []

    def reduce(communicator):
        try:
            while True:
                communicator.all_reduce(given(rank, 1), async_op=async_op)
        except Exception as error:
            errors.append((type(error), str(error)))

    for turn in range(50):
        communicator = comm.Communicator()
        thread = threading.Thread(target=reduce, args=(communicator,))
        thread.start()
        time.sleep(0.001 * (turn % 5))
        communicator.close()
        thread.join()
    return {*errors}


@pytest.mark.parametrize("async_op", [False, True])
def test_a_call_that_meets_the_close_says_so(async_op):
    (errors,) = run_ranks(1, close_beside_calls, async_op)
    assert errors == {(dist.DistBackendError, "the communicator was closed")}


def check_callbacks(rank, world_size):
    communicator = comm.Communicator(timeout=timedelta(seconds=10))

    def chained(call):  # on the worker, or, when the work is done already, on the calling thread
        return communicator.all_reduce(given(rank, 8), async_op=True).get_future().then(call)

    # It would wait for the thread on which it runs.
    for caller, async_op in itertools.product(range(world_size), (False, True)):
        if rank == caller:
            first = communicator.all_reduce(given(rank, 8), async_op=True).get_future()
            future = first.then(lambda _, async_op=async_op: communicator.all_reduce(given(rank, 8), async_op=async_op))
            dist.barrier()
            with pytest.raises(RuntimeError, match="called by a callback of this communicator's own work"):
                future.wait()
        else:
            dist.barrier()  # if the work were done before .then, the callback would run on the calling thread
            communicator.all_reduce(given(rank, 8))
    # A callback may use another communicator.
    other = comm.Communicator()
    assert chained(lambda _: other.all_reduce(torch.ones(1))).wait() is None

    if rank == 0:
        work = communicator.all_reduce(given(rank, 8), async_op=True)
        work.get_future().set_result(None)  # a user may do this; the worker has to continue
        dist.barrier()
    else:
        dist.barrier()  # the work was not done before, so its future was not, either
        communicator.all_reduce(given(rank, 8))
    tensor = given(rank, 8)
    communicator.all_reduce(tensor)
    assert torch.equal(tensor, total(world_size, 8))

    assert chained(lambda _: communicator.close()).wait() is None
    with pytest.raises(dist.DistBackendError, match="closed"):
        communicator.all_reduce(tensor)

    def forgotten():
        last = comm.Communicator()
        work = last.all_reduce(given(rank, 8), algorithm="ring", async_op=True)
        return work.get_future().then(lambda _: last.stats())

    assert forgotten().wait()["calls"] == 1


def test_callbacks():
    run_ranks(2, check_callbacks)


def test_without_a_group():
    with pytest.raises(ValueError, match="group: expected an initialized default group"):
        comm.all_reduce(torch.zeros(1))


def some_of_a_group(rank, world_size):
    """Ranks communicate in pairs of which the others know nothing, again and again, and all ranks in between."""
    everyone, found = comm.Communicator(), []
    for pairs in (((0, 2), (3, 1)), ((0, 3),), ((2, 0),)):
        for pair in pairs:
            if rank in pair:
                communicator = comm.Communicator(ranks=pair)
                tensor = torch.full((5,), float(rank))
                communicator.broadcast(tensor, pair[0])
                assert communicator.world_size == 2 and torch.equal(tensor, torch.full((5,), float(pair[0])))
                tensor = torch.full((5,), float(rank))
                communicator.all_reduce(tensor)
                assert torch.equal(tensor, torch.full((5,), float(sum(pair))))
                communicator.close()
                found.append(pair)
        tensor = torch.full((5,), float(rank))
        everyone.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((5,), 6.0))
    alone = comm.Communicator(ranks=[rank])
    alone.all_reduce(tensor)
    assert alone.world_size == 1 and torch.equal(tensor, torch.full((5,), 6.0))
    if rank in (1, 2):
        group = dist.new_group([1, 2], use_local_synchronization=True)
        with pytest.raises(
            ValueError, match=r"ranks: expected ranks of the group, each once, out of \[1, 2\], got \[0"
        ):
            comm.Communicator(group, ranks=[0, 1])
    for wrong in ([0, 0], [0, 7], 5, "01", [0.5]):
        with pytest.raises(
            ValueError, match=r"ranks: expected ranks of the group, each once, out of \[0, 1, 2, 3\], got"
        ):
            comm.Communicator(ranks=wrong)
    with pytest.raises(ValueError, match="ranks: expected this rank, ., to be one of them, got"):
        comm.Communicator(ranks=[(rank + 1) % 4])
    return found


def test_some_ranks_of_a_group_communicate():
    assert [len(found) for found in run_ranks(4, some_of_a_group)] == [3, 1, 2, 2]
