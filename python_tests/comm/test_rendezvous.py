"""Rendezvous: how ranks wait for each other at the store."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from dltrain_ext.comm.rendezvous import Rendezvous

SHORT = timedelta(seconds=2)


def together(*bodies, timeout=SHORT):
    """Call each body with the rendezvous of its rank; return their results or errors. The ranks are 5, 6, ..."""
    store, ranks = dist.HashStore(), [5 + member for member in range(len(bodies))]

    def call(member):
        try:
            return bodies[member](Rendezvous(store, ranks, member, timeout))
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(call, range(len(bodies))))


def test_texts_are_exchanged_in_the_order_of_the_ranks():
    say = [lambda rendezvous, r=r: [rendezvous.exchange(f"{r} {turn}") for turn in range(3)] for r in range(4)]
    assert together(*say) == [[[f"{r} {turn}" for r in range(4)] for turn in range(3)]] * 4


def test_the_error_names_the_ranks_that_do_not_arrive():
    def come(rendezvous):
        return rendezvous.exchange("")

    def miss(rendezvous):
        return None

    assert str(together(come, miss)[0]) == "communicator of ranks [5, 6]: rank 6 did not come in 0:00:02"
    for said in together(miss, come, miss, come)[1::2]:
        assert str(said) == "communicator of ranks [5, 6, 7, 8]: ranks 5, 7 did not come in 0:00:02"


def test_a_rank_at_work_is_waited_for():
    def think(rendezvous):
        with rendezvous.at_work():
            time.sleep(1.5 * SHORT.total_seconds())
            return rendezvous.exchange("thought")

    def wait(rendezvous):
        with rendezvous.at_work():
            return rendezvous.exchange("waited")

    assert together(think, wait) == [["thought", "waited"]] * 2


def test_the_error_names_the_rank_that_is_gone_and_not_a_slow_one():
    def agree(rendezvous, seconds):
        with rendezvous.at_work() as work:
            time.sleep(seconds)
            return work.part("done").agree("yes")

    def slow(rendezvous):
        return agree(rendezvous, 1.5 * SHORT.total_seconds())

    def waiting(rendezvous):
        return agree(rendezvous, 0)

    for said in together(slow, waiting, lambda rendezvous: None)[:2]:
        assert str(said).endswith("communicator of ranks [5, 6, 7]: rank 7 did not come in 0:00:02")


@pytest.mark.parametrize(
    ("error", "said"), [(ValueError("no memory"), "no memory"), (KeyboardInterrupt(), "KeyboardInterrupt")]
)
def test_a_rank_that_fails_at_work_is_reported_at_once(error, said):
    def fail(rendezvous):
        with pytest.raises(type(error)), rendezvous.at_work():
            raise error
        return rendezvous.exchange("after")

    def wait(rendezvous):
        with pytest.raises(dist.DistBackendError) as raised, rendezvous.at_work():
            rendezvous.exchange("")
        assert str(raised.value) == f"communicator of ranks [5, 6]: rank 6 failed: {said}"
        return rendezvous.exchange("after")

    assert together(wait, fail, timeout=timedelta(hours=1)) == [["after", "after"]] * 2


# The thread that clears the store is slowed down, so that it is still using the store when the process ends.
ENDS_AT_ONCE = """
import time
from datetime import timedelta
import torch.distributed as dist
from dltrain_ext.comm.rendezvous import JointWork, Rendezvous

leave = JointWork._leave

def slow_leave(self):
    end = time.monotonic() + 1
    while time.monotonic() < end:
        self._own.check(["x"])
    leave(self)
    print("left")

JointWork._leave = slow_leave
store = dist.TCPStore("localhost", 0, is_master=True)
with Rendezvous(store, [0], 0, timedelta(seconds=10)).at_work():
    pass
"""


def test_a_process_may_end_right_after_the_work():
    done = subprocess.run([sys.executable, "-c", ENDS_AT_ONCE], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "left\n"), done.stderr
