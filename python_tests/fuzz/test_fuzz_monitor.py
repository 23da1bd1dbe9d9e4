"""Metrics over ranks, lines of JSON, and findings, with arguments of any kind."""

import json

import pytest
import torch
from fuzzing import anything, attempt, fuzz, plain, spoiled
from hypothesis import given
from hypothesis import strategies as st
from optimizers import FUSED
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dltrain_ext import amp, comm, ddp, fsdp, monitor, optim

sizes = st.integers(0, 100)
numbers = st.dictionaries(st.text(max_size=5), st.floats() | st.integers(-5, 5) | st.booleans(), max_size=4)


@fuzz("monitor.over_ranks")
@given(st.data())
def test_over_ranks(group, data):
    given = {"metrics": st.one_of(numbers, plain), "group": st.none()}
    found, _ = attempt(monitor.over_ranks, data.draw(spoiled(given)), names=["metrics", "group"])
    if found is not None:
        assert all(isinstance(value, float) for value in found.values())


@fuzz("monitor.JSONLines", *(f"monitor.JSONLines.{name}" for name in ("write", "close")))
@given(st.data())
def test_lines(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("lines") / "metrics.jsonl"
    with monitor.JSONLines(path) as lines:
        arguments = data.draw(spoiled({"metrics": st.one_of(numbers, plain), "step": sizes}))
        _, error = attempt(lines.write, arguments, names=["metrics", "step"])
        written = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(written) == (error is None)
    lines.close()


@fuzz(
    *("comm.Communicator.metrics", "comm.Communicator.world_size", "ddp.AllReduceState.metrics"),
    *("ddp.AllReduceState.findings", "ddp.ShardedOptimizerState.metrics", "ddp.ShardedOptimizerState.findings"),
    *("fsdp.ShardedState.metrics", "fsdp.ShardedState.findings", "amp.LossScaler.metrics"),
    *(f"optim.{kind}.metrics" for kind in FUSED),
    examples=20,
)
@given(st.data())
def test_metrics_at_any_time(group, data):
    """They have no arguments; a number that is not known is left out."""
    model = torch.nn.Linear(3, 2)
    kind = data.draw(st.sampled_from(sorted(FUSED)))
    optimizer = getattr(optim, kind)(model.parameters(), lr=data.draw(st.floats(0.01, 1)))
    scaler = amp.LossScaler("cpu", enabled=data.draw(st.booleans()))
    shards = data.draw(st.booleans())
    watch = data.draw(st.one_of(st.booleans(), anything()))
    wrapped = DistributedDataParallel(model)
    arguments = {"model": wrapped, "watch": watch, "scaler": scaler} | ({"shard": optimizer} if shards else {})
    state, _ = attempt(ddp.register, arguments, names=["watch"])
    steps = data.draw(st.integers(0, 2))
    for _ in range(steps if state else 0):
        scaler.scale(wrapped(torch.ones(1, 3)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    told = scaler.metrics() | optimizer.metrics() | (state.metrics() if state else {})
    assert all(isinstance(value, float) for value in told.values())
    if state is not None:
        assert state.communicator.world_size == 1
        if watch:
            assert state.findings() == []
        else:
            with pytest.raises(RuntimeError, match="findings: expected a state with watch=True"):
                state.findings()
        state.communicator.close()


def test_metrics_of_shards(group):
    model = torch.nn.Linear(3, 2)
    fully_shard(model)
    state = fsdp.register(model, "int8", watch=True)
    assert state.metrics()["fsdp/steps"] == 0 and state.findings() == []
    assert set(comm.Communicator().metrics()) == {
        f"comm/{n}" for n in ("calls", "wire_bytes", "inside_bytes", "seconds")
    }
