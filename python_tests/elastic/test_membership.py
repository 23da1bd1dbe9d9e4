"""What a member of a job takes from the others, and what is refused; members are threads of this process."""

import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dltrain_ext import elastic, local_sgd

sys.path.append(str(Path(__file__).parents[1] / "local_sgd"))
from local_training import flat, network, train

FAR = timedelta(seconds=60)


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def connected(store):
    return dist.TCPStore("127.0.0.1", store.port, is_master=False)


class Site:
    def __init__(self, store, seed, *, least=1, **options):
        self.members = elastic.Membership(connected(store), least=least, timeout=FAR)
        self.model = network(seed=seed)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.outer = local_sgd.DiLoCo(self.model, self.inner, group=self.members, **(dict(sync_every=2) | options))
        self.seed, self.steps = seed, 0

    def step(self):
        self.steps += 1
        train(self.model, self.inner, self.seed, range(self.steps, self.steps + 1))

    def kept(self):
        fragments = self.outer._exchange.fragments
        return torch.cat([flat for each in fragments for flat in (each.backup, each.momentum)]).clone()


def until(sites, outer_steps):
    """Have all sites train until they have taken so many outer steps."""

    def go_on(site):
        while site.outer.outer_steps < outer_steps:
            site.step()

    with ThreadPoolExecutor() as pool:
        list(pool.map(go_on, sites))


def train_together(site):
    """Train until two are members, and then for three outer steps."""
    joined = None
    while joined is None or site.outer.outer_steps < joined + 3:
        site.step()
        if joined is None and len(site.members.members) == 2:
            joined = site.outer.outer_steps


def test_founders_with_different_parameters_get_those_of_the_first(store):
    sites = [Site(store, seed, least=2, codec="raw") for seed in (1, 2)]
    until(sites, 1)
    first, second = sorted(sites, key=lambda site: site.members.number)
    assert first.members.members == second.members.members == (1, 2)
    assert torch.equal(first.kept(), second.kept()) and torch.equal(flat(first.model), flat(second.model))
    for site in sites:
        site.outer.close()


@pytest.mark.parametrize("schedule", [dict(), dict(sync_every=4, fragments=2), dict(sync_every=4, delay=1)])
def test_one_that_joins_has_what_all_have_bit_for_bit(store, schedule):
    """It is let in after an outer step, and its own first gradients are not used."""
    first, second = (Site(store, seed, codec="raw", **schedule) for seed in (1, 2))
    until([first], 2)
    kept, found = {}, []
    first.inner.register_step_post_hook(lambda *_: kept.setdefault(first.outer.outer_steps, first.kept()))
    second.inner.register_step_pre_hook(
        lambda *_: found.append((second.outer.outer_steps, second.kept(), flat(second.model)))
    )

    with ThreadPoolExecutor() as pool:
        list(pool.map(train_together, (first, second)))
    (steps, state, parameters), (_, _, after), *_ = found
    assert steps >= 2 and torch.equal(state, kept[steps])
    assert torch.equal(parameters, after), "a gradient of other parameters was used"
    assert torch.equal(first.kept(), second.kept())
    first.outer.close()
    until([second], second.outer.outer_steps + 1)
    assert second.members.members == (second.members.number,)
    second.outer.close()


def test_one_that_was_taken_for_dead_while_it_waited_joins_again(store):
    first, second = Site(store, 1), Site(store, 2)
    until([first], 1)
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(train_together, second)
        while second.members.number != 2:
            assert not joining.done()
        first.members._bury([2])
        train_together(first)
        joining.result()
    assert first.members.members == second.members.members == (1, 3)
    assert torch.equal(first.kept(), second.kept())
    for site in (first, second):
        site.outer.close()


def test_one_that_is_left_out_sees_it_before_it_is_buried(store):
    members = elastic.Membership(store)
    members.enter("", "")
    assert not members.is_left_out()
    with mock.patch.object(members, "_bury"):  # who decides is killed
        members._decide(2, [7])
    assert members.is_left_out()
    members.leave()


def test_a_checkpoint_goes_on_as_a_new_job(store):
    first = Site(store, 1)
    until([first], 3)
    state, kept = first.outer.state_dict(), first.kept()
    weights = first.model.state_dict()
    first.outer.close()
    other = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    again, fresh = Site(other, 7, least=2), Site(other, 8, least=2)
    again.model.load_state_dict(weights)
    again.outer.load_state_dict(state)
    with ThreadPoolExecutor() as pool:
        list(pool.map(Site.step, (again, fresh)))
    assert again.outer.outer_steps == fresh.outer.outer_steps == 3
    assert torch.equal(again.kept(), kept) and torch.equal(fresh.kept(), kept)
    with pytest.raises(RuntimeError, match="load_state_dict: expected a member that has made no step yet"):
        again.outer.load_state_dict(state)
    until([again, fresh], 4)
    assert torch.equal(again.kept(), fresh.kept())
    for site in (again, fresh):
        site.outer.close()


def test_a_state_that_was_loaded_does_not_replace_that_of_a_job_that_runs(store):
    """However far it is."""
    other = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    further = Site(other, 3, codec="raw")
    until([further], 20)
    state = further.outer.state_dict()
    further.outer.close()
    first, second = (Site(store, seed, codec="raw") for seed in (1, 2))
    until([first], 1)
    second.outer.load_state_dict(state)
    with ThreadPoolExecutor() as pool:
        list(pool.map(train_together, (first, second)))
    assert first.outer.outer_steps == second.outer.outer_steps < 20
    assert torch.equal(first.kept(), second.kept())
    for site in (first, second):
        site.outer.close()


def test_one_that_comes_after_the_end_is_told_so(store):
    first = Site(store, 1)
    until([first], 1)
    first.outer.close()
    with pytest.raises(dist.DistBackendError, match="has ended: all members have left; its last members were .1."):
        Site(store, 2).step()


def test_one_with_other_settings_does_not_come_in(store):
    first = Site(store, 1)
    until([first], 1)
    with pytest.raises(ValueError, match="sync_every, lr.*: expected the same as the members of job '' have"):
        Site(store, 2, sync_every=3).step()
    until([first], 2)
    assert first.members.members == (1,)
    first.outer.close()


def test_jobs_of_different_names_are_apart(store):
    sites = [Site(store, seed) for seed in (1, 2)]
    sites[1].members._store = dist.PrefixStore("dltrain_ext/elastic/other", connected(store))
    until(sites, 2)
    assert [site.members.members for site in sites] == [(1,), (1,)]
    for site in sites:
        site.outer.close()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (dict(store=None), TypeError, "store: expected a torch.distributed.Store, got NoneType"),
        (dict(name=3), TypeError, "name: expected a str, got 3"),
        (dict(least=0), ValueError, "least: expected an int of at least 1, got 0"),
        (dict(least=1.5), TypeError, "least: expected an int, got 1.5"),
        (dict(timeout=5), ValueError, "timeout: expected a datetime.timedelta of 1 ms to 365 days, got 5"),
    ],
)
def test_arguments(options, error, text):
    with pytest.raises(error, match=text):
        elastic.Membership(**(dict(store=dist.HashStore()) | options))


def test_what_needs_a_process_group_is_refused(store):
    site = Site(store, 1)
    with pytest.raises(RuntimeError, match="recover: expected sites in a process group, got members of a job"):
        site.outer.recover()
    assert site.outer.group is None and site.outer.lost is None
    site.outer.close()
    parallel = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(parallel)
    parallel.module = network()
    with pytest.raises(ValueError, match="model: expected that of a site of one rank"):
        local_sgd.DiLoCo(parallel, site.inner, group=site.members)
