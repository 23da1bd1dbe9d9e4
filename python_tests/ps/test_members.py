"""Workers and servers that come and go while a store is at work: real processes, which are killed."""

import contextlib
import re
import signal
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from jobs import SILENT
from store_jobs import TIMEOUT, StoreJob, agree
from torch import nn

from dltrain_ext import elastic, ps


@pytest.fixture
def make_job(tmp_path):
    with contextlib.ExitStack() as stack:
        yield partial(StoreJob, stack, tmp_path)


def test_workers_that_are_killed_and_join(make_job):
    job = make_job(5)
    servers = [job.server(), job.server()]
    workers = [job.worker() for _ in range(3)]
    job.steps_more(workers)
    workers[0].kill()
    job.steps_more(workers[1:])
    epoch = workers[1].states[-1].epoch
    joined = job.worker()
    job.steps_more([*workers[1:], joined])
    assert joined.states[-1].epoch > epoch == workers[1].states[0].epoch
    assert joined.states[0].version >= workers[1].states[0].version + 20
    job.stop()
    assert [member.error for member in [*servers, *workers[1:], joined]] == [""] * 5
    assert agree([*workers, joined]) > 40


def test_a_server_that_is_lost_comes_back_from_its_checkpoint(make_job):
    job = make_job(4)
    servers = [job.server(), job.server()]
    workers = [job.worker(), job.worker()]
    job.until(lambda: len(list(job.folder.glob("*.pt"))) == 2)
    job.steps_more(workers)
    servers[1].kill()
    version = max(worker.states[-1].version for worker in workers)
    job.until(lambda: servers[1].is_over)
    back = job.server()
    epochs = [worker.states[-1].epoch for worker in workers]
    job.until(lambda: all(w.states[-1].epoch > epoch for w, epoch in zip(workers, epochs, strict=True)))
    job.steps_more(workers)
    assert all(worker.states[-1].version > version for worker in workers)
    job.stop()
    assert [member.error for member in [servers[0], back, *workers]] == ["", "", "", ""]
    agree(workers)


def test_a_server_without_a_checkpoint_takes_no_place(make_job, tmp_path):
    job = make_job(3)
    servers = [job.server(), job.server()]
    worker = job.worker()
    job.until(lambda: len(list(job.folder.glob("*.pt"))) == 2)
    job.steps_more([worker])
    servers[0].kill()
    empty = job.server(checkpoint=tmp_path / "empty")
    job.until(lambda: empty.is_over)
    assert re.search("there is no checkpoint of shard [01] of 2", empty.error)
    other = job.server()
    job.steps_more([worker])
    job.stop()
    assert [member.error for member in [servers[1], other, worker]] == ["", "", ""]


def test_a_job_that_has_lost_all_values_does_not_begin_anew(make_job):
    job = make_job(2)
    server, worker = job.server(checkpoint=None), job.worker()
    job.steps_more([worker])
    server.kill()
    empty = job.server()
    job.until(lambda: empty.is_over)
    assert "there is no checkpoint of shard 0 of 1" in empty.error
    worker.kill()


def test_a_spare_server_takes_the_place_of_a_lost_one(make_job):
    job = make_job(3)
    servers = [job.server(), job.server()]
    worker = job.worker()
    job.steps_more([worker])
    spare = job.server()
    job.until(lambda: len(worker.states[-1].members) == 4)
    job.until(lambda: len(list(job.folder.glob("*.pt"))) == 2)
    servers[1].kill()
    job.until(lambda: len(worker.states[-1].members) == 3)
    job.steps_more([worker])
    job.stop()
    assert [member.error for member in [servers[0], spare, worker]] == ["", "", ""]


def test_servers_wait_when_all_workers_are_lost(make_job):
    job = make_job(2)
    server, worker = job.server(), job.worker()
    job.steps_more([worker])
    worker.kill()
    job.until(lambda: worker.is_over)
    joined = job.worker()
    job.steps_more([joined])
    assert joined.states[0].version > worker.states[-1].version
    job.stop()
    assert (server.error, joined.error) == ("", "")


