"""Small runs of the benchmark membership: what it measures, and that its checks can fail."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import commands
import pytest
from ranks import run_ranks

from benchmarks.membership_processes import Step
from benchmarks.membership_ranks import DILOCO, STORE, Change, Job, Member, Wrong, check_newcomer, measure

pytestmark = pytest.mark.needs("matplotlib", "rich")


def test_members_are_killed_and_others_join(tmp_path: Path) -> None:
    done = commands.benchmarks("membership", "--quick", "--ranks", 3, "--kills", 2, "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[dict[str, Any]] = json.loads((tmp_path / "out.json").read_text())["cases"]["membership"]["rows"]
    assert [(row["workload"], row["side"]) for row in rows] == [
        ("member killed", "DiLoCo, int4"),
        ("member joins", "DiLoCo, int4"),
        ("worker killed", "store, 2 servers"),
        ("worker joins", "store, 2 servers"),
        ("server killed", "store, 2 servers"),
    ]
    for row in rows:
        assert row["correct"], row["check"]
        figures = row["figures"]
        assert len(row["samples"]) == 2 and figures["worst s"] == max(row["samples"]) > 0
        assert figures["worst gap s"] >= figures["gap s"] > 0 < figures["usual s"]
    assert [row["figures"]["lost"] for row in rows[:4]] == [0] * 4


def changes_of(rank: int, ranks: int, job: Job) -> list[Change]:
    return list(measure(rank, ranks, lambda *_: None, [job]))


def test_ranks_share_what_their_members_report() -> None:
    first, second = run_ranks(2, changes_of, Job(STORE, members=3, width=16, times=1))
    assert first == second and [change.what for change in first] == ["worker killed", "worker joins", "server killed"]
    assert all(len(change.seconds) == 1 and not change.wrong for change in first)


def step(ended: float, version: int, digest: str = "bits", epoch: int = 1, lost: int = 0) -> Step:
    return Step(ended - 0.25, ended, epoch, version, digest, lost)


def test_the_longest_time_between_two_steps_is_that_around_the_change() -> None:
    change = Change("member killed", DILOCO)
    steps = {0: [step(1.0, 1), step(4.0, 2), step(5.0, 3, lost=2)], 2: [step(4.25, 2), step(5.5, 3, lost=3)]}
    change.enter(4.5, 5.5, steps)
    assert (change.seconds, change.gaps, change.lost) == ([1.0], [1.25], [3])


def test_members_that_differ_are_wrong() -> None:
    change = Change("member killed", DILOCO)
    with pytest.raises(Wrong, match="member 1 has other parameters than others at version 2"):
        change.enter(0.0, 3.0, {0: [step(1.0, 1), step(2.0, 2)], 1: [step(1.0, 1), step(2.0, 2, "others")]})
    assert not change.seconds


def test_a_newcomer_that_has_taken_what_no_other_has_is_wrong() -> None:
    steps = {0: [step(1.0, 3), step(2.0, 4)], 2: [step(1.5, 4)]}
    check_newcomer(step(2.5, 4), steps)
    for newcomer in (step(2.5, 5), step(2.5, 4, "others"), step(2.5, 4, epoch=2)):
        with pytest.raises(Wrong, match=f"what a newcomer has at version {newcomer.version}"):
            check_newcomer(newcomer, steps)


def test_a_process_that_fails_is_wrong() -> None:
    member = Member(partial(int, "no number"))
    with pytest.raises(Wrong, match="it has raised: ValueError: invalid literal"):
        member.next()
    member.end()


@pytest.mark.parametrize("bad", [["--only", "everything"], ["--kills", "0"], ["--ranks", "1"]])
def test_a_bad_option_is_refused(bad: list[str]) -> None:
    done = commands.benchmarks("membership", "--quick", *bad)
    assert done.returncode != 0
    assert bad[0].removeprefix("--") in done.stdout + done.stderr
