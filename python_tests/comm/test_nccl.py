"""All-reduces of CUDA tensors between processes, over NCCL itself and over c10d, on one GPU or several."""

import os
import time
import warnings
from datetime import timedelta

import contributions
import pytest
import torch
import torch.distributed as dist
from contributions import fitting, same_everywhere
from ranks import on_gpu, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import amp, codecs, comm, ddp, optim

pytestmark = pytest.mark.gpu
TRANSPORTS = ("nccl", "c10d")


def whole(rank, numel):
    return contributions.whole(rank, numel).cuda()


def normal(rank, numel):
    return contributions.normal(rank, numel).cuda()


def try_it(rank, world_size):
    tensor = torch.ones(8, device="cuda")
    comm.Communicator(timeout=timedelta(seconds=40), transport="nccl").all_reduce(tensor)
    assert torch.equal(tensor, torch.full_like(tensor, world_size))


@pytest.fixture(scope="module")
def on_gpus():
    """Return a function that runs the body of a test on ranks; skip if NCCL cannot connect two of them."""
    try:
        run_ranks(2, on_gpu, try_it, timeout=120)
    except Exception as error:
        if torch.cuda.device_count() >= 2:
            raise
        pytest.skip(f"NCCL connects no two ranks on this one GPU: {str(error).strip().splitlines()[-1]}")
    return lambda world_size, body, *args, **options: run_ranks(world_size, on_gpu, body, *args, timeout=300, **options)


def check_sums(rank, world_size, transport):
    communicator = comm.Communicator(transport=transport)
    for algorithm in (*comm.ALGORITHMS, "auto", "native"):
        for numel in (0, 1, world_size + 1, 1000, 300_001):
            for segments in (None, 3):
                tensor = whole(rank, numel)
                communicator.all_reduce(tensor, algorithm=algorithm, segments=segments)
                assert torch.equal(tensor, sum(whole(r, numel) for r in range(world_size))), (algorithm, numel)
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.float64, torch.float16, torch.bfloat16):
        tensor = torch.arange(5, device="cuda").to(dtype) + rank
        communicator.all_reduce(tensor)
        assert tensor.tolist() == [sum(i + r for r in range(world_size)) for i in range(5)]


def check_bits(rank, world_size, transport):
    """The bits equal those of the CPU over Gloo."""
    communicator = comm.Communicator(transport=transport)
    for codec in codecs.CODECS:
        for algorithm in fitting(codec):
            for numel in (17, 5003, 70_001):
                given = normal(rank, numel)
                results = []
                for tensor in (given.clone(), given.cpu()):
                    residual = codecs.zero_residual(tensor)
                    options = dict(algorithm=algorithm, codec=codec, segments=2, step=1, residual=residual)
                    communicator.all_reduce(tensor, "avg", **options)
                    results.append((tensor.cpu(), residual.cpu()))
                for ours, cpu in zip(*results, strict=True):
                    assert torch.equal(ours.view(torch.int32), cpu.view(torch.int32)), (codec, algorithm, numel)


def check_streams(rank, world_size, transport):
    communicator = comm.Communicator(transport=transport)
    numel = 1_000_000
    total = sum(whole(r, numel) for r in range(world_size))
    communicator.all_reduce(whole(rank, numel))
    side = torch.cuda.Stream()
    for turn in range(10):
        with torch.cuda.stream(side):
            tensor = torch.zeros(numel, device="cuda")
            torch.cuda._sleep(20_000_000)  # a read that does not wait sees zeros
            tensor.copy_(whole(rank, numel))
            if turn % 2:
                communicator.all_reduce(tensor)
            else:
                work = communicator.all_reduce(tensor, async_op=True)
                assert work.wait()
            result = tensor * 1
        side.synchronize()
        assert torch.equal(result, total)
    works = [communicator.all_reduce(whole(rank, 1000 + i), async_op=True) for i in range(50)]  # memory is reused
    for i, work in enumerate(works):
        assert torch.equal(work.get_future().wait()[0], sum(whole(r, 1000 + i) for r in range(world_size)))
    chained = (
        communicator.all_reduce(whole(rank, 10), async_op=True).get_future().then(lambda future: future.value()[0] * 2)
    )
    assert torch.equal(chained.wait(), 2 * sum(whole(r, 10) for r in range(world_size)))


