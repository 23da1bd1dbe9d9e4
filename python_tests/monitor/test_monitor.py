"""Metrics of states, scalers, optimizers and communicators; over ranks; findings by name; and the file of lines."""

import gc
import json
import math
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import amp, comm, ddp, fsdp, monitor, optim


def new_module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 4))


def step(model, optimizer, rank, number, scaler=None, spoilt=None):
    x = torch.randn(16, 60, generator=torch.Generator().manual_seed(100 * number + rank))
    optimizer.zero_grad()
    loss = model(x).square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()


def check_communicator(rank, world_size):
    communicator = comm.Communicator()
    assert set(communicator.metrics()) == {"comm/calls", "comm/wire_bytes", "comm/inside_bytes", "comm/seconds"}
    tensor = torch.ones(100_000)
    for _ in range(3):
        communicator.all_reduce(tensor, algorithm="direct")
    found = communicator.metrics()
    stats = communicator.stats()
    assert {name: found[f"comm/{name}"] for name in stats} == stats
    assert stats["calls"] == 3
    assert found["comm/algbw"] == pytest.approx(3 * 400_000 / found["comm/seconds"] * 1e-9)
    assert found["comm/busbw"] / found["comm/algbw"] == pytest.approx(2 * (world_size - 1) / world_size)
    gathered = torch.empty(100_000 * world_size)
    comm_alone = comm.Communicator(ranks_per_host=1)
    comm_alone.all_gather(gathered, tensor)
    alone = comm_alone.metrics()
    assert alone["comm/busbw"] / alone["comm/algbw"] == pytest.approx((world_size - 1) / world_size)
    again = communicator.metrics()
    assert "comm/algbw" not in again and again["comm/calls"] == 3, "no call since the previous metrics"


def test_a_communicator_has_bandwidths():
    run_ranks(3, check_communicator)


def check_ddp(rank, world_size):
    model = DistributedDataParallel(new_module())
    optimizer, scaler = optim.AdamW(model.parameters(), lr=0.5), amp.LossScaler("cpu", init_scale=64.0)
    state = ddp.register(model, "int8", scaler=scaler, min_compress_numel=0)
    for number in range(3):
        step(model, optimizer, rank, number, scaler)
    found = state.metrics() | scaler.metrics() | optimizer.metrics()
    assert all(isinstance(value, float) and math.isfinite(value) for value in found.values())
    assert found["ddp/steps"] == found["optim/steps"] == 3
    assert 3 < found["ddp/ratio"] < 4 and 0 <= found["ddp/hidden"] <= 1 and found["ddp/exposed"] > 0
    lost = math.hypot(*(each.double().norm() for each in state.state_dict()["feedback"][f"rank {rank} of 2"].values()))
    assert found["ddp/residual_norm"] == pytest.approx(lost, rel=1e-5)
    norm = found["amp/norm"]
    assert found["ddp/codec_error"] == pytest.approx(lost / norm, rel=1e-3)
    assert (found["amp/scale"], found["amp/skipped_steps"], found["optim/lr"]) == (64.0, 0.0, 0.5)
    numel = sum(p.numel() for p in model.parameters())
    assert found["optim/state_bytes"] == pytest.approx(8 * numel, rel=0.01)
    assert found["comm/wire_bytes"] == state.stats()["wire_bytes"]
    before = state.metrics()
    assert "ddp/hidden" not in before and "comm/algbw" not in before, "no pass since the previous metrics"
    assert before.keys() - state.metrics(errors=False).keys() == {"ddp/residual_norm", "ddp/codec_error"}


def test_a_ddp_state_its_scaler_and_optimizer_have_metrics():
    run_ranks(2, check_ddp)


