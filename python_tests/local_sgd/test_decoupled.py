"""Sites whose averages are versions of a store: they wait for nobody, and no movement is lost or counted twice."""

import copy
import logging
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from contributions import same_everywhere
from local_training import backups, flat, give_grads, network, same, train
from ranks import FAR, run_ranks
from torch import nn

from dltrain_ext import local_sgd, optim, ps

SCHEDULES = [dict(), dict(fragments=2), dict(delay=3), dict(fragments=2, delay=1)]


def make(seed=0, inner=None, store=None, **options):
    model = network(seed=seed)
    inner = optim.AdamW(model.parameters(), lr=1e-3) if inner is None else inner(model)
    store = ps.Store(timeout=FAR) if store is None else store
    return model, inner, local_sgd.DiLoCo(model, inner, store=store, **(dict(sync_every=4) | options))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def mean(store=None, **options):
    """The parameters of a version are those of the one before less the mean of the movements."""
    return make(inner=sgd, store=store, lr=1.0, momentum=0.0, nesterov=False, codec="raw", **options)


def step(model, inner, site, number, amount=1.0):
    give_grads(model, site, number)
    for parameter in model.parameters():
        parameter.grad *= amount
    inner.step()


def told(name):
    """Tell other ranks."""
    dist.distributed_c10d._get_default_store().set(name, "")


def heard(*names):
    dist.distributed_c10d._get_default_store().wait(list(names), FAR)


def as_an_average(rank, world_size, schedule, codec):
    """Return what all have, from a store and from an average, after the same steps."""
    found = []
    for from_store in (True, False):
        model = network(seed=rank)
        inner = optim.AdamW(model.parameters(), lr=1e-3)
        options = dict(store=ps.Store(timeout=FAR)) if from_store else dict(min_compress_numel=0)
        outer = local_sgd.DiLoCo(model, inner, sync_every=4, codec=codec, **schedule, **options)
        train(model, inner, rank, range(1, 18))
        outer.finish()
        kept = backups(outer)
        assert same_everywhere(torch.cat([each.flatten() for each in kept.values()]))
        found.append((kept, flat(model), outer.outer_steps))
        outer.close()
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_a_quorum_of_all_it_is_the_average(schedule):
    for decoupled, averaged in run_ranks(3, as_an_average, schedule, "raw"):
        assert decoupled[2] == averaged[2]
        torch.testing.assert_close(decoupled[0], averaged[0], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(decoupled[1], averaged[1], rtol=1e-4, atol=1e-6)


def test_codecs_lose_about_as_much_as_in_an_average():
    """The servers send a coded difference, so the values of both differ by what a codec loses."""
    for decoupled, averaged in run_ranks(2, as_an_average, SCHEDULES[1], "int8"):
        torch.testing.assert_close(decoupled[1], averaged[1], rtol=0.05, atol=0.01)


def land(outer):
    """Wait until nothing is under way."""
    while outer._exchange._flights:
        outer.finish()


def waits_for_nobody(rank, world_size):
    """Two sites train while the third one stands still, which then sends what it has moved since the beginning."""
    model, inner, outer = mean(quorum=2)
    for number in range(1, 13):
        step(model, inner, rank, number)
        if rank < 2:
            land(outer) if number % 4 == 0 else None
        elif number == 3:
            heard("done/0", "done/1")
    if rank < 2:
        told(f"done/{rank}")
    taken = outer.outer_steps
    outer.close()
    return taken


def test_no_site_waits_for_one_that_stands_still():
    assert run_ranks(3, waits_for_nobody)[:2] == [3, 3]


def goes_on(rank, world_size):
    """A site whose version is not made goes on, sends that fragment no second time, and takes the version later."""
    model, inner, outer = mean(quorum=2, fragments=2)
    if rank == 0:
        for number in range(1, 11):  # five turns, and each fragment is sent once
            step(model, inner, rank, number)
        assert outer.outer_steps == 0
        told("far")
        heard("sent")
        before = flat(model)
        land(outer)
        kept = torch.cat([each.flatten() for each in backups_now(outer).values()])
        torch.testing.assert_close(flat(model), kept.lerp(before, 0.5))
    else:
        inner.step()  # it is at the beginning that all have the same parameters
        heard("far")
        for number in range(2, 5):
            step(model, inner, rank, number)
        told("sent")
        land(outer)
    assert outer.outer_steps == 2
    pushed = outer.store.stats()["pushes"]
    outer.close()
    return pushed


def backups_now(outer):
    """Return what this site has taken, without the others."""
    return {name: kept for each in outer._exchange.fragments for name, kept in each.named(each.backup).items()}


def test_a_site_goes_on_until_its_version_is_made():
    for pushed in run_ranks(2, goes_on):
        assert pushed == {0: 1, 1: 1}


def weighted(rank, world_size, weights):
    """Return what all have when both have moved."""
    model, inner, outer = mean(quorum=1, grace=FAR, weight=weights[rank])
    for number in range(1, 5):
        step(model, inner, rank, number, 0.1 * (rank + 1))
    kept = torch.cat([each.flatten() for each in backups(outer).values()])
    outer.close()
    return kept


def movement(site, amount):
    model = network()
    inner = sgd(model)
    before = flat(model)
    for number in range(1, 5):
        step(model, inner, site, number, amount)
    return before, before - flat(model)


def test_with_a_grace_the_mean_is_weighted():
    first, second = run_ranks(2, weighted, (1.0, 3.0))
    (before, moved), (_, also_moved) = movement(0, 0.1), movement(1, 0.2)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, before - (moved + 3 * also_moved) / 4)


