"""Ranks that are killed or stopped at any moment: all others raise in time and name the culprit; no result is wrong."""

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import cluster, wait_for
from contributions import LOSSY, fitting
from ranks import DEADLINE, FAR, ROOT, SILENCE, SLACK, finish_before, join_group, ready, run_ranks, store_of_first

from dltrain_ext import comm

AT_ONCE = 4  # groups at the same time
CULPRIT = re.compile(
    r"the culprit is rank (\d+): (it has left|it does not answer) \(found by rank \d+ in round \d+ of call \d+\)"
)
SAID = {signal.SIGKILL: "it has left", signal.SIGSTOP: "it does not answer"}


def cases(algorithm):
    """Codec, elements, segments, and the number of concurrent calls."""
    yield from (("raw", 10, 1, 1), ("raw", 40_000, 5, 1), ("raw", 3_000, 1, 3))
    if algorithm in fitting(LOSSY[0]):
        yield from (("int8", 2_000, 1, 1), ("int8", 40_000, 3, 2))


def reduce(communicator, rank, world_size, algorithm, codec, numel, segments, at_once):
    """Return multiples of 127, which are exact in int8."""
    tensors = [torch.full((numel,), 127.0 * (rank + i + 1)) for i in range(at_once)]
    works = [
        communicator.all_reduce(
            tensor, algorithm=algorithm, codec=codec, segments=segments or None, async_op=at_once > 1
        )
        for tensor in tensors
    ]
    for work in works:
        if work:
            work.wait()
    for i, tensor in enumerate(tensors):
        total = 127.0 * sum(r + i + 1 for r in range(world_size))
        assert torch.equal(tensor, torch.full((numel,), total)), f"wrong: {tensor} is not {total}"


def endure(rank, world_size, algorithm, deadline, per_host, transport):
    """All-reduce until a call fails; return the error and its time."""
    communicator = comm.Communicator(
        timeout=deadline, ranks_per_host=per_host, answer_timeout=SILENCE, transport=transport
    )
    kinds = list(cases(algorithm))
    for kind in kinds:
        reduce(communicator, rank, world_size, algorithm, *kind)
    ready()
    try:
        while True:
            for kind in kinds:
                reduce(communicator, rank, world_size, algorithm, *kind)
    except dist.DistBackendError as error:
        failed = time.monotonic()
        with pytest.raises(dist.DistBackendError, match="the culprit is rank"):  # further calls fail at once
            communicator.all_reduce(torch.ones(1))
        return str(error), failed


def strike(world_size, algorithm, how, victim, after, transport="auto", *, hosted=False, per_host=1):
    """Have the victim die `after` seconds after all ranks have begun; return the seconds until the last has failed."""
    struck = []

    def hit(processes):
        time.sleep(after)
        struck.append(time.monotonic())
        os.kill(processes[victim], how)

    deadline = DEADLINE if how == signal.SIGSTOP else FAR
    results = run_ranks(
        world_size, endure, algorithm, deadline, per_host, transport, dying=(victim,), hosted=hosted, when_ready=hit
    )
    gone = time.monotonic()
    del results[victim]
    for text, _ in results:
        named = CULPRIT.search(text)
        assert named, text
        assert (int(named[1]), named[2]) == (victim, SAID[how]), text
        assert text.startswith("all_reduce "), text
    last = max(failed for _, failed in results)
    took = last - struck[0]
    assert took < (DEADLINE.total_seconds() if how == signal.SIGSTOP else 0) + SLACK
    assert gone - last < SLACK
    return took


def print_summary(what, took, ways):
    for how in SAID:
        seconds = [each for each, way in zip(took, ways, strict=True) if way == how]
        print(f"{what}: {len(seconds)} x {how.name}: {min(seconds):.2f} to {max(seconds):.2f} s")