def check_sharded(rank, world_size):
    model = new_module()
    for layer in model[::2]:
        fully_shard(layer)
    fully_shard(model)
    state = fsdp.register(model, "int4", gather="int8", error_feedback=True, min_compress_numel=0)
    optimizer = optim.AdamW(model.parameters())
    for number in range(3):
        step(model, optimizer, rank, number)
    found = state.metrics() | optimizer.metrics()
    assert found["fsdp/steps"] == 3 and 5 < found["fsdp/ratio"] < 8
    assert found["comm/wire_bytes"] == state.stats()["wire_bytes"] + found["fsdp/gather_bytes"]
    (lost,) = state.state_dict()["feedback"].values()
    assert found["fsdp/residual_norm"] == pytest.approx(math.hypot(*(each.norm() for each in lost.values())), rel=1e-5)
    assert "fsdp/residual_norm" not in state.metrics(errors=False)
    numel = sum(p.to_local().numel() for p in model.parameters())
    assert found["optim/state_bytes"] == pytest.approx(8 * numel, rel=0.05), "this rank's shards"

    model = DistributedDataParallel(new_module())
    optimizer = optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1, momentum=0.9)
    state = ddp.register(model, "int8", shard=optimizer)
    step(model, optimizer, rank, 0)
    found = state.metrics() | optimizer.metrics()
    assert found["optim/lr/0"] == found["optim/lr/5"] == 0.1 and found["ddp/residual_norm"] > 0
    assert found["comm/wire_bytes"] == state.stats()["wire_bytes"] > state.stats()["gather_bytes"] > 0


def test_sharded_states_have_metrics():
    run_ranks(2, check_sharded)


def test_without_peers_nothing_was_sent():
    model = new_module()
    state = ddp.register(model)
    step(model, optim.SGD(model.parameters(), lr=0.1), 0, 0)
    assert state.metrics() == {"ddp/steps": 0.0} and state.findings() == []


def check_over_ranks(rank, world_size):
    found = monitor.over_ranks({"loss": float(rank), "odd": math.nan if rank == 1 else 1.0, f"only {rank}": 5.0})
    assert (found["loss/min"], found["loss/mean"], found["loss/max"]) == (0.0, (world_size - 1) / 2, world_size - 1.0)
    assert all(math.isnan(found[f"odd/{kind}"]) for kind in ("min", "mean", "max"))
    assert found["only 1/mean"] == found["only 0/max"] == 5.0 and "late/rank" not in found
    assert monitor.over_ranks({"a": math.inf * (-1) ** rank})["a/mean"] != 0
    half = dist.new_group([0, 1])
    if rank < 2:
        assert monitor.over_ranks({"rank": rank}, half)["rank/max"] == 1
    for wrong, text in (([1], "metrics: expected a mapping"), ({1: 1.0}, "expected names"), ({"a": "b"}, "a number")):
        with pytest.raises(TypeError, match=text):
            monitor.over_ranks(wrong)


def test_metrics_over_ranks():
    run_ranks(3, check_over_ranks)


def check_late(rank, world_size):
    """A rank whose backward pass takes longer waits least."""
    model = DistributedDataParallel(new_module())
    state = ddp.register(model, "int8")
    if rank == 2:
        model.module[0].weight.register_hook(lambda _: time.sleep(0.2))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        step(model, optimizer, rank, number)
    found = monitor.over_ranks(state.metrics())
    assert found["late/rank"] == 2
    assert found["late/seconds"] > 0.1


def test_the_late_rank_is_named():
    run_ranks(3, check_late)


def check_kept(rank, world_size):
    """What is watched does not keep the residuals of the buckets that DDP has replaced after the first pass."""
    model = DistributedDataParallel(new_module(), bucket_cap_mb=0.01)
    state = ddp.register(model, "int8", watch=True, min_compress_numel=0)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, rank, 0)
    first = [weakref.ref(bucket.layout) for bucket in state._buckets.reduced]
    for number in range(1, 4):
        step(model, optimizer, rank, number)
    gc.collect()
    kept = {bucket.layout for bucket in state._buckets.reduced}
    assert len(kept) > len(first) and all(layout() is None or layout() in kept for layout in first)


def test_watching_keeps_no_residuals():
    run_ranks(2, check_kept)