def left_out(rank, world_size):
    """One site is later than the grace of the others. What it has moved is in the next version."""
    model, inner, outer = mean(quorum=2, grace=timedelta(milliseconds=300))
    pushed = []
    push = outer.store.push

    def kept(values, **options):
        pushed.append(torch.cat([value.flatten() for value in values.values()]).clone())
        return push(values, **options)

    outer.store.push = kept
    if rank == 2:
        inner.step()
        heard("done/0", "done/1")
    for number in range(2 if rank == 2 else 1, 5):
        step(model, inner, rank, number)
    if rank == 2:
        told("sent")
    else:
        land(outer)
        told(f"done/{rank}")
        heard("sent")
    if rank == 0:
        for number in range(5, 9):
            step(model, inner, rank, number)
    land(outer)
    kept = torch.cat([each.flatten() for each in backups(outer).values()])
    outer.close()
    return kept, pushed


def test_what_a_late_site_has_moved_is_in_the_next_version():
    results = run_ranks(3, left_out)
    assert all(torch.equal(kept, results[0][0]) for kept, _ in results)
    first, second, third = ([*pushed] for _, pushed in results)
    assert [len(first), len(second), len(third)] == [2, 1, 1]
    expected = flat(network()) - (first[0] + second[0]) / 2 - (first[1] + third[0]) / 2
    torch.testing.assert_close(results[0][0], expected)


