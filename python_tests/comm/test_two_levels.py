"""All-reduces in two levels, within and between hosts: over Gloo, and on emulated hosts with slow links."""

import json
import os
import signal
import time
from datetime import timedelta

import commands
import pytest
import torch
import torch.distributed as dist
from contributions import fitting, normal, same_everywhere, whole, whole_total
from ranks import DEADLINE, FAR, SILENCE, SLACK, finish_before, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import codecs, comm, ddp
from dltrain_ext.comm import connections
from dltrain_ext.comm.connections import layout


@pytest.mark.parametrize(
    ("hosts", "rank", "per_host", "expected"),
    [
        ("aabb", 0, None, ([0, 1], [0, 2], 2, 2, 2)),
        ("aabb", 3, None, ([2, 3], [1, 3], 2, 2, 2)),
        ("abab", 2, None, ([0, 2], [2, 3], 2, 2, 2)),  # ranks of a host need not be neighbours
        ("abcabc", 4, None, ([1, 4], [3, 4, 5], 3, 2, 2)),
        ("aaaabb", 1, None, ([0, 1, 2, 3], [1, 5], 2, 2, 4)),
        ("aaaabb", 2, None, ([0, 1, 2, 3], [2], 2, 2, 4)),  # this rank has no shard
        ("aab", 2, None, ([2], [0, 2], 2, 1, 2)),
        ("aaaa", 1, None, None),  # one host
        ("abcd", 1, None, None),  # one rank on each host
        ("aaaa", 1, 1, None),
        ("aaaa", 1, 4, None),
        ("aaaa", 1, 2, ([0, 1], [1, 3], 2, 2, 2)),  # the argument overrides the detected hosts
        ("abcdef", 4, 3, ([3, 4, 5], [1, 4], 2, 3, 3)),
    ],
)
def test_layouts(hosts, rank, per_host, expected):
    assert layout(hosts, rank, per_host) == expected


def on_hosts(sizes, **options):
    """Return a communicator of ranks that appear to be on hosts with the given numbers of ranks."""
    hosts = [host for host, size in enumerate(sizes) for _ in range(size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "host_id", lambda: str(hosts[dist.get_rank()]))
        return comm.Communicator(**options)


def check_sums(rank, world_size, sizes):
    communicator, per_host = on_hosts(sizes), max(sizes)
    flat = comm.Communicator(ranks_per_host=1)
    for algorithm in (*comm.ALGORITHMS, "auto", "butterfly"):
        for numel in (0, 1, world_size - 1, 15, 16 * per_host, 16 * per_host + 1, 1000, 70_001, 2_100_001):
            tensor = whole(rank, numel)
            communicator.all_reduce(tensor, algorithm=algorithm)
            assert torch.equal(tensor, whole_total(world_size, numel)), (algorithm, numel)
    for dtype in (torch.float16, torch.bfloat16):
        tensor = whole(rank, 1001).to(dtype)
        communicator.all_reduce(tensor)
        assert torch.equal(tensor.float(), whole_total(world_size, 1001))
    # In fp32 256 + 1 + 1 is 258; with bfloat16 sums it is 256.
    halves = torch.full((100,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    communicator.all_reduce(halves)
    assert torch.equal(halves, torch.full((100,), 255.0 + world_size).bfloat16())
    strided = torch.zeros(10, 20)[:, ::2]
    strided += rank
    communicator.all_reduce(strided, async_op=True).wait()
    assert torch.equal(strided, torch.full((10, 10), sum(range(world_size)) * 1.0))
    means = torch.full((100,), float(rank), dtype=torch.float64)
    communicator.all_reduce(means, "avg")
    torch.testing.assert_close(means, torch.full_like(means, (world_size - 1) / 2))
    for dtype in (torch.int64, torch.float64, torch.uint8):
        tensor = torch.arange(5).to(dtype) + rank
        communicator.all_reduce(tensor)
        assert torch.equal(tensor, sum(torch.arange(5).to(dtype) + r for r in range(world_size)))
    large = torch.full((33,), torch.finfo(torch.float32).max)
    communicator.all_reduce(large, "avg")
    torch.testing.assert_close(large, torch.full((33,), torch.finfo(torch.float32).max))
    mean, other = normal(rank, 5000), normal(rank, 5000)
    communicator.all_reduce(mean, "avg")
    flat.all_reduce(other, "avg")
    torch.testing.assert_close(mean, other, rtol=1e-5, atol=1e-6)
    assert flat.stats()["inside_bytes"] == 0 < communicator.stats()["inside_bytes"]


def check_codecs(rank, world_size, sizes):
    communicator = on_hosts(sizes)
    for codec in codecs.CODECS:
        block = max(codecs.block_size(codec), 16)
        for algorithm in fitting(codec):
            for numel in (1, world_size * block + 1, 20_011):
                for rounding in ("nearest", "stochastic"):
                    parts = [normal(r, numel) for r in range(world_size)]
                    tensor = parts[rank].clone()
                    communicator.all_reduce(tensor, algorithm=algorithm, codec=codec, rounding=rounding)
                    assert same_everywhere(tensor), (codec, algorithm, numel)
                    largest = sum(part.abs().max() for part in parts)
                    bound = codecs.error_bound(codec, rounding).max * (world_size + 1) + 1e-5
                    assert (tensor - sum(parts)).abs().max() <= bound * largest, (codec, algorithm, numel)
            tensor = torch.ones(4000)
            if rank == world_size - 1:
                tensor[1234] = torch.nan
            communicator.all_reduce(tensor, algorithm=algorithm, codec=codec)
            assert same_everywhere(tensor.nan_to_num(7.0))
            assert not tensor[1234].isfinite() and tensor[1234 - 256].isfinite() and tensor[1234 + 256].isfinite()


@pytest.mark.parametrize("sizes", [(2, 2), (2, 2, 2), (3, 2)])
@pytest.mark.parametrize("check", [check_sums, check_codecs])
def test_results(check, sizes):
    run_ranks(sum(sizes), check, sizes)


def check_feedback(rank, world_size, sizes):
    """Over several steps, the results and the remaining residuals of all ranks add up to the inputs."""
    communicator = on_hosts(sizes)
    numel, steps = 2_100_001, 6
    for codec, algorithm in (("int8", "direct"), ("int4", "ring"), ("sign", "tree")):
        residual = codecs.zero_residual(torch.empty(numel))
        exact, received = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
        for step in range(steps):
            tensor = normal(rank, numel, step)
            exact += tensor
            communicator.all_reduce(tensor, "avg", algorithm=algorithm, codec=codec, residual=residual)
            received += tensor
        left = residual.double()
        for mine in (left, exact):
            dist.all_reduce(mine)
        torch.testing.assert_close(received + left, exact / world_size, rtol=0, atol=1e-4)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1)])