def check_two_levels(rank, world_size, transport):
    communicator = comm.Communicator(transport=transport, ranks_per_host=2)
    for numel in (1, 32, 1000, 70_001, 2_100_001):
        tensor = whole(rank, numel)
        communicator.all_reduce(tensor)
        assert torch.equal(tensor, sum(whole(r, numel) for r in range(world_size)))
        for codec in ("int8", "int4", "sign"):
            tensor = normal(rank, numel)
            communicator.all_reduce(tensor, "avg", codec=codec)
            assert same_everywhere(tensor.cpu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def make_ddp():
    torch.manual_seed(0)
    # 16 KiB buckets contain one layer each.
    return DistributedDataParallel(Net().cuda(), bucket_cap_mb=16 / 1024, process_group=dist.new_group())


def check_hook(rank, world_size, transport):
    plain, ours = make_ddp(), make_ddp()
    state = ddp.register(ours, codec="raw", transport=transport)
    torch.manual_seed(rank)
    batches = torch.randn(100, 4, 64, device="cuda")
    for model in (plain, ours):
        for batch in batches[:2]:  # in the second step DDP rebuilds its buckets, and waits for that
            model(batch).square().mean().backward()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            ours(batch).square().mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert state.stats()["buckets"] >= 100
    for parameter in ours.parameters():
        assert same_everywhere(parameter.grad.cpu())


def check_feedback(rank, world_size, transport):
    model = make_ddp()
    scaler = amp.LossScaler("cuda", init_scale=2.0**10)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    state = ddp.register(model, scaler=scaler, transport=transport)
    torch.manual_seed(rank)
    batches = torch.randn(24, 4, 64, device="cuda")

    def step(batch):
        optimizer.zero_grad()
        scaler.scale(model(batch).square().mean()).backward()
        scaler.step(optimizer, max_norm=1.0, grad_stats=state.grad_stats)
        scaler.update()

    for batch in batches[:4]:  # in these DDP builds its buckets, and the optimizer its state
        step(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches[4:]:
            step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    (lost,) = state.state_dict()["feedback"].values()
    assert all(residual.isfinite().all() for residual in lost.values())
    assert any(residual.any() for residual in lost.values())
    assert all(same_everywhere(parameter.cpu()) for parameter in before)
    step(batches[0] * (float("nan") if rank == 1 else 1.0))
    assert scaler.skipped_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    (left,) = state.state_dict()["feedback"].values()
    assert all(torch.equal(lost[name], left[name]) for name in lost)


def check_graphs(rank, world_size, transport):
    communicator = comm.Communicator(transport=transport)
    for algorithm, codec in (("ring", "raw"), ("direct", "int8"), ("tree", "int4"), ("native", "raw")):
        tensor = normal(rank, 70_001)
        communicator.all_reduce(tensor.clone(), algorithm=algorithm, codec=codec, step=3)  # connects the peers
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            communicator.all_reduce(tensor, algorithm=algorithm, codec=codec, step=3)
        for seed in range(3):
            given = normal(rank + 10 * seed, 70_001)
            eager = given.clone()
            communicator.all_reduce(eager, algorithm=algorithm, codec=codec, step=3)
            communicator.all_reduce(torch.ones(200_000, device="cuda"), codec="int8")  # allocates other memory
            tensor.copy_(given)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(eager, tensor), (algorithm, codec)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("check", "worlds"),
    [
        (check_sums, (1, 2, 3, 4)),
        (check_bits, (2, 3)),
        (check_streams, (2,)),
        (check_two_levels, (4,)),
        (check_hook, (2,)),
        (check_feedback, (2,)),
        (check_graphs, (2,)),
    ],
)
def test_results(on_gpus, check, worlds, transport):
    for world_size in worlds:
        on_gpus(world_size, check, transport)


def check_lost(rank, world_size, transport):
    seconds = 5
    communicator = comm.Communicator(timeout=timedelta(seconds=seconds), transport=transport)
    own = dist.new_group(backend="nccl")
    tensor = torch.ones(100_000, device="cuda")
    communicator.all_reduce(tensor, "avg")
    dist.all_reduce(tensor, dist.ReduceOp.AVG, group=own)
    torch.cuda.synchronize()
    dist.barrier()
    if rank != 1:
        start = time.monotonic()
        communicator.all_reduce(tensor, "avg", algorithm="ring")
        assert time.monotonic() - start < seconds / 2  # it only enqueues
        torch.cuda.synchronize()
        assert time.monotonic() - start < seconds + 5
        assert tensor.isnan().all()
        with pytest.raises(
            dist.DistBackendError,
            match=rf"all_reduce.* on rank {rank} in a group of {world_size}: .*"
            r"the culprit is rank 1: it is alive, but has not made call 2",
        ):
            communicator.all_reduce(tensor)
    else:
        time.sleep(seconds + 3)
    dist.barrier()
    tensor = torch.ones(10, device="cuda")
    dist.all_reduce(tensor, group=own)  # the user's group still works
    assert torch.equal(tensor, torch.full_like(tensor, world_size))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_late_rank_poisons_the_result_and_is_named(on_gpus, transport):
    on_gpus(3, check_lost, transport)


def check_absent(rank, world_size):
    if rank == 1:
        os.environ["DLTRAIN_NCCL"] = "/nowhere/libnccl.so.2"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            tensor = torch.ones(10, device="cuda")
            comm.Communicator().all_reduce(tensor)
            assert torch.equal(tensor, torch.full_like(tensor, world_size))
    said = [str(warning.message) for warning in caught if "dltrain_ext" in str(warning.message)]
    assert len(said) == 1 and "rank 1: NCCL cannot be loaded: /nowhere/libnccl.so.2" in said[0]
    with pytest.raises(dist.DistBackendError, match="transport: nccl cannot be used: rank 1: NCCL cannot be loaded"):
        comm.Communicator(transport="nccl").all_reduce(tensor)


def test_if_one_rank_has_no_nccl_all_use_torchs(on_gpus):
    on_gpus(2, check_absent, fresh=True)  # a process that has loaded NCCL does not look for it again


def test_one_rank_needs_no_transport():
    run_ranks(1, on_gpu, check_sums, "nccl")
