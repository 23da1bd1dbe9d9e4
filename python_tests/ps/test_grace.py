"""The grace of a quorum, weighted means, pulls that wait until pushes are applied, and the replay of all three.

No test depends on how long anything takes: a grace is either so long that it does not end, or it ends while all workers
wait for it.
"""

import dataclasses
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import FAR, run_ranks

from dltrain_ext import optim, ps

SHAPES = {"weight": (300, 41), "bias": (41,), "number": ()}
ENDLESS, SHORT, BRIEF = timedelta(hours=1), timedelta(milliseconds=200), timedelta(milliseconds=2)
WEIGHTS = [0.5, 1.0, 2.5]  # 4 in all


def filled(value):
    return {name: torch.full(shape, float(value)) for name, shape in SHAPES.items()}


def is_filled(values, value):
    return all(
        torch.equal(own, expected) for own, expected in zip(values.values(), filled(value).values(), strict=True)
    )


def make(**options):
    store = ps.Store(timeout=FAR, **{"quorum": 2, "staleness": None, **options})
    values = filled(2)
    store.init(values)
    return store, values


@pytest.mark.parametrize("grace", [0.5, 1, "1 s", float("nan")])
def test_a_grace_is_a_timedelta(grace):
    with pytest.raises(TypeError, match="grace: expected a timedelta or None, got "):
        ps.Store(quorum=1, grace=grace)


@pytest.mark.parametrize("grace", [timedelta(), -BRIEF, timedelta(days=366), timedelta.max])
def test_a_grace_is_positive_and_at_most_a_year(grace):
    with pytest.raises(ValueError, match="grace: expected more than 0 and at most 365 days, got datetime.timedelta"):
        ps.Store(quorum=1, grace=grace)


def test_what_has_no_grace():
    with pytest.raises(ValueError, match="grace: expected None with quorum 'all', got "):
        ps.Store(grace=BRIEF)
    with pytest.raises(ValueError, match=r"grace: expected None with delay_compensation 0.1, got "):
        ps.Store(quorum=1, delay_compensation=0.1, grace=BRIEF)
    with pytest.raises(ValueError, match="grace: expected None with quorum 'all', got "):
        ps.Record.written([("pull", 0)], filled(0), optim.SGD, quorum="all", grace=BRIEF, lr=1.0)
    assert ps.Store(quorum=1).grace is None
    assert ps.Store(quorum=1, grace=BRIEF).grace == BRIEF


def wrong_weights(rank, world_size):
    store, values = make(quorum=1, grace=ENDLESS)
    for weight in (0, -1.0, float("inf"), float("nan"), 1e39, 1e-39):
        with pytest.raises(ValueError, match=r"weight: expected a finite number > 0 in the range of float32, got "):
            store.push(values, weight=weight)
    for weight in ("1", [1.0]):
        with pytest.raises(TypeError, match="weight: expected a number, got "):
            store.push(values, weight=weight)
    store.push(filled(3), 0, weight=7)  # nothing else was pushed
    store.pull(values, applied=True).wait()
    assert is_filled(values, 5)
    store.close()


def test_a_weight_is_finite_and_positive():
    run_ranks(1, wrong_weights)


def differing(rank, world_size):
    with pytest.raises(
        ValueError, match="grace: expected the same on all ranks, got 0.002 on rank 0 and 0.2 on rank 1"
    ):
        ps.Store(timeout=FAR, quorum=1, grace=[BRIEF, SHORT][rank]).init(filled(0))


def test_a_grace_is_the_same_on_all_ranks():
    run_ranks(2, differing)


def late_and_in_time(rank, world_size, codec):
    """The grace does not end, so the last one is in time, however late it is."""
    store, values = make(grace=ENDLESS, codec=codec)
    if rank == 2:
        time.sleep(0.3)
    weight = WEIGHTS[rank]
    push = store.push(filled(8 * (rank + 1)), weight=weight)
    assert push.wait() and store.pull(values).wait()
    pull = store.pull(values, applied=True)
    pull.wait()
    assert pull.versions == (1, 1, False)
    assert is_filled(values, 2 + sum(w * 8 * (r + 1) for r, w in enumerate(WEIGHTS)) / 4)
    store.close()


