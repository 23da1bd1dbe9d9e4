"""The selection that "auto" makes in the hook: it is made once, reported once, and saved in checkpoints."""

import logging

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import comm, ddp, sim
from dltrain_ext.comm import Choice, Tuning, connections
from dltrain_ext.ddp import selection


def make():
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 5)))


def train(model, rank, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in steps:
        x = torch.randn(4, 60, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def tuning_for(world_size, codec, algorithm):
    """Make a tuning in which the given codec and plan are the fastest."""
    seconds = {"raw": 1.0, "native": 1.0, codec: 0.1}
    table = {
        name: [Choice(1 << 20, "native" if name == "native" else algorithm, 1, seconds[name], True)] for name in seconds
    }
    return Tuning(world_size, sim.Network(), table)


def measured(rank, world_size):
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("dltrain_ext").addHandler(handler)
    model = make()
    state = ddp.register(model, codec="auto", min_compress_numel=0)
    before = train(model, rank, range(3))
    assert state.stats()["codec"] == state.codec == state.choice.codec
    choices = [None] * world_size
    dist.all_gather_object(choices, state.state_dict()["choice"])
    assert state.communicator.stats()["calls"] == state.stats()["buckets"]  # without the calls of measuring
    assert all(torch.isfinite(parameter).all() for parameter in before)
    return choices, told


def test_all_ranks_select_the_same_and_one_reports_it():
    (choices, told), *others = run_ranks(3, measured, fresh=True)
    assert all(choice == choices[0] for choice in choices) and choices[0]["codec"] in ("raw", "fp16", "int8", "int4")
    assert choices[0]["algorithm"] in (*comm.ALGORITHMS, "native")
    assert len(told) == 1 and told[0].startswith(f"codec 'auto': gradients travel as {choices[0]['codec']} by ")
    assert all(silent == [] for _, silent in others)


def go_on(rank, world_size):
    """Load the state of a checkpoint, although measuring would now select something else."""
    int8, int4 = (tuning_for(world_size, *what) for what in (("int8", "tree"), ("int4", "ring")))
    whole, first, second = make(), make(), make()
    ddp.register(whole, codec="auto", tuning=int8, min_compress_numel=0)
    state = ddp.register(first, codec="auto", tuning=int8, min_compress_numel=0)
    expected = train(whole, rank, range(8))
    train(first, rank, range(4))
    resumed = ddp.register(second, codec="auto", tuning=int4, min_compress_numel=0)
    assert str(resumed.choice) == "int4 by ring in 1 segments"
    second.module.load_state_dict(first.module.state_dict())
    resumed.load_state_dict(state.state_dict())
    assert resumed.choice == state.choice and str(resumed.choice) == "int8 by tree in 1 segments"
    for found, wanted in zip(train(second, rank, range(4, 8)), expected, strict=True):
        assert torch.equal(found, wanted)


def test_a_run_that_continues_keeps_the_selection_and_so_the_bits():
    run_ranks(3, go_on)


def saved_as(state, **choice):
    return state.state_dict() | {"choice": choice}


def load(rank, world_size):
    usual = {"codec": "int4", "algorithm": "tree", "segments": 2}
    for asked, taken in (
        ({"codec": "auto"}, True),
        ({"codec": "int4"}, True),
        ({"codec": "auto", "algorithm": "tree"}, True),
        ({"codec": "int8"}, False),
        ({"codec": "int4", "algorithm": "ring"}, False),
    ):
        tuning = tuning_for(world_size, "fp16", "direct")
        state = ddp.register(make(), tuning=tuning, **asked)
        before = state.choice
        state.load_state_dict(saved_as(state, **usual))
        assert (state.choice.to_dict() == usual) == taken, asked
        assert taken or state.choice == before
    state = ddp.register(make(), codec="int4")
    before = state.choice
    old = state.state_dict()
    del old["choice"]  # as in an earlier version
    state.load_state_dict(old)
    other_size = saved_as(state, **usual) | {"world_size": 1}
    other_size["feedback"] = {"rank 0 of 1": next(iter(other_size["feedback"].values()))}
    state.load_state_dict(other_size)
    assert state.choice == before
    for wrong in (
        {"codec": "int3", "algorithm": "ring", "segments": None},
        {"codec": "int4", "algorithm": "recursive_doubling", "segments": None},
        {"codec": "int4", "algorithm": "ring", "segments": -1},
        {"codec": "int4", "algorithm": 5, "segments": None},
        {"codec": "int4"},
    ):
        with pytest.raises(ValueError, match="state_dict: expected choice of codec, algorithm and segments, got {"):
            state.load_state_dict(saved_as(state, **wrong) | {"steps": 7})
    with pytest.raises(ValueError, match="got 'int4 by ring'"):
        state.load_state_dict(state.state_dict() | {"choice": "int4 by ring"})
    one, other = saved_as(state, **usual), saved_as(state, **usual | {"segments": 3})
    with pytest.raises(ValueError, match="states of one choice, got int4 by tree in 2 segments, int4 by tree in 3 seg"):
        state.load_state_dict([one, other])
    assert state.choice == before and state.steps == 0


def test_a_loaded_selection_is_used_only_if_it_was_asked_for():
    run_ranks(2, load)


def where_ranks_are(rank, world_size):
    for hosts, on_cpu, on_cuda in (("abc", "ring", "direct"), ("aaa", "direct", "direct"), ("aab", "ring", "direct")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connections, "host_id", lambda hosts=hosts: hosts[rank])
            communicator = comm.Communicator()
        assert communicator.usual_plan == on_cpu, hosts
        communicator._device = torch.device("cuda", 0)
        assert communicator.usual_plan == on_cuda, hosts
        communicator.close()


def test_the_usual_plan_depends_on_the_hosts_of_the_ranks():
    run_ranks(3, where_ranks_are)


def sent_across(algorithm, hosts):
    """Return the tensors that the busiest host sends to other hosts."""
    sent = dict.fromkeys(hosts, 0.0)
    for rank, host in enumerate(hosts):
        plan = comm.plan(algorithm, rank, len(hosts))
        steps = [step for steps in plan.rounds for step in steps if step.op.startswith("send")]
        for step in steps:
            if hosts[step.peer] != host:
                sent[host] += (step.chunks[1] - step.chunks[0]) / plan.chunks
    return max(sent.values())


@pytest.mark.parametrize(
    ("hosts", "ring", "direct"),
    [("aaaaabbb", 1.75, 3.75), ("aaaaaaaab", 16 / 9, 16 / 9), ("abcdefgh", 1.75, 1.75), ("aaaabbbb", 1.75, 4.0)],
)
def test_direct_is_used_if_links_are_not_shared(hosts, ring, direct):
    """If links are shared, two levels send what one rank per host would send: here one tensor."""
    assert sent_across("ring", hosts) == pytest.approx(ring)
    assert sent_across("direct", hosts) == pytest.approx(direct)
    levels = connections.layout(list(hosts), 0, None)
    assert (levels is None) == (hosts == "abcdefgh")
    if levels is not None:
        assert sent_across("direct", "ab"[: len(levels.counterparts)]) == 1.0  # of a shard, by each rank that has one


def connected(rank, world_size):
    """Connect on a device by an all-reduce like those of the buckets, which is not counted."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm.Communicator, "all_reduce", lambda self, tensor, **options: calls.append((tensor, options)))
        communicator = comm.Communicator()
        parameters, asked = [torch.zeros(300), torch.zeros(5)], selection.Reduction("int8", "direct")
        assert selection.choose(communicator, dist.group.WORLD, asked, parameters) == asked and not calls
        communicator._device = torch.device("meta")
        assert selection.choose(communicator, dist.group.WORLD, asked, parameters) == asked
    ((tensor, options),) = calls
    assert tensor.numel() == 305 and tensor.dtype == torch.float32 and tensor.is_meta
    assert options == {"codec": "int8", "algorithm": "direct", "segments": None}
    assert communicator.stats()["calls"] == 0


def test_ranks_connect_before_the_first_backward_pass():
    run_ranks(2, connected)


def nobody_says(rank, world_size):
    state = ddp.register(make())
    assert state.codec == "int8" and selection.usual_codec(None, []) == "int8"
    on_a_gpu = [type("Parameter", (), {"device": torch.device("cuda", 0)})]
    assert selection.usual_codec(None, on_a_gpu) == "auto"


def test_the_default_codec_depends_on_the_device():
    run_ranks(2, nobody_says)


def deterministic(rank, world_size):
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(dist.DistBackendError, match="call 2"):
            communicator = comm.Communicator()
            communicator.all_reduce(torch.ones(4))  # one call, which is none of the measuring ones
            communicator.all_reduce(torch.ones(4 + rank))
    finally:
        torch.use_deterministic_algorithms(False)
    communicator = comm.Communicator()
    work = communicator.all_reduce(torch.ones(4), async_op=True)  # measured by the worker, so this does not wait
    work.wait()
    assert communicator.stats()["calls"] == 1


def test_nothing_is_measured_in_deterministic_mode():
    run_ranks(2, deterministic, fresh=True)