def test_feedback_loses_nothing(sizes):
    run_ranks(sum(sizes), check_feedback, sizes)


def check_bytes(rank, world_size, per_host):
    """With direct, the bytes between hosts are divided by the number of ranks of a host."""
    communicator, flat = comm.Communicator(ranks_per_host=per_host), comm.Communicator(ranks_per_host=1)
    numel = 16 * world_size * 1000
    for each in (communicator, flat):
        each.all_reduce(torch.ones(numel), algorithm="direct")
    hosts = world_size // per_host
    assert communicator.stats()["wire_bytes"] == 4 * 2 * (numel // per_host) * (hosts - 1) / hosts
    across = (world_size - per_host) / (world_size - 1)  # the fraction of messages that leave the host
    assert communicator.stats()["wire_bytes"] == pytest.approx(flat.stats()["wire_bytes"] * across / per_host)


def check_bytes_of_hosts(rank, world_size, sizes):
    """Each host sends what a single rank on it would send: one tensor in each direction."""
    communicator, numel = on_hosts(sizes), 16 * 1000
    communicator.all_reduce(torch.ones(numel), algorithm="direct")
    return communicator.stats()["wire_bytes"] / (4 * numel)


@pytest.mark.parametrize("sizes", [(4, 4), (5, 3), (8, 1)])
def test_each_host_sends_the_bytes_of_one_rank(sizes):
    sent = run_ranks(sum(sizes), check_bytes_of_hosts, sizes)
    assert sum(sent[: sizes[0]]) == pytest.approx(1) and sum(sent[sizes[0] :]) == pytest.approx(1)


@pytest.mark.parametrize("per_host", [2, 3])
def test_bytes_between_hosts_are_divided_by_the_ranks_of_a_host(per_host):
    run_ranks(2 * per_host, check_bytes, per_host)


def check_ddp(rank, world_size):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), bucket_cap_mb=16 / 1024)
    state = ddp.register(model, codec="bf16", ranks_per_host=2)
    torch.manual_seed(rank)
    model(torch.randn(3, 64)).square().mean().backward()
    for parameter in model.parameters():
        assert same_everywhere(parameter.grad)
    assert state.stats()["inside_bytes"] > 0


