"""Sites that are lost, that diverge or that differ, and addresses at which nothing may be sent."""

import contextlib
import logging
import os
import signal
import socket
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from local_training import backups, flat, give_grads, network, same, train
from ranks import FAR, finish_before, run_ranks

from dltrain_ext import comm, local_sgd, optim
from dltrain_ext.local_sgd.sockets import sockets

SCHEDULES = [dict(), dict(fragments=2), dict(delay=3), dict(fragments=2, delay=1)]


def make(seed=0, **options):
    model = network(seed=seed)
    inner = optim.AdamW(model.parameters(), lr=1e-3)
    outer = local_sgd.DiLoCo(model, inner, timeout=FAR, **(dict(sync_every=4) | options))
    return model, inner, outer


def go_on(model, inner, outer, site, outer_steps, first):
    """Train until so many outer steps are taken."""
    step = first
    while outer.outer_steps < outer_steps:
        train(model, inner, site, range(step, step + 1))
        step += 1
    return step


def survive(rank, world_size, victim, dies_at, schedule, given):
    """Return what the survivors have in the end; the victim is killed after one of its steps."""
    model, inner, outer = make(**schedule)
    assert outer.lost is None
    if rank == victim:
        train(model, inner, rank, range(1, dies_at + 1))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError, match=rf"the culprit is rank {victim}: it has left"):
        train(model, inner, rank, range(1, 100))
    assert outer.lost == victim
    kept, done = flat(model), outer.outer_steps
    left = [other for other in range(world_size) if other != victim]
    outer.recover(dist.new_group(left, use_local_synchronization=True) if given else None)
    assert outer.lost is None
    assert dist.get_process_group_ranks(outer.group) == left
    if outer.outer_steps == done:
        assert torch.equal(flat(model), kept)
    go_on(model, inner, outer, rank, 8, 100)
    return backups(outer), flat(model), outer.outer_steps


@pytest.mark.parametrize(
    ("dies_at", "schedule"),
    [(0, SCHEDULES[0]), *((5, schedule) for schedule in SCHEDULES), (2, SCHEDULES[3])],
)
def test_a_killed_site_is_named_and_the_others_go_on(schedule, dies_at):
    *found, _ = run_ranks(3, survive, 2, dies_at, schedule, False, dying=(2,))
    assert same(found[0][0], found[1][0]) and found[0][2] == found[1][2] == 8
    if "delay" not in schedule and "fragments" not in schedule:
        assert torch.equal(found[0][1], found[1][1])


def test_the_first_site_is_lost_and_a_group_is_given():
    _, *found = run_ranks(3, survive, 0, 6, dict(delay=2), True, dying=(0,))
    assert same(found[0][0], found[1][0])


def test_one_site_is_left():
    _, (values, parameters, _) = run_ranks(2, survive, 0, 5, dict(), False, dying=(0,))
    assert all(value.isfinite().all() for value in values.values()) and not torch.equal(parameters, flat(network()))


def lose_two(rank, world_size):
    model, inner, outer = make()
    for victim in (3, 1):
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.DistBackendError, match=f"the culprit is rank {victim}"):
            train(model, inner, rank, range(1, 100))
        outer.recover()
        go_on(model, inner, outer, rank, outer.outer_steps + 2, 100)
        finish_before(1, 0, 2)
    assert dist.get_process_group_ranks(outer.group) == [0, 2]
    return backups(outer)


def test_sites_are_lost_one_after_another():
    first, _, second, _ = run_ranks(4, lose_two, dying=(1, 3))
    assert same(first, second)


def lose_before_the_beginning(rank, world_size):
    """The sites have not yet made their parameters the same when one is killed."""
    model, inner, outer = make(seed=rank)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError, match="the culprit is rank 2"):
        train(model, inner, rank, range(1, 100))
    outer.recover()
    go_on(model, inner, outer, rank, 2, 1)
    return flat(model)