@pytest.mark.parametrize("moments", [1, pytest.param(8, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("algorithm", [*comm.ALGORITHMS, "native"])
def test_the_culprit_is_named_on_all_ranks_in_time(algorithm, moments):
    """Test this number of moments for each number of ranks and each way to die."""
    chance = random.Random(algorithm)
    transports = itertools.cycle(("shm", "gloo", "gloo", "shm"))
    faults = [
        (world_size, algorithm, how, chance.randrange(world_size), chance.uniform(0, 0.05), next(transports))
        for world_size in (2, 3, 4, 5)
        for how in (signal.SIGKILL, signal.SIGSTOP)
        for _ in range(moments)
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        took = list(pool.map(lambda fault: strike(*fault), faults))
    print_summary(algorithm, took, [fault[2] for fault in faults])


@pytest.mark.parametrize("how", SAID)
def test_the_culprit_is_named_in_two_levels(how):
    chance = random.Random(how)
    for victim in range(4):
        strike(4, "ring", how, victim, chance.uniform(0, 0.05), per_host=2)


def begin_again(rank, world_size, tunes, deadline):
    """Make and close communicators until this fails; return the error and its time."""
    for turn in itertools.count():
        try:
            communicator = comm.Communicator(timeout=deadline, answer_timeout=SILENCE)
            if tunes:
                communicator.tune(seconds=0.05, codecs=())
            communicator.all_reduce(torch.ones(10))
            communicator.close()
        except dist.DistBackendError as error:
            return str(error), time.monotonic()
        if turn == 0:
            ready()


def strike_at_the_beginning(how, tunes, victim, after):
    struck = []

    def hit(processes):
        time.sleep(after)
        struck.append(time.monotonic())
        os.kill(processes[victim], how)

    results = run_ranks(3, begin_again, tunes, DEADLINE, dying=(victim,), when_ready=hit)
    del results[victim]
    took = max(failed for _, failed in results) - struck[0]
    for text, _ in results:
        # One that waits in its call for the victim may be missing, too, where the other makes the next communicator.
        named = re.search(r"the culprit is rank (\d+): |: ranks? ([\d, ]+) did not come in ", text)
        assert named and str(victim) in re.findall(r"\d+", named[1] or named[2]), text
    assert took < 2 * DEADLINE.total_seconds() + SLACK
    return took


@pytest.mark.parametrize("moments", [1, pytest.param(16, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("tunes", [False, True], ids=["making", "tuning"])
def test_a_rank_lost_while_making_tuning_or_closing_is_named(tunes, moments):
    chance = random.Random(tunes)
    faults = [(how, tunes, v, chance.uniform(0, 1)) for how in SAID for v in range(3) for _ in range(moments)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        took = list(pool.map(lambda fault: strike_at_the_beginning(*fault), faults))
    print_summary("tuning" if tunes else "making and closing", took, [fault[0] for fault in faults])


@pytest.mark.parametrize("how", SAID)
def test_the_dead_rank_was_host_of_the_store(how):
    strike(3, "ring", how, 0, 0.01, hosted=True)


def go_on(rank, world_size, how, victim, where, hosted):
    communicator = comm.Communicator(timeout=DEADLINE, answer_timeout=SILENCE)
    reduce(communicator, rank, world_size, "ring", "int8", 1000, 1, 1)
    finish_before(victim, *range(world_size))
    if rank == victim:
        os.kill(os.getpid(), how)
    with pytest.raises(dist.DistBackendError, match=f"the culprit is rank {victim}: {SAID[how]}"):
        reduce(communicator, rank, world_size, "ring", "int8", 1000, 1, 1)
    dist.destroy_process_group()

    survivors = [each for each in range(world_size) if each != victim]
    store: dist.Store = dist.FileStore(where, len(survivors))
    if hosted:
        store = store_of_first(store, survivors.index(rank))
    join_group(store, survivors.index(rank), len(survivors))
    communicator = comm.Communicator(timeout=FAR)
    for algorithm in comm.ALGORITHMS:
        reduce(communicator, survivors.index(rank), len(survivors), algorithm, "raw", 1000, 3, 2)


@pytest.mark.parametrize("how", SAID)
@pytest.mark.parametrize("hosted", [False, True], ids=["file", "hosted"])
def test_survivors_make_a_new_group_in_the_same_processes(tmp_path, hosted, how):
    """This has to work although the dead rank was the host of the old store."""
    run_ranks(4, go_on, how, 0, str(tmp_path / "store"), hosted, dying=(0,), hosted=True)


def test_the_example_continues():
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "survivors.py"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"\d: 3 ranks add up", done.stdout)) == 3, done.stdout
    assert len(re.findall(r"the culprit is rank 2: it has left", done.stdout)) == 3, done.stdout


def endure_over_links(folder):
    """All-reduce until rank 0 finds the file that asks it to stop, or until a call fails."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    communicator = comm.Communicator(timeout=DEADLINE, ranks_per_host=1)
    error = ""
    try:
        stop = torch.zeros(1)
        while not stop:
            for algorithm in comm.ALGORITHMS:
                reduce(communicator, rank, world_size, algorithm, "raw", 40_000, 3, 2)
            Path(folder, f"began {rank}").touch()
            stop = torch.tensor([float(rank == 0 and Path(folder, "stop").exists())])
            communicator.all_reduce(stop)
    except dist.DistBackendError as caught:
        error = str(caught)
    Path(folder, f"error {rank}").write_text(error)
    dist.destroy_process_group()


@pytest.mark.needs("rich")
@pytest.mark.xdist_group("machine")
@pytest.mark.parametrize("seconds", [0.3, DEADLINE.total_seconds() + 2])
def test_a_link_that_goes_down_and_up(tmp_path, seconds):
    """The ranks either recover or fail, and no sum is wrong."""
    with cluster(3, f"import test_fault_sweep as test; test.endure_over_links({str(tmp_path)!r})") as hosts:
        wait_for(*(tmp_path / f"began {rank}" for rank in range(3)))
        hosts.set_link(1, "down")
        time.sleep(seconds)
        hosts.set_link(1, "up")
        Path(tmp_path, "stop").touch()
        assert [rank.wait(120) for rank in hosts.ranks] == [0, 0, 0]
    errors = [Path(tmp_path, f"error {rank}").read_text() for rank in range(3)]
    if seconds > DEADLINE.total_seconds():
        assert all("the culprit is rank 1: it does not answer" in errors[rank] for rank in (0, 2)), errors
        assert re.search("the culprit is rank [02]: it does not answer", errors[1]), errors  # as seen by that rank
    else:
        assert all(not error or "the culprit is rank" in error for error in errors), errors