@pytest.mark.parametrize("codec", ["raw", "fp16"])
def test_a_version_is_the_weighted_mean_of_all_that_come_in_time(codec):
    run_ranks(3, late_and_in_time, codec)


def late_and_too_late(rank, world_size, servers):
    """Rank 2 pushes when the grace has ended: its push is in the next version, as soon as another one is."""
    store, values = make(grace=SHORT, servers=servers)
    if rank < 2:
        store.push(filled(6 * (rank + 1)), weight=[2.0, 6.0][rank])
        pull = store.pull(values, applied=True)
        pull.wait()
        assert pull.versions == (1, 1, False)
        assert is_filled(values, 2 + (2 * 6 + 6 * 12) / 8)
    dist.barrier()
    if rank == 2:
        store.push(filled(1)).wait()
        late = store.pull(values, applied=True)
    dist.barrier()
    if rank == 1:
        store.push(filled(5)).wait()
    if rank == 2:
        late.wait()
        assert late.versions == (2, 2, False) and is_filled(values, 2 + 10.5 + 3)
    dist.barrier()
    store.close()


@pytest.mark.parametrize("servers", [[0], [0, 1, 2]])
def test_who_comes_after_the_grace_is_in_the_next_version(servers):
    run_ranks(3, late_and_too_late, servers)


def applied_or_not(rank, world_size):
    """Without a grace, and without a time limit."""
    store, values = make()
    mine = filled(0)
    if rank == 0:
        store.push(filled(4))
        store.pull(values).wait()  # the servers have it
        assert is_filled(values, 2)
        pull = store.pull(mine, applied=True)
        with pytest.raises(dist.DistBackendError, match=r"not complete after 0.1 s: .* waits for pushes of rank 1, 2"):
            pull.wait(timedelta(seconds=0.1))
        assert not pull.is_completed()
        store.push(filled(6)).wait()  # other work
        dist.barrier()
        pull.wait()
        assert pull.versions == (1, 1, False) and is_filled(mine, 2 + (4 + 8) / 2)
        again = store.pull(values, applied=True)
        assert not again.is_completed()
        dist.barrier()
        again.wait()  # the others have left, so that one push is a quorum
        assert is_filled(values, 8 + 3)
    else:
        dist.barrier()
        if rank == 1:
            store.push(filled(8)).wait()
        dist.barrier()
    store.close()


def test_a_pull_may_wait_until_the_own_pushes_are_applied():
    run_ranks(3, applied_or_not)


def modes_in_which_pushes_are_applied_anyway(rank, world_size, quorum):
    store, values = make(quorum=quorum)
    for clock in range(1, 4):
        store.push(filled(rank))
        pull = store.pull(values, applied=True)
        pull.wait()
        assert pull.versions.lowest >= clock
    dist.barrier()
    store.close()


@pytest.mark.parametrize("quorum", ["all", 1])
def test_applied_makes_no_difference_where_pushes_are_applied_anyway(quorum):
    run_ranks(2, modes_in_which_pushes_are_applied_anyway, quorum)


PUSHES = 10


def gradients(worker, clock, values):
    """Return a function of what the worker holds; worker 2 pulls while it works, and does not use it."""
    held = filled(1) if worker == 2 else values
    return {name: torch.sin(3 * value + worker + 0.1 * clock) for name, value in held.items()}


def weight_of(worker, clock):
    return 1.0 + 0.3 * worker + 0.7 * (clock % 3)


def rate(worker, clock):
    return [0.1 / (1 + 0.1 * clock)]


