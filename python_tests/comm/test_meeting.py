"""How ranks wait for each other at the store."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from dltrain_ext.comm.meeting import Meetings

SHORT = timedelta(seconds=2)


def together(*bodies, timeout=SHORT):
    """What each body returns, or raises, given the meetings of its rank; the ranks are 5, 6, ..."""
    store, ranks = dist.HashStore(), [5 + member for member in range(len(bodies))]

    def call(member):
        try:
            return bodies[member](Meetings(store, ranks, member, timeout))
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(call, range(len(bodies))))


def test_texts_are_shared_in_the_order_of_the_ranks():
    say = [lambda meetings, r=r: [meetings.share(f"{r} {turn}") for turn in range(3)] for r in range(4)]
    assert together(*say) == [[[f"{r} {turn}" for r in range(4)] for turn in range(3)]] * 4


def test_who_does_not_come_is_named():
    said = together(lambda meetings: meetings.share(""), lambda meetings: None)[0]
    assert str(said) == "communicator of ranks [5, 6]: rank 6 did not come in 0:00:02"


def test_who_is_at_work_is_waited_for():
    def think(meetings):
        with meetings.at_work():
            time.sleep(1.5 * SHORT.total_seconds())
            return meetings.share("thought")

    def wait(meetings):
        with meetings.at_work():
            return meetings.share("waited")

    assert together(think, wait) == [["thought", "waited"]] * 2


def test_who_is_gone_is_named_and_not_who_is_slow():
    def agree(meetings, seconds):
        with meetings.at_work() as work:
            time.sleep(seconds)
            return work.part("done").agree("yes")

    def slow(meetings):
        return agree(meetings, 1.5 * SHORT.total_seconds())

    def waiting(meetings):
        return agree(meetings, 0)

    for said in together(slow, waiting, lambda meetings: None)[:2]:
        assert str(said).endswith("communicator of ranks [5, 6, 7]: rank 7 did not come in 0:00:02")


@pytest.mark.parametrize(
    ("error", "said"), [(ValueError("no memory"), "no memory"), (KeyboardInterrupt(), "KeyboardInterrupt")]
)
def test_who_fails_at_work_is_heard_of_at_once(error, said):
    def fail(meetings):
        with pytest.raises(type(error)), meetings.at_work():
            raise error
        return meetings.share("after")

    def wait(meetings):
        with pytest.raises(dist.DistBackendError) as raised, meetings.at_work():
            meetings.share("")
        assert str(raised.value) == f"communicator of ranks [5, 6]: rank 6 failed: {said}"
        return meetings.share("after")

    assert together(wait, fail, timeout=timedelta(hours=1)) == [["after", "after"]] * 2