def test_the_hook_works_in_two_levels():
    run_ranks(4, check_ddp)


SAID = {signal.SIGKILL: "it has left", signal.SIGSTOP: "it does not answer"}


def lose(rank, world_size, sizes, how, when):
    """Rank 2 dies between two calls, or while its own messages are being sent."""
    deadline = DEADLINE if how == signal.SIGSTOP else FAR
    communicator = on_hosts(sizes, timeout=deadline, answer_timeout=SILENCE)
    tensor = torch.ones(3_000_000)  # several segments
    communicator.all_reduce(tensor, "avg", codec="int8")
    finish_before(2, *range(world_size))
    if rank == 2:
        if when == "under way":
            communicator.all_reduce(tensor, async_op=True)
        os.kill(os.getpid(), how)
    start = time.monotonic()
    with pytest.raises(
        dist.DistBackendError, match=rf"on rank {rank} in a group of [23]: .*the culprit is rank 2: {SAID[how]}"
    ):
        for _ in range(3):
            communicator.all_reduce(tensor)
    took = time.monotonic() - start
    with pytest.raises(dist.DistBackendError):
        communicator.all_reduce(tensor)
    return took


@pytest.mark.parametrize("when", ["between", "under way"])
@pytest.mark.parametrize(
    ("sizes", "how"), [((2, 2), signal.SIGKILL), ((2, 2), signal.SIGSTOP), ((3, 1), signal.SIGKILL)]
)
def test_a_dead_rank_is_an_error_on_all_others(sizes, how, when):
    took = run_ranks(4, lose, sizes, how, when, dying=(2,))
    assert max(took[rank] for rank in (0, 1, 3)) < (DEADLINE.total_seconds() if how == signal.SIGSTOP else 0) + SLACK


def check_disagreement(rank, world_size):
    communicator = comm.Communicator(timeout=timedelta(seconds=20), ranks_per_host=2)
    with pytest.raises(dist.DistBackendError, match="this rank is in|closed"):
        communicator.all_reduce(torch.ones(1000 if rank else 999))


def test_ranks_that_disagree_raise():
    run_ranks(4, check_disagreement)


def check_arguments(rank, world_size):
    for wrong in (0, -1, 1.5, "2", True):
        with pytest.raises(ValueError, match=f"ranks_per_host: expected an int of at least 1, or None, got {wrong!r}"):
            comm.Communicator(ranks_per_host=wrong)
    with pytest.raises(ValueError, match="transport: expected one of auto, shm, gloo, nccl, c10d, got 'mpi'"):
        comm.Communicator(transport="mpi")
    with pytest.raises(ValueError, match="ranks_per_host: expected a divisor of the group's size, 3, got 2"):
        comm.Communicator(ranks_per_host=2)


def test_arguments():
    run_ranks(3, check_arguments)


SCRIPT = """
import json, os
from pathlib import Path
import torch
import torch.distributed as dist
from dltrain_ext import comm

dist.init_process_group("gloo")
rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
link = Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "statistics", "tx_bytes")
numel = 12 * 16 * 10_000
sent = {}
for name, communicator in (("two", comm.Communicator()), ("one", comm.Communicator(ranks_per_host=1))):
    tensor = torch.ones(numel)
    communicator.all_reduce(tensor, algorithm="direct")
    counts = []
    for _ in range(3):
        tensor.fill_(1)
        dist.barrier()
        before = int(link.read_text())
        dist.barrier()  # the others of this host send only when it has been read
        communicator.all_reduce(tensor, algorithm="direct")
        dist.barrier()
        counts.append(int(link.read_text()) - before)
        assert torch.equal(tensor, torch.full((numel,), float(dist.get_world_size())))
    sent[name] = min(counts)  # TCP may send some of it twice
    sent[f"{name} inside"] = communicator.stats()["inside_bytes"]
if rank == 0:
    print(json.dumps(sent))
dist.barrier()
"""


@pytest.mark.xdist_group("machine")
@pytest.mark.parametrize("per_host", [2, 3])
def test_hosts_are_detected_and_their_links_carry_fewer_bytes(per_host, capfd):
    commands.skip_without_hosts()
    assert commands.on_hosts("--hosts", 2, "--per-host", per_host, "--rate", "none", script=SCRIPT) == 0
    sent = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert sent["one inside"] == 0 < sent["two inside"]
    # In addition to the messages there are frame headers, the barriers' messages and TCP headers.
    assert sent["one"] / sent["two"] == pytest.approx(per_host, rel=0.1)
