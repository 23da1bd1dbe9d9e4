"""The store: keys, clocks, staleness, codecs, and errors that name what is wrong."""

import math
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import FAR, run_ranks

from dltrain_ext import codecs, optim, ps

SHAPES = {"large": (700, 1001), "vector": (37,), "scalar": (), "empty": (0, 3), "half": (64, 33)}
DTYPES = {"half": torch.bfloat16}


def initial(rank):
    generator = torch.Generator().manual_seed(rank)
    return {name: torch.randn(shape, generator=generator).to(DTYPES.get(name)) for name, shape in SHAPES.items()}


def make(**options):
    store, values = ps.Store(timeout=FAR, **options), initial(dist.get_rank())
    store.init(values)
    for name, value in initial(0).items():
        assert torch.equal(values[name], value), name
    return store, values


def pushes_are_added_and_averaged(rank, world_size):
    store, values = make()
    for clock in range(3):
        given = {name: torch.full(shape, float(rank + clock)) for name, shape in SHAPES.items()}
        push = store.push(given, clock)
        for tensor in given.values():
            tensor.fill_(torch.nan)  # it is sent from a copy
        pull = store.pull(values, clock + 1)
        pull.wait()
        assert push.wait() and push.is_completed() and pull.is_completed()
        assert pull.versions == (clock + 1, clock + 1, False)
    mean = (world_size - 1) / 2
    for name, first in initial(0).items():
        expected = (first.float() + sum(mean + clock for clock in range(3))).to(first.dtype)
        torch.testing.assert_close(values[name], expected, msg=name)
    store.close()
    return {name: value.float() for name, value in values.items()}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_pushes_are_added_and_averaged(world_size):
    first, *others = run_ranks(world_size, pushes_are_added_and_averaged)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def pushed_and_pulled_at_once(rank, world_size, quorum):
    store, values = make(quorum=quorum, staleness=0)
    vector = {"vector": values["vector"]}
    for clock in range(3):
        work = store.push_pull({"vector": torch.full((37,), float(rank))}, vector)
        work.wait()
        if quorum == "all":
            assert work.versions == (clock + 1, clock + 1, False)
    total = sum(range(world_size)) / (world_size if quorum == "all" else 1)
    dist.barrier()
    store.pull(vector).wait()
    torch.testing.assert_close(vector["vector"], initial(0)["vector"] + 3 * total)
    rest = {name: value for name, value in values.items() if name != "vector"}
    store.push_pull({name: torch.ones(SHAPES[name]) for name in rest}, rest).wait()
    dist.barrier()
    stats = store.stats()
    with pytest.raises(ValueError, match="into: expected the keys of values"):
        store.push_pull(vector, rest)
    store.close()
    return stats


@pytest.mark.parametrize("quorum", ["all", 1])
def test_a_push_and_a_pull_at_once(quorum):
    every = run_ranks(3, pushed_and_pulled_at_once, quorum)
    elements = sum(math.prod(shape) for shape in SHAPES.values())
    # A server holds its values and their sum, and in synchronous mode the answers that it has sent.
    assert 2 * 4 * elements <= sum(stats["bytes"] for stats in every) <= 4 * 4 * elements
    assert all(set(stats["pushes"].values()) <= {1, 3} and len(stats["pushes"]) == 3 for stats in every)


def some_ranks_serve(rank, world_size, servers):
    if rank in servers[-1:]:
        return ps.serve(timeout=FAR)
    store, values = make(servers=servers)
    store.push({"vector": torch.ones(37)})  # not all keys
    store.pull({"vector": values["vector"]}).wait()
    assert torch.equal(values["vector"], initial(0)["vector"] + 1)
    assert store.pull({"large": values["large"]}, clock=0).wait()
    store.close()


@pytest.mark.parametrize("servers", [[2], [0, 2], [1, 2]])
def test_some_ranks_serve(servers):
    run_ranks(3, some_ranks_serve, servers)


def readers_wait_as_staleness_says(rank, world_size):
    """Rank 1 pushes only when it is told to."""
    store, values = make(quorum=1, staleness=2)
    vector = {"vector": torch.ones(37)}
    into = {"vector": values["vector"]}
    if rank == 1:
        dist.barrier()
        dist.barrier()
        store.push(vector).wait()
        dist.barrier()
    else:
        for clock in range(1, 3):
            store.push(vector)
            assert store.pull(into).wait()
            torch.testing.assert_close(into["vector"], initial(0)["vector"] + clock)  # its own pushes are read
        store.push(vector)
        late = store.pull(into)
        dist.barrier()
        with pytest.raises(
            dist.DistBackendError, match=r"pull of clock 3: not complete after 0.2 s: .* waits for pushes of rank 1"
        ):
            late.wait(timedelta(seconds=0.2))
        assert store.pull(into, staleness=None).wait() and not late.is_completed()
        dist.barrier()
        late.wait()
        torch.testing.assert_close(into["vector"], initial(0)["vector"] + 4)
        dist.barrier()
    store.close()


def test_readers_wait_as_staleness_says():
    run_ranks(2, readers_wait_as_staleness_says)