def goes_on_without(rank, world_size):
    """A site is killed, the others go on."""
    model, inner, outer = mean(ps.Store(servers=[0], timeout=FAR), quorum=2)
    if rank == 2:
        step(model, inner, rank, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    for number in range(1, 17):
        step(model, inner, rank, number)
        if number % 4 == 0:
            land(outer)  # otherwise a step in which it lands can send the next movement, and so make one version more
    assert outer.outer_steps == 4
    kept = backups_now(outer)
    told(f"done/{rank}")
    heard("done/0", "done/1")
    outer.close()
    return kept


def test_the_others_go_on_without_a_site_that_is_killed():
    first, second, _ = run_ranks(3, goes_on_without, dying=(2,))
    assert same(first, second)


def server_is_lost(rank, world_size):
    model, inner, outer = mean(ps.Store(servers=[2], timeout=FAR), quorum=1)
    if rank == 2:
        step(model, inner, rank, 1)
        told("begun")
        heard("also/0", "also/1")
        os.kill(os.getpid(), signal.SIGKILL)
    step(model, inner, rank, 1)
    told(f"also/{rank}")
    with pytest.raises(dist.DistBackendError, match="rank 2"):
        for number in range(2, 1000):
            step(model, inner, rank, number)
            time.sleep(0.01)
    assert outer.lost is None
    return True


def test_a_lost_server_is_named():
    assert run_ranks(3, server_is_lost, dying=(2,))[:2] == [True, True]


def serves(rank, world_size):
    """A rank that is no site serves."""
    if rank == 0:
        return ps.serve(timeout=FAR).handled
    group_store = ps.Store(servers=[0], timeout=FAR, record=True)
    model, inner, outer = make(store=group_store, quorum=1, codec="int8", fragments=2, sync_every=2)
    assert outer.group is None and outer.store is not group_store
    number = 0
    while outer.metrics()["outer/steps"] < 4:
        number += 1
        train(model, inner, rank, range(number, number + 1))
    outer.close()
    return outer.metrics()


def test_a_rank_that_is_no_site_may_serve():
    handled, *metrics = run_ranks(3, serves)
    assert handled[0]
    for found in metrics:
        assert found["outer/steps"] >= 4 and found["outer/wire_bytes"] > 0 and found["outer/nonfinite"] == 0


class Texts(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def diverge(rank, world_size):
    model, inner, outer = mean()
    log, texts = logging.getLogger("dltrain_ext"), Texts()
    log.addHandler(texts)
    for number in range(1, 5):
        step(model, inner, rank, number, float("inf") if rank == number == 1 else 1.0)
    log.removeHandler(texts)
    assert torch.equal(flat(model), flat(network()))
    assert outer.metrics()["outer/nonfinite"] == 1 and "not finite" in texts.texts[0]
    outer.close()


def test_what_is_not_finite_changes_nothing():
    run_ranks(2, diverge)


def resume(rank, world_size, schedule, from_store, to_store):
    """Return what all have after some outer steps, without a break, and with a checkpoint in between."""

    def make(through_store):
        model = network()
        inner = optim.AdamW(model.parameters(), lr=1e-3)
        options = dict(store=ps.Store(timeout=FAR)) if through_store else dict(min_compress_numel=0)
        return model, inner, local_sgd.DiLoCo(model, inner, sync_every=4, codec="raw", **schedule, **options)

    model, inner, outer = make(from_store)
    train(model, inner, rank, range(1, 17))
    expected = backups(outer), flat(model)
    outer.close()
    model, inner, outer = make(from_store)
    train(model, inner, rank, range(1, 9))
    saved = [copy.deepcopy(each.state_dict()) for each in (model, inner, outer)]
    outer.close()
    model, inner, outer = made = make(to_store)
    for each, state in zip(made, saved, strict=True):
        each.load_state_dict(state)
    assert (outer.steps, outer.outer_steps) == (8, 2 * schedule.get("fragments", 1))
    train(model, inner, rank, range(9, 17))
    found = backups(outer), flat(model)
    outer.close()
    return expected, found


@pytest.mark.parametrize("schedule", SCHEDULES[:2])
@pytest.mark.parametrize(("from_store", "to_store"), [(True, True), (True, False), (False, True)])
def test_a_checkpoint_goes_on_as_without_a_break(schedule, from_store, to_store):
    for (kept, values), (again, values_again) in run_ranks(2, resume, schedule, from_store, to_store):
        if from_store and to_store:
            assert same(kept, again) and torch.equal(values, values_again)
        torch.testing.assert_close(again, kept, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(values_again, values, rtol=1e-4, atol=1e-6)


def keeps_what_is_lost(rank, world_size):
    """What encoding has lost is in a checkpoint, by parameter."""
    model, inner, outer = make(codec="int4")
    train(model, inner, rank, range(1, 5))
    saved = outer.state_dict()
    (lost,) = saved["feedback"].values()
    assert lost.keys() == saved["backup"].keys()
    assert any(each.any() for each in lost.values())
    outer.close()
    model, inner, outer = make(codec="int4")
    outer.load_state_dict(saved)
    again = outer.state_dict()
    assert same(again["feedback"][f"rank {rank} of 2"], lost) and same(again["momentum"], saved["momentum"])
    train(model, inner, rank, range(1, 2))
    with pytest.raises(RuntimeError, match="load_state_dict: expected a site that has made no step yet"):
        outer.load_state_dict(saved)
    outer.close()


def test_residuals_are_part_of_a_checkpoint():
    run_ranks(2, keeps_what_is_lost)


INVALID = [
    (dict(store=1), TypeError, "store: expected a dltrain_ext.ps.Store, got int"),
    (dict(quorum=2), ValueError, "quorum: expected 'all' without a store, got 2"),
    (dict(grace=FAR), ValueError, "grace: expected None without a store"),
    (dict(weight=2.0), ValueError, "weight: expected 1.0 without a store, got 2.0"),
    (dict(timeout=FAR), ValueError, "timeout: expected None with a store"),
    (dict(min_compress_numel=7), ValueError, "min_compress_numel: expected 1024 with a store, got 7"),
    (dict(allow_public=True), ValueError, "allow_public: expected False with a store, got True"),
    (dict(quorum=0), ValueError, "quorum: expected 'all' or an int of at least 1, got 0"),
    (dict(grace=1.0, quorum=1), TypeError, "grace: expected .*timedelta.*, got"),
    (dict(grace=FAR), ValueError, "grace: expected .*"),
    (dict(weight=0.0, quorum=1, grace=FAR), ValueError, "weight: expected .*0, got 0.0"),
    (dict(weight=2.0), ValueError, "weight: expected 1.0 without a grace, got 2.0"),
    (dict(store=lambda: ps.Store(codec="int8")), ValueError, "store: expected one with the default codec, got 'int8'"),
    (dict(store=lambda: ps.Store(quorum=1)), ValueError, "store: expected one with the default quorum, got 1"),
]


@pytest.mark.parametrize(("options", "error", "message"), INVALID)
def test_invalid_arguments_are_named(options, error, message, group):
    needs_store = "without a store" not in message and "store" not in options
    options = (dict(store=ps.Store) if needs_store else {}) | options
    if callable(options.get("store")):
        options["store"] = options["store"]()
    model = network()
    inner = sgd(model)
    with pytest.raises(error, match=message):
        local_sgd.DiLoCo(model, inner, **options)
    assert not inner._optimizer_step_post_hooks


def test_what_is_not_for_stores_is_refused(group):
    model, inner, outer = make()
    with pytest.raises(RuntimeError, match="recover: expected sites in a process group, got those of a store"):
        outer.recover()
    inner.step()
    with pytest.raises(ValueError, match="store: expected one without keys"):
        local_sgd.DiLoCo(model, inner, store=outer.store)
    outer.close()
    parallel = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(parallel)
    parallel.module = network()
    with pytest.raises(ValueError, match="model: expected that of a site of one rank"):
        local_sgd.DiLoCo(parallel, inner, store=ps.Store())