def test_a_site_that_is_lost_before_the_first_step():
    first, second, _ = run_ranks(3, lose_before_the_beginning, dying=(2,))
    assert torch.equal(first, second)


def recover_for_nothing(rank, world_size):
    model, inner, outer = make()
    with pytest.raises(RuntimeError, match="group: expected one of the ranks that are left, since no rank is known"):
        outer.recover()
    train(model, inner, rank, range(1, 5))
    return flat(model)


def test_recovery_without_a_lost_site():
    first, second = run_ranks(2, recover_for_nothing)
    assert torch.equal(first, second)


def one_has_the_mean(rank, world_size, schedule, behind):
    """The others take an outer step that one site has no mean of: as if a site were lost between the two."""
    model, inner, outer = make(**schedule)
    step = go_on(model, inner, outer, rank, 2, 1)
    if rank == behind:
        with (
            mock.patch.object(outer._exchange, "_step", side_effect=dist.DistBackendError("interrupted")),
            pytest.raises(dist.DistBackendError, match="interrupted"),
        ):
            go_on(model, inner, outer, rank, 3, step)
    else:
        go_on(model, inner, outer, rank, 3, step)
    outer.recover(dist.new_group(list(range(world_size))))
    assert outer.outer_steps == 3
    caught_up = outer.state_dict()
    go_on(model, inner, outer, rank, 6, 100)
    return caught_up, backups(outer)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("behind", [0, 2])
def test_sites_that_lack_an_outer_step_get_it(schedule, behind):
    caught_up, later = zip(*run_ranks(3, one_has_the_mean, schedule, behind), strict=True)
    for each in caught_up:
        assert same(each["backup"], caught_up[0]["backup"]) and same(each["momentum"], caught_up[0]["momentum"])
    assert all(same(values, later[0]) for values in later)


def with_a_flipped_bit(rank, world_size, schedule):
    """Return what is kept of the last fragment, in which rank 1 has a flipped bit, before and after."""
    model, inner, outer = make(**schedule)
    fragments = schedule.get("fragments", 1)
    step = go_on(model, inner, outer, rank, 2 * fragments, 1)
    outer.finish()
    kept = outer._exchange.fragments[-1].backup
    before = kept.clone()
    if rank == 1:
        kept.view(torch.int32)[5] ^= 1 << 20
    with pytest.raises(dist.DistBackendError, match="does not agree with rank"):
        train(model, inner, rank, range(step, step + 12))
    return before, kept


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_flipped_bit_is_an_error_at_all_sites(schedule):
    """A value that only one site has is not averaged."""
    (before, after), _, (others_before, others_after) = run_ranks(3, with_a_flipped_bit, schedule)
    assert torch.equal(before, after) and torch.equal(others_before, others_after)


def with_swapped_values(rank, world_size):
    """Rank 1 has two values in each other's places."""
    model, inner, outer = make()
    step = go_on(model, inner, outer, rank, 2, 1)
    if rank == 1:
        backup = outer._exchange.fragments[0].backup
        backup[:32] = backup[:32].roll(16)
    with pytest.raises(dist.DistBackendError, match="does not agree with rank"):
        train(model, inner, rank, range(step, step + 12))


def test_values_in_the_wrong_place_are_an_error():
    run_ranks(2, with_swapped_values)


