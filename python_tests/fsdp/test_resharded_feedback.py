"""The feedback of fully_shard in a run of another number of ranks: its sum over the ranks is preserved."""

from functools import partial

import pytest
import ranks
import torch
from models import make, train
from torch.distributed.device_mesh import init_device_mesh

from dltrain_ext import amp, fsdp, optim
from dltrain_ext.fsdp import checkpoint

run_ranks = partial(ranks.run_ranks, fresh=True)


def begin(world_size, replicas, codec="int4"):
    """Return a model and its state; without replicas its reduce-scatter is compressed."""
    if not replicas:
        model = make()
        return model, fsdp.register(model, codec, error_feedback=True, min_compress_numel=0)
    mesh = init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard"))
    model = make(mesh["shard"])
    return model, fsdp.register(model, codec, replicas=mesh["replicate"], min_compress_numel=0)


def save(rank, world_size, folder, replicas):
    model, state = begin(world_size, replicas)
    train(model, optim.SGD(model.parameters(), lr=0.1), amp.LossScaler("cpu", enabled=False), rank, 3)
    torch.save(state.state_dict(), f"{folder}/{rank}.pt")


def load(rank, world_size, folder, saved_by, replicas):
    model, state = begin(world_size, replicas)
    states = [torch.load(f"{folder}/{each}.pt") for each in range(saved_by)]
    state.load_state_dict(states)
    assert torch.equal(
        torch.tensor(list(state.state_dict()["reductions"].values())),
        torch.tensor(list(states[0]["reductions"].values())),
    )
    if saved_by > 2:  # every rank needs the residuals of others, or their shards
        with pytest.raises(ValueError, match="missing|expected all"):
            state.load_state_dict(states[-1])
    torch.save(state.state_dict(), f"{folder}/loaded {rank}.pt")
    train(model, optim.SGD(model.parameters(), lr=0.1), amp.LossScaler("cpu", enabled=False), rank, 1)


def total(files):
    """Return the sums of the residuals over all contributions, by parameter, and how many contributions there are."""
    sums, places = {}, set()
    for file in files:
        state = torch.load(file)
        shard, _ = state["shard"]
        for key, residuals in state["feedback"].items():
            places.add((key, shard))
            for name, lost in residuals.items():
                sums.setdefault(name, {}).setdefault(shard, torch.zeros_like(lost)).add_(lost)
    whole = {name: torch.cat([by_shard[shard] for shard in sorted(by_shard)]) for name, by_shard in sums.items()}
    return whole, len(places)


@pytest.mark.parametrize(
    ("first", "then"),
    [((4, 0), (2, 0)), ((2, 0), (3, 0)), ((4, 2), (2, 2)), ((2, 2), (4, 2)), ((4, 2), (3, 3)), ((3, 3), (4, 2))],
    ids=str,
)
def test_the_sum_of_the_feedback_is_preserved(first, then, tmp_path):
    (saved_by, replicas), (loaded_by, its_replicas) = first, then
    run_ranks(saved_by, save, str(tmp_path), replicas)
    run_ranks(loaded_by, load, str(tmp_path), saved_by, its_replicas)
    before, contributions = total(tmp_path / f"{rank}.pt" for rank in range(saved_by))
    after, its_contributions = total(tmp_path / f"loaded {rank}.pt" for rank in range(loaded_by))
    assert (contributions, its_contributions) == (saved_by, loaded_by)
    assert before.keys() == after.keys() and len(before) == 6
    for name, lost in before.items():
        assert torch.allclose(lost, after[name], atol=1e-7), name
    assert any(lost.abs().max() > 1e-4 for lost in before.values())


def test_a_number_of_shards_takes_no_memory():
    state = {"feedback": {"rank 0 of 1": {"weight": torch.ones(2)}}, "shard": [0, 2**62]}
    with pytest.raises(ValueError, match=rf"expected all {2**62} shards of rank 0 of 1, got \[0\]"):
        checkpoint.joined([state], {"weight": 0})


def check_parallel(rank, world_size):
    """The shards of tensor parallelism cannot be divided anew."""
    _, state = begin(world_size, 0)
    saved = state.state_dict()
    for parameters in state._groups.values():
        parameters[:] = [type(p)(**{**vars(p), "is_parallel": True}) for p in parameters]
    state.load_state_dict(saved)
    with pytest.raises(ValueError, match="expected what 2 ranks have saved, since the model has tensor parallelism"):
        state.load_state_dict(saved | {"world_size": 4})


def test_tensor_parallelism_needs_as_many_ranks():
    run_ranks(2, check_parallel)
