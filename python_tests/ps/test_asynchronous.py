"""Asynchronous and delay-compensated training, and its repetition from a record."""

import dataclasses
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import FAR, run_ranks

from dltrain_ext import optim, ps

SHAPES = {"weight": (300, 41), "bias": (41,), "number": ()}
PUSHES = 12
LAMBDA = 0.3


def initial():
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradients(worker, clock, values):
    """Return a deterministic function of what the worker holds."""
    return {name: torch.sin(3 * value + worker + 0.1 * clock) * (1 + 0.01 * clock) for name, value in values.items()}


def rate(worker, clock):
    return [0.1 / (1 + 0.1 * clock)]


def train(rank, world_size, servers, options, versions=3 * PUSHES):
    """Return the record of all servers, and the values in the end."""
    if rank in servers and rank == world_size - 1:
        record, last = ps.serve(timeout=FAR), None
    else:
        values = {name: torch.nn.Parameter(value) for name, value in initial().items()}
        optimizer = ps.Optimizer(values.items(), servers=servers, record=True, timeout=FAR, **options)
        for clock in range(PUSHES):
            held = {name: p.detach() for name, p in values.items()}
            for name, grad in gradients(rank, clock, held).items():
                values[name].grad = grad
            optimizer.param_groups[0]["lr"] = rate(rank, clock)[0]
            optimizer.step()
            assert optimizer.version > clock
        last = {name: torch.empty(shape) for name, shape in SHAPES.items()}
        pull = optimizer.store.pull(last)
        while pull.wait() and pull.versions.lowest < versions:  # all pushes of all workers
            time.sleep(0.01)
            pull = optimizer.store.pull(last)
        optimizer.close()
        record = optimizer.record()
    return record.gather(), last