class Messages(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def diverge(rank, world_size, codec, schedule, value):
    """Rank 1 has a value that is not finite before the second outer step; gradients do not depend on it."""
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    outer = local_sgd.DiLoCo(model, inner, sync_every=4, codec=codec, **schedule)
    messages = Messages()
    logging.getLogger("dltrain_ext").addHandler(messages)
    kept = []
    for step in range(1, 13):
        give_grads(model, rank, step)
        inner.step()
        if step == 7 and rank == 1:
            model[1].weight.data[7, 3] = value
        if step % 4 == 0:
            kept.append(backups(outer))
            assert outer.metrics()["outer/nonfinite"] == (step >= 8)
    logging.getLogger("dltrain_ext").removeHandler(messages)
    assert sum("the mean of outer step 1 is not finite in some blocks" in text for text in messages.texts) == 1
    return kept, flat(model)


@pytest.mark.parametrize("codec", ["raw", "int4"])
@pytest.mark.parametrize("schedule", [dict(), dict(delay=3), dict(delay=2, mix=0.0)])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_site_that_diverges_does_not_spoil_the_others(codec, schedule, value):
    """Only blocks that are not finite keep their values, once, and the site gets finite parameters again. Else it would
    hold up these blocks at all sites for ever."""
    found = run_ranks(2, diverge, codec, schedule, value)
    for (before, after, later), parameters in found:
        assert same(after, found[0][0][1]) and same(later, found[0][0][2])
        assert all(kept.isfinite().all() for values in (after, later) for kept in values.values())
        assert after["1.weight"][7, 3] == before["1.weight"][7, 3] != later["1.weight"][7, 3]
        assert not torch.equal(after["1.weight"], before["1.weight"])
        assert not torch.equal(after["0.weight"], before["0.weight"])
        assert parameters.isfinite().all()


PUBLIC = "8.8.4.4"


def at_a_public_address(rank, world_size):
    own = [PUBLIC, "10.0.0.3"] if rank == 1 else ["192.168.1.2"]
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with mock.patch.object(comm.addresses, "addresses", return_value=own):
        with pytest.raises(PermissionError, match=rf"allow_public: expected private addresses.*{PUBLIC} on rank 1"):
            local_sgd.DiLoCo(model, inner)
        outer = local_sgd.DiLoCo(model, inner, sync_every=2, allow_public=True)
        train(model, inner, rank, range(1, 3))
        outer.recover(dist.new_group())
    assert outer.outer_steps == 1
    return flat(model)


def test_public_addresses_are_refused_at_all_sites_unless_allowed():
    first, second = run_ranks(2, at_a_public_address)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.31.0.1", False),
        ("192.168.7.7", False),
        ("100.100.1.1", False),
        ("169.254.0.9", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd12::7", False),
        ("8.8.4.4", True),
        ("172.32.0.1", True),
        ("2a00:1450::1", True),
        ("::ffff:8.8.4.4", True),
        ("::ffff:10.0.0.1", False),
    ],
)
def test_which_addresses_are_public(address, expected):
    assert comm.addresses.is_public(address) == expected


def test_the_addresses_of_a_named_interface():
    with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo"):
        assert "127.0.0.1" in comm.addresses.addresses()
    with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="none-such,lo"):
        assert "127.0.0.1" in comm.addresses.addresses()
    with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="none-such"):
        assert comm.addresses.addresses() == []


def end(rank, world_size):
    model, inner, outer = make(delay=3)
    train(model, inner, rank, range(1, 6))
    assert outer._exchange._flight is not None
    dist.barrier()  # the site that closes first fails the average of one that is still to take the step
    outer.close()
    train(model, inner, rank, range(6, 30))
    assert outer.steps == 5
    again = local_sgd.DiLoCo(model, inner, sync_every=2)
    train(model, inner, rank, range(30, 32))
    assert again.outer_steps == 1
    return flat(model)


def test_close_gives_up_the_average_under_way():
    first, second = run_ranks(2, end)
    assert torch.equal(first, second)


def limited(rank, world_size):
    before = sockets()
    *_, outer = make()
    limits = set()
    for descriptor, _ in sockets() - before:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:  # closed meanwhile
            if connection.type == socket.SOCK_STREAM and connection.family != socket.AF_UNIX:
                limits.add(connection.getsockopt(socket.IPPROTO_TCP, 25))  # TCP_NOTSENT_LOWAT
    outer.close()
    return limits


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit is one of Linux")
def test_connections_hold_little_that_is_not_sent():
    """What they held would delay the news that a site has been lost."""
    assert run_ranks(2, limited, fresh=True) == [{1 << 16}] * 2