def test_a_job_goes_on_from_the_checkpoints_of_all_servers(make_job):
    job = make_job(3)
    job.server(), job.server()
    worker = job.worker()
    job.steps_more([worker])
    job.stop()
    again = make_job(3)
    servers = [again.server(), again.server()]
    other = again.worker()
    again.steps_more([other])
    again.stop()
    assert other.states[0].version == worker.states[-1].version + 1
    assert [server.error for server in servers] == ["", ""]


@pytest.mark.parametrize(
    "options",
    [
        dict(quorum=1, staleness=None),
        dict(quorum=1, staleness=2, codec="int8"),
        dict(quorum=2, staleness=None, grace=timedelta(milliseconds=5)),
        dict(codec="int8", pull_codec="fp16"),
    ],
    ids=["asynchronous", "bounded staleness", "quorum", "codecs"],
)
def test_modes(make_job, options):
    job = make_job(4)
    servers = [job.server(), job.server()]
    workers = [job.worker(**options) for _ in range(2)]
    job.steps_more(workers)
    joined = job.worker(**options)
    job.steps_more([*workers, joined])
    workers[0].kill()
    job.steps_more([workers[1], joined])
    job.stop()
    assert [member.error for member in [*servers, workers[1], joined]] == ["", "", "", ""]


def test_a_worker_with_other_settings_does_not_join(make_job):
    job = make_job(2)
    server, worker = job.server(), job.worker()
    job.steps_more([worker])
    other = job.worker(quorum=1)
    job.until(lambda: other.is_over)
    assert "values and options of the store: expected the same" in other.error
    job.steps_more([worker])
    job.stop()
    assert (server.error, worker.error) == ("", "")


def test_a_checkpoint_of_another_store_is_refused(make_job):
    job = make_job(2)
    job.server(), job.worker()
    job.until(lambda: list(job.folder.glob("*.pt")))
    job.stop()
    (path,) = job.folder.glob("*.pt")
    torch.save(torch.load(path) | {"optimizer": "SGD"}, path)
    again = make_job(2)
    server, worker = again.server(), again.worker()
    again.until(lambda: server.is_over)
    assert "whose optimizer is another one" in server.error
    other = again.server(checkpoint=None)
    again.steps_more([worker])
    again.stop()
    assert (other.error, worker.error) == ("", "")


@pytest.fixture
def alone():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return elastic.Membership(store)


def test_what_a_membership_excludes(alone):
    named = nn.Linear(2, 2).named_parameters()
    with pytest.raises(ValueError, match="servers: expected None with a membership, whose servers call serve, got "):
        ps.Store(alone, servers=[0])
    with pytest.raises(ValueError, match="record: expected False with a membership, got True"):
        ps.Store(alone, record=True)
    with pytest.raises(ValueError, match="ranks_per_host: expected 1 with a membership, got 2"):
        ps.Optimizer(named, group=alone, ranks_per_host=2)
    with pytest.raises(ValueError, match="store: expected one of a process group, got one of a membership"):
        ps.Store(alone).with_options(quorum=1)
    with pytest.raises(RuntimeError, match="store: expected one with keys, call init first"):
        ps.Store(alone).renew()


def test_arguments_of_serve(alone, tmp_path):
    with pytest.raises(TypeError, match="checkpoint: expected a path or None, got 3"):
        ps.serve(alone, checkpoint=3)
    with pytest.raises(ValueError, match="checkpoint: expected None without a membership, got "):
        ps.serve(checkpoint=tmp_path)
    with pytest.raises(ValueError, match="checkpoint_every: expected a datetime.timedelta of 1 ms to 365 days, got 1"):
        ps.serve(alone, checkpoint_every=1)
    with pytest.raises(ValueError, match="timeout: expected a datetime.timedelta of 1 ms to 365 days, or None, got 1"):
        ps.serve(alone, timeout=1)


def test_servers_go_on_when_a_worker_has_left_and_another_joins(make_job):
    job = make_job(3)
    server, workers = job.server(), [job.worker(pause=0.4), job.worker()]
    job.steps_more(workers, 2)
    epoch = workers[1].states[-1].epoch
    workers[0].leave()
    job.until(lambda: workers[0].is_over)
    job.steps_more(workers[1:])
    assert workers[1].states[-1].epoch == epoch
    joined = job.worker()
    job.steps_more([workers[1], joined])
    job.stop()
    assert [member.error for member in [server, *workers, joined]] == ["", "", "", ""]