def check_overflow(rank, world_size, how):
    scaler = None
    if how == "fsdp":
        model = new_module()
        spoilt = model
        if rank == 1:
            model[2].register_full_backward_hook(
                lambda module, grads, _: tuple(g * (math.inf if model.step == 2 else 1) for g in grads)
            )
        for layer in model[::2]:
            fully_shard(layer)
        fully_shard(model)
        state = fsdp.register(model, "int8", watch=True)
    else:
        module = new_module()
        if rank == 1:
            module[2].register_full_backward_hook(
                lambda _, grads, __: tuple(g * (math.inf if module.step == 2 else 1) for g in grads)
            )
        spoilt = module
        model = DistributedDataParallel(module)
        scaler = amp.LossScaler("cpu", init_scale=64.0)
        state = ddp.register(model, "int8", scaler=scaler, watch=True)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for number in range(5):
        spoilt.step = number
        step(model, optimizer, rank, number, scaler)
        if how == "fsdp" and number == 2:
            break
    (found,) = state.findings()
    # The gradient with respect to the input of the layer "2" is spoilt, so the parameters of "0" are the first.
    assert (found.kind, found.step, found.rank) == ("overflow", 3, 1) and found.parameter in ("0.weight", "0.bias")
    assert not math.isfinite(found.value)
    assert state.findings() == [], "it has been told"
    if how == "ddp":
        assert scaler.skipped_steps == 1
        step(model, optimizer, rank, 6, scaler)
        assert state.findings() == []


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_the_first_overflow_is_named(how):
    run_ranks(2, check_overflow, how, fresh=how == "fsdp")


class Weighted(nn.Module):
    """The gradient of its weight is what it is called with."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(60, 60))

    def forward(self, x):
        return (self.weight * x).sum()


def check_growing(rank, world_size, how):
    """Gradients with one large element in each block: what sign sends of them is far off, so residuals grow."""
    model, x = Weighted(), torch.zeros(60, 60)
    x.view(-1)[::256] = 1.0
    if how == "fsdp":
        fully_shard(model)
        state = fsdp.register(model, "sign", error_feedback=True, watch=True)
    else:
        model = DistributedDataParallel(model)
        # By this plan rank 1 encodes the half that has more of these elements.
        state = ddp.register(model, "sign", algorithm="ring", watch=True)
    for _ in range(40):
        model.zero_grad()
        model(x if rank == 1 else torch.randn(60, 60)).backward()
    found = [finding for finding in state.findings() if finding.rank == 1]
    assert [(finding.kind, finding.parameter) for finding in found] == [("feedback", "weight")], found
    assert 3 < found[0].step < 40 and 10 < found[0].value < 20


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_feedback_that_grows_is_named(how):
    run_ranks(2, check_growing, how, fresh=how == "fsdp")


def check_refusals(rank, world_size):
    model = DistributedDataParallel(new_module())
    with pytest.raises(TypeError, match="watch: expected a bool, got 1"):
        ddp.register(model, watch=1)
    state = ddp.register(model)
    with pytest.raises(RuntimeError, match="findings: expected a state with watch=True"):
        state.findings()
    sharded = new_module()
    fully_shard(sharded)
    with pytest.raises(TypeError, match="watch: expected a bool, got 'yes'"):
        fsdp.register(sharded, watch="yes")
    with pytest.raises(RuntimeError, match="findings: expected a state with watch=True"):
        fsdp.register(sharded).findings()
    quiet = ddp.AllReduceState(watch=True)  # without names
    assert quiet.findings() == []


def test_errors_name_the_wrong_argument():
    run_ranks(1, check_refusals, fresh=True)


def test_lines_are_whole_and_can_be_read_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with monitor.JSONLines(path) as lines:
        lines.write({"loss": 1.5, "norm": math.inf, "tensor": torch.tensor(2.0)}, 3)
        (first,) = map(json.loads, path.read_text().splitlines())
        assert first.pop("time") == pytest.approx(time.time(), abs=60)
        assert first == {"step": 3, "loss": 1.5, "norm": None, "tensor": 2.0}
        for wrong, step_number, error, text in (
            ({"step": 1.0}, 0, ValueError, "metrics: expected names other than step and time, got 'step'"),
            ({3: 1.0}, 0, ValueError, "got 3"),
            ({"a": "text"}, 0, TypeError, "metrics: 'a': expected a number, got 'text'"),
            ([1.0], 0, TypeError, "metrics: expected a mapping"),
            ({}, -1, ValueError, "step: expected 0 to"),
            ({}, "1", TypeError, "step: expected an int"),
        ):
            with pytest.raises(error, match=text):
                lines.write(wrong, step_number)
        assert len(path.read_text().splitlines()) == 1, "nothing was written"
    with monitor.JSONLines(path) as lines:
        lines.write({}, 4)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [3, 4]
    with pytest.raises(ValueError, match="closed"):
        lines.write({}, 5)