WAYS = {
    "synchronous": {"optimizer": optim.AdamW},
    "bounded": {"optimizer": optim.AdamW, "quorum": 1, "staleness": 2},
    "asynchronous": {"optimizer": optim.SGD, "momentum": 0.5, "quorum": 1, "staleness": None},
    "int8": {"optimizer": optim.AdamW, "quorum": 1, "staleness": None, "codec": "int8"},
    "synchronous int4": {"optimizer": optim.AdamW, "codec": "int4"},
    "compensated": {"optimizer": optim.SGD, "quorum": 1, "staleness": None, "delay_compensation": LAMBDA},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_record_replays_to_the_same_bits(way, tmp_path):
    """Three workers, one of which serves, and a rank that only serves."""
    versions = PUSHES if way.startswith("synchronous") else 3 * PUSHES
    (record, last), *_ = run_ranks(4, train, [1, 3], WAYS[way], versions)
    record.save(tmp_path / "record.json")
    again = ps.Record.load(tmp_path / "record.json")
    assert again == record and record.handled.keys() == {1, 3}
    replayed = ps.replay(again, initial(), gradients, rates=rate)
    if way in ("synchronous int4", "int8"):  # workers pull differences, and hold a little less than the servers
        for name, value in last.items():
            torch.testing.assert_close(replayed[name], value, rtol=0.02, atol=0.02)
        assert all(
            torch.equal(v, w)
            for v, w in zip(replayed.values(), ps.replay(again, initial(), gradients, rates=rate).values(), strict=True)
        )
    else:
        for name, value in last.items():
            assert torch.equal(replayed[name], value), name


def end_one_after_another(rank, world_size, grace):
    """Return the record, and what the server holds when all workers have left."""
    values = {name: torch.nn.Parameter(value) for name, value in initial().items()}
    options = {"quorum": 2, "grace": grace, "staleness": None, "lr": 0.1, "timeout": FAR, "record": True}
    optimizer = ps.Optimizer(values.items(), optim.Adagrad, servers=[0], **options)
    for clock in range(PUSHES + rank):
        held = {name: p.detach() for name, p in values.items()}
        for name, grad in gradients(rank, clock, held).items():
            values[name].grad = grad
        optimizer.step()
    optimizer.close()
    return optimizer.record().gather(), [
        value.clone() for value in optimizer.store._shard.parameters
    ] if rank == 0 else []


@pytest.mark.parametrize("grace", [None, timedelta(milliseconds=1)])
def test_a_quorum_is_at_most_the_workers_that_are_left(grace):
    """Some contributions of the last worker are versions of their own."""
    (record, last), *_ = run_ranks(3, end_one_after_another, grace)
    pushes = sum(what == 0 for what, *_ in record.handled[0])
    assert pushes == 3 * PUSHES + 3
    for ours, value in zip(ps.replay(record, initial(), gradients).values(), last, strict=True):
        assert torch.equal(ours, value)


def by_hand(record, compensation):
    """Follow the record of one server."""
    values = initial()
    held = {}
    (order,) = record.handled.values()
    for what, worker, clock, _ in order:
        if what == 1:
            held[worker] = {name: value.clone() for name, value in values.items()}
        elif what == 0:
            for name, g in gradients(worker, clock, held[worker]).items():
                g = g + compensation * (g * g) * (values[name] - held[worker][name])
                values[name] -= rate(worker, clock)[0] * g
    return values


@pytest.mark.parametrize("compensation", [0.0, LAMBDA])
def test_delay_compensation_is_that_of_the_paper(compensation):
    options = {**WAYS["compensated"], "delay_compensation": compensation}
    (record, last), *_ = run_ranks(3, train, [0], options)
    for name, value in by_hand(record, compensation).items():
        torch.testing.assert_close(last[name], value, rtol=1e-6, atol=1e-6)


def test_compensation_uses_what_each_worker_holds():
    """An order by hand: worker 1 pushes what it has computed before three pushes of worker 0."""
    (record, _), *_ = run_ranks(2, train, [0], WAYS["compensated"], 2 * PUSHES)
    pull, push = 1, 0
    order = [(pull, 0, 0, 0), (pull, 1, 0, 0)]
    for clock in range(3):
        order += [(push, 0, clock, 0), (pull, 0, clock + 1, 0)]
    order += [(push, 1, 0, 0), (pull, 1, 1, 0)]
    late = dataclasses.replace(record, handled={0: order})
    replayed = ps.replay(late, initial(), gradients, rates=rate)
    for name, value in by_hand(late, LAMBDA).items():
        torch.testing.assert_close(replayed[name], value, rtol=1e-6, atol=1e-6)
    plain = by_hand(late, 0.0)
    assert not torch.allclose(plain["weight"], replayed["weight"], rtol=1e-3, atol=1e-3)


def test_an_order_that_no_run_has_is_refused():
    (record, _), *_ = run_ranks(2, train, [0], WAYS["asynchronous"], 2 * PUSHES)
    wrong = dataclasses.replace(record, handled={0: [(0, 0, 0, 0), (1, 0, 0, 0), (1, 1, 0, 0)]})
    with pytest.raises(ValueError, match="record: expected an order that a run can have"):
        ps.replay(wrong, initial(), gradients)


@pytest.mark.parametrize("quorum", ["all", 1])
def test_an_order_by_hand_of_pushes_of_several_messages(quorum):
    values = {"large": torch.zeros(700, 1001), "small": torch.zeros(37)}
    order = [(what, worker) for _ in range(2) for what in ("pull", "push") for worker in range(2)]
    order += [("pull", worker) for worker in range(2)]
    staleness = 0 if quorum == "all" else None
    record = ps.Record.written(order, values, optim.SGD, quorum=quorum, staleness=staleness, lr=1.0)
    assert len(record.handled[2]) > len(order)
    was_initialized = dist.is_initialized()
    result = ps.replay(
        record, values, lambda worker, clock, held: {name: torch.ones_like(v) for name, v in held.items()}
    )
    pushes = 2 if quorum == "all" else 4  # the mean of two, or each
    assert all(torch.equal(value, torch.full_like(value, -float(pushes))) for value in result.values())
    assert dist.is_initialized() == was_initialized  # a replay needs no group


def test_the_last_worker_that_leaves_completes_a_version():
    values = {"w": torch.zeros(3)}
    order = [("pull", 0), ("pull", 1), ("push", 0), ("pull", 0)]
    record = ps.Record.written(order, values, optim.SGD, quorum=2, staleness=None, lr=1.0)
    leaves = [(2, worker, 0, -1) for worker in range(2)]
    record = dataclasses.replace(record, handled={2: [*record.handled[2], *leaves]})
    (value,) = ps.replay(record, values, lambda worker, clock, held: {"w": torch.ones(3)}).values()
    assert torch.equal(value, torch.full((3,), -0.5))  # one of the two that make a mean