def test_nobody_waits_for_a_worker_that_stands_still_in_a_change(make_job):
    job = make_job(4)
    options = dict(quorum=1, staleness=None)
    server, workers = job.server(), [job.worker(**options) for _ in range(3)]
    job.steps_more(workers)
    workers[0].send(signal.SIGSTOP)
    joined = job.worker(**options)
    job.steps_more([*workers[1:], joined])
    workers[0].kill()
    job.stop()
    assert [member.error for member in [server, *workers[1:], joined]] == ["", "", "", ""]


def test_what_is_pushed_while_a_server_ends_an_epoch_is_kept(make_job):
    job = make_job(3)
    options = dict(quorum=1, staleness=None)
    server = job.server(pause=1.0, checkpoint_every=TIMEOUT)
    stopped, worker = job.worker(**options), job.worker(pause=0.4, **options)
    job.steps_more([stopped, worker], 2)
    stopped.send(signal.SIGSTOP)
    job.until(lambda: len(worker.states[-1].members) == 2)
    job.steps_more([worker], 2)
    stopped.kill()
    job.stop()
    assert (server.error, worker.error) == ("", "")
    pairs = {(state.version, state.digest) for state in worker.states}
    assert len(pairs) == len({version for version, _ in pairs})


def test_a_worker_that_stands_still_is_left_out_and_joins_again(make_job):
    job = make_job(4)
    server, workers = job.server(), [job.worker() for _ in range(3)]
    job.steps_more(workers)
    workers[0].send(signal.SIGSTOP)
    job.steps_more(workers[1:])
    assert len(workers[1].states[-1].members) == 3
    workers[0].send(signal.SIGCONT)
    job.until(lambda: len(workers[0].states[-1].members) == len(workers[1].states[-1].members) == 4)
    job.steps_more(workers)
    job.stop()
    assert [member.error for member in [server, *workers]] == [""] * 4
    agree(workers)


@pytest.mark.parametrize("options", [{}, dict(quorum=1, staleness=None)], ids=["synchronous", "asynchronous"])
def test_a_server_that_stands_still_is_replaced(make_job, options):
    job = make_job(4)
    servers, workers = [job.server(), job.server()], [job.worker(**options) for _ in range(2)]
    job.until(lambda: len(list(job.folder.glob("*.pt"))) == 2)
    job.steps_more(workers)
    servers[0].send(signal.SIGSTOP)
    spare = job.server()
    had = len(workers[0].states)
    job.until(lambda: len(workers[0].states) > had and len(workers[0].states[-1].members) == 4)
    job.steps_more(workers)
    servers[0].send(signal.SIGCONT)  # it is a spare one now
    job.until(lambda: len(workers[0].states[-1].members) == 5)
    job.steps_more(workers)
    job.stop()
    assert [member.error for member in [*servers, spare, *workers]] == [""] * 5
    agree(workers if not options else [])


def test_the_first_member_is_lost_while_the_store_waits(make_job):
    job = make_job(4)
    workers = [job.worker(), job.worker()]
    servers = [job.server(), job.server()]
    job.until(lambda: len(list(job.folder.glob("*.pt"))) == 2)
    job.steps_more(workers)
    workers.sort(key=lambda worker: worker.states[-1].number)
    servers[1].kill()
    job.wait(SILENT + 3)
    workers[0].kill()
    back = job.server()
    job.steps_more(workers[1:])
    job.stop()
    assert [member.error for member in [servers[0], back, workers[1]]] == ["", "", ""]


def test_a_spare_server_goes_on_when_all_others_are_lost(make_job):
    job = make_job(2)
    server, worker = job.server(), job.worker()
    job.until(lambda: len(list(job.folder.glob("*.pt"))) == 1)
    job.steps_more([worker])
    spare = job.server()
    job.until(lambda: len(worker.states[-1].members) == 3)
    server.kill()
    worker.kill()
    joined = job.worker()
    job.steps_more([joined])
    job.stop()
    assert (spare.error, joined.error) == ("", "")