def what_a_codec_loses_comes_back(rank, world_size, codec, quorum):
    """Pulls converge to the servers' values, and pushes lose nothing for ever."""
    store, values = make(codec=codec, quorum=quorum, staleness=0)
    generator = torch.Generator().manual_seed(7)
    given = {"large": torch.randn(SHAPES["large"], generator=generator)}
    into = {"large": values["large"]}
    errors = []
    for clock in range(1, 9):
        store.push(given)
        store.pull(into).wait()
        share = 1 if quorum == "all" else world_size
        errors.append(float((into["large"] - initial(0)["large"] - clock * share * given["large"]).norm()))
    store.close()
    return errors, into["large"]


@pytest.mark.parametrize("quorum", ["all", 1])
@pytest.mark.parametrize("codec", ["fp16", "int8", "int4"])
def test_what_a_codec_loses_comes_back(codec, quorum):
    (errors, first), (_, second) = run_ranks(2, what_a_codec_loses_comes_back, codec, quorum)
    if quorum == "all":
        assert torch.equal(first, second)
    assert errors[-1] < 3 * errors[0]  # it does not grow with the number of steps


def is_refused(rank, world_size):
    raises = pytest.raises
    for argument, given in (
        ("quorum", 0),
        ("codec", "int3"),
        ("pull_codec", 7),
        ("staleness", -1),
        ("delay_compensation", 0.1),
        ("window", -1),
    ):
        with raises(ValueError, match=f"{argument}: expected"):
            ps.Store(**{argument: given})
    with raises(TypeError, match="optimizer: expected a class of dltrain_ext.optim"):
        ps.Store(optimizer="AdamW")
    with raises(ValueError, match="optimizer: expected one of .*AdamW.* of dltrain_ext.optim, got SGLD"):
        ps.Store(optimizer=optim.SGLD)
    with raises(RuntimeError, match="call init first"):
        ps.Store().push({"a": torch.ones(1)})
    with raises(TypeError, match=r"values\['a'\]: expected float32, float16 or bfloat16, got torch.int64"):
        ps.Store().init({"a": torch.ones(1, dtype=torch.int64)})
    with raises(ValueError, match="servers: expected different ranks below 2, got"):
        ps.Store(servers=[2]).init({"a": torch.ones(1)})
    with raises(ValueError, match=r"keys: expected the same on all ranks"):
        ps.Store(timeout=FAR).init({"a": torch.ones(1 + rank)})
    store, values = make()
    for what, name, tensor, text in (
        (store.push, "unknown", torch.ones(1), "values: expected keys of the store, got 'unknown'"),
        (store.pull, "vector", torch.ones(36), r"into\['vector'\]: expected shape \[37\], got \[36\]"),
        (store.push, "vector", [1.0], r"values\['vector'\]: expected a tensor, got list"),
    ):
        with raises((TypeError, ValueError), match=text):
            what({name: tensor})
    with raises(ValueError, match=r"clock: expected the number of earlier pushes, \[0\], got 3"):
        store.push(values, 3)
    with raises(ValueError, match="clock: expected at most the number of pushes, 0, got 1"):
        store.pull(values, 1)
    store.close()
    store.close()
    with raises(dist.DistBackendError, match="the store is closed"):
        store.push(values)


def test_wrong_arguments_are_named():
    run_ranks(2, is_refused)


def counts_a_push_that_is_interrupted(rank, world_size):
    """Ctrl-C comes when everything has been sent. The next push is not taken for the same one."""
    store, values = make()
    vector, node = {"vector": torch.ones(37)}, store._node

    def push(*args, **options):
        node.push(*args, **options)
        raise KeyboardInterrupt

    with mock.patch.object(store, "_node", SimpleNamespace(push=push)), pytest.raises(KeyboardInterrupt):
        store.push(vector)
    store.push(vector)
    store.pull({"vector": values["vector"]}).wait()
    torch.testing.assert_close(values["vector"], initial(0)["vector"] + 2)
    store.close()


def test_a_push_that_is_interrupted_counts():
    run_ranks(2, counts_a_push_that_is_interrupted)


def refuses_a_push_while_it_closes(rank, world_size):
    """Rank 0 serves, and its store waits for that of rank 1 to close."""
    store, values = make()
    if rank == 0:
        closing = threading.Thread(target=store.close)
        closing.start()
        while not store._is_closing:
            time.sleep(0.001)
        with pytest.raises(dist.DistBackendError, match="the store is closed"):
            store.push(values)
    dist.barrier()
    if rank == 0:
        closing.join()
    else:
        store.close()


def test_a_store_that_closes_takes_no_push():
    run_ranks(2, refuses_a_push_while_it_closes)


def bytes_are_divided(rank, world_size):
    store, _ = make()
    sizes = [0] * world_size
    for block in store._blocks:
        sizes[block.server] += block.numel
    store.close()
    return sizes


def test_servers_have_about_as_many_elements():
    (sizes, *_) = run_ranks(3, bytes_are_divided)
    assert max(sizes) - min(sizes) <= ps.layout.LARGEST, sizes


def a_wait_ends_with_the_peers(rank, world_size):
    """A worker that closes its store ends what waits for it, by name."""
    store, values = make()
    if rank == 0:
        store.push(values)
        pull = store.pull(values)
        with pytest.raises(dist.DistBackendError, match="rank 1 has left: it has closed its store"):
            pull.wait()
    else:
        threading.Timer(0.2, lambda: None).start()
        time.sleep(0.2)
    store.close()


def test_a_wait_ends_with_the_peers():
    run_ranks(2, a_wait_ends_with_the_peers)


def test_codecs_of_the_store_are_those_of_the_package():
    assert {"raw", "int8"} <= set(codecs.CODECS)