def recorded(rank, world_size, codec):
    """Return the record, and what the servers hold when all workers have left."""
    store, values = make(optimizer=optim.AdamW, lr=0.1, grace=BRIEF, servers=[0, 1], record=True, codec=codec)
    for clock in range(PUSHES):
        given = gradients(rank, clock, values)
        store.push(given, rates=rate(rank, clock), weight=weight_of(rank, clock))
        if rank == 2:
            store.pull(filled(0), applied=True)  # and goes on
        else:
            # For the first one all wait for a grace, because rank 2 does not push before.
            store.pull(values, applied=clock == 0).wait()
        if clock == 0 and rank < 2:
            dist.barrier(dist.new_group([0, 1], use_local_synchronization=True))
    store.close()
    shard = store._shard
    held = (
        [] if shard is None else [(block, own.clone()) for block, own in zip(shard.blocks, shard.values, strict=True)]
    )
    return store.record().gather(), held


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_a_record_replays_to_the_same_bits(codec, tmp_path):
    (record, first), (_, second), _ = run_ranks(3, recorded, codec)
    record.save(tmp_path / "record.json")
    again = ps.Record.load(tmp_path / "record.json")
    assert again == record
    kinds = {what for order in record.handled.values() for what, *_ in order}
    assert {0, 1, 2, 4} <= kinds <= {0, 1, 2, 3, 4}
    result = ps.replay(again, filled(2), gradients, rates=rate, weights=weight_of)
    names = [key.name for key in record.settings.keys]
    for block, own in [*first, *second]:
        assert torch.equal(result[names[block.key]].view(-1)[block.first : block.first + block.numel], own)
    other = ps.replay(again, filled(2), gradients, rates=rate)  # with equal weights
    assert not torch.equal(other["weight"], result["weight"])


def test_an_order_by_hand_says_when_a_grace_is_over():
    values = {"large": torch.zeros(700, 1001), "small": torch.zeros(37)}
    starts = [("pull", worker) for worker in range(3)]
    pushes = [("push", 0), ("push", 2), ("pull", 0), ("push", 0), ("pull", 0), ("grace", 1), ("grace", 1), ("push", 1)]
    order = [*starts, *pushes, ("pull", 1), ("pull", 2), ("grace", 2)]
    record = ps.Record.written(order, values, optim.SGD, quorum=2, grace=BRIEF, lr=1.0)
    sent = {(0, 0): 1.0, (2, 0): 4.0, (0, 1): 16.0, (1, 0): 64.0}
    weights = {(0, 0): 3.0, (2, 0): 1.0, (0, 1): 2.0, (1, 0): 6.0}

    def constant(worker, clock, held):
        return {name: torch.full_like(value, sent[worker, clock]) for name, value in held.items()}

    result = ps.replay(record, values, constant, weights=lambda worker, clock: weights[worker, clock])
    expected = -(3 * 1 + 4) / 4 - (2 * 16 + 6 * 64) / 8
    assert all(torch.equal(value, torch.full_like(value, expected)) for value in result.values())

    rest = [each for each in record.handled[3] if each[:3] != (3, -1, 2)]  # then the second one ends with the workers
    unended = dataclasses.replace(record, handled={3: rest})
    again = ps.replay(unended, values, constant, weights=lambda worker, clock: weights[worker, clock])
    assert all(torch.equal(again[name], result[name]) for name in values)


def test_a_worker_goes_on_where_the_record_has_its_push_before_the_answer():
    """Worker 0 pulls what is applied, and pushes twice before its first push is applied."""
    values = {"w": torch.zeros(3)}
    order = [("pull", 0), ("pull", 1), ("push", 0), ("pull", 0), ("push", 0), ("pull", 0), ("push", 0), ("pull", 0)]
    order += [("push", 1), ("pull", 1), ("push", 1), ("pull", 1)]
    record = ps.Record.written(order, values, optim.SGD, quorum=2, lr=1.0)
    is_applied = [(1, 0, clock, 0) for clock in (1, 2)]
    handled = [(4, *each[1:]) if each in is_applied else each for each in record.handled[2]]
    held = []

    def seen(worker, clock, values):
        held.append((worker, clock, float(values["w"][0])))
        return {"w": torch.ones(3)}

    result = ps.replay(dataclasses.replace(record, handled={2: handled}), values, seen)
    assert torch.equal(result["w"], torch.full((3,), -2.5))  # two means of two, and what is left alone is halved, too
    assert [value for worker, _, value in held if worker == 0] == [0.0, 0.0, 0.0]
    assert [value for worker, _, value in held if worker == 1] == [0.0, -1.0]
