"""Mailboxes over Gloo: messages of any length from any rank, and sessions that end independently of each other."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import FAR, SLACK, await_stop, ready, run_ranks

from dltrain_ext import _C, comm

# A frame holds up to 589,632 bytes; the receiver copies up to 262,144 of them, and else uses the frame's memory.
FIRST_LENGTHS = [0, 1, 1000, 1 << 18, (1 << 18) + 1, 589_632, 589_633, (3 << 20) + 5, 17]


def open_mailbox(name="mailbox", **options):
    """Open a mailbox on a process group of its own."""
    store = dist.PrefixStore(name, dist.group.WORLD.get_group_store())
    timeout = timedelta(seconds=60)
    return _C.Mailbox(dist.ProcessGroupGloo(store, dist.get_rank(), dist.get_world_size(), timeout), **options)


def pattern(length, seed):
    return (torch.arange(length) * 31 + seed).to(torch.uint8)


def receive(mailbox):
    received = mailbox.receive(SLACK + 60)
    assert received is not None, "nothing was received"
    return received


def receive_messages(mailbox, count):
    """Receive `count` messages; return them by sender, and the sessions that have ended meanwhile."""
    messages, ends = {}, {}
    while sum(map(len, messages.values())) < count:
        peer, what = receive(mailbox)
        if isinstance(what, torch.Tensor):
            messages.setdefault(peer, []).append(what)
        else:
            assert peer not in ends
            ends[peer] = what
    return messages, ends


def receive_end(mailbox, peer):
    """Return the end of the session with the peer, and discard the messages before it."""
    while True:
        sender, what = receive(mailbox)
        assert sender == peer
        if isinstance(what, _C.SessionEnd):
            return what


def send_all(mailbox, peer, tensors, **options):
    """Send the tensors; wait while the peer does not receive."""
    while not mailbox.send(peer, tensors, **options):
        time.sleep(0.01)


def exchange(mailbox, peers, seed):
    """Exchange one message with each of the peers."""
    for peer in peers:
        send_all(mailbox, peer, [pattern(100_000, seed + mailbox.rank)])
    messages, ends = receive_messages(mailbox, len(peers))
    assert not ends and messages.keys() == set(peers)
    for peer, (message,) in messages.items():
        assert torch.equal(message, pattern(100_000, seed + peer))


def send_variable_lengths(rank, world_size, copy):
    mailbox = open_mailbox()
    assert (mailbox.rank, mailbox.world_size) == (rank, world_size)
    generator = torch.Generator().manual_seed(1)
    lengths = FIRST_LENGTHS + torch.randint(0, 300_000, (60,), generator=generator).tolist()
    if rank > 0:
        for number, length in enumerate(lengths):
            send_all(mailbox, 0, [pattern(length, rank + number)], copy=copy)
    else:
        messages, ends = receive_messages(mailbox, len(lengths) * (world_size - 1))
        assert not ends and messages.keys() == set(range(1, world_size))
        for peer, each in messages.items():
            for number, (length, message) in enumerate(zip(lengths, each, strict=True)):
                assert torch.equal(message, pattern(length, peer + number)), (peer, number, length)
        for peer in messages:
            assert mailbox.send(peer, [torch.tensor([peer])])
    if rank > 0:
        messages, _ = receive_messages(mailbox, 1)
        assert messages[0][0].view(torch.int64).item() == rank
    assert mailbox.send(rank, [pattern(10, 0), pattern(200_000, 1)])
    own, _ = receive_messages(mailbox, 1)
    assert torch.equal(own[rank][0], torch.cat([pattern(10, 0), pattern(200_000, 1)]))
    mailbox.close()
    with pytest.raises(dist.DistBackendError, match="the mailbox is closed"):
        mailbox.receive()
    with pytest.raises(dist.DistBackendError, match="the mailbox is closed"):
        mailbox.send(1 - min(rank, 1), [])


@pytest.mark.parametrize("copy", [True, False])
def test_messages_of_any_length_from_several_senders_at_once(copy):
    run_ranks(4, send_variable_lengths, copy)


def send_pieces(rank, world_size):
    mailbox = open_mailbox()
    cases = [
        [pattern(100, 0), pattern(0, 1), pattern(200, 2)],  # these fit into one frame
        [pattern(100_000, 3), pattern(0, 4), pattern(1, 5), pattern(70_000, 6)],  # each is a message of its own
        [pattern(5_000, i) for i in range(40)],  # these are gathered
        [torch.full((50_000,), 1.5), torch.arange(3)],
    ]
    for case in cases:
        for copy in (True, False):
            if rank == 1:
                send_all(mailbox, 0, case, copy=copy)
            else:
                sender, message = receive(mailbox)
                assert sender == 1 and torch.equal(message, torch.cat([each.view(torch.uint8) for each in case]))
    if rank == 1:
        changed = torch.ones(100_000)
        send_all(mailbox, 0, [changed])
        changed.zero_()  # it has been copied
        for wrong in (torch.ones(4, 4).t()[1:], torch.ones(4, device="meta")):
            with pytest.raises(ValueError, match="expected contiguous tensors on the CPU"):
                mailbox.send(0, [wrong])
        with pytest.raises(ValueError, match="peer: expected a rank below 2, got 2"):
            mailbox.send(2, [])
    else:
        assert torch.equal(receive(mailbox)[1].view(torch.float32), torch.ones(100_000))
    mailbox.close()


def test_pieces_are_one_message():
    run_ranks(2, send_pieces)


def close_in_order(rank, world_size):
    """Rank 1 closes after a large message, and its process continues; the others stay connected."""
    mailbox = open_mailbox()
    others = [each for each in range(world_size) if each not in (1, rank)]
    if rank == 1:
        for peer in (0, 2):
            assert mailbox.send(peer, [pattern(32 << 20, peer)], copy=False)
        mailbox.close(FAR.total_seconds())
    else:
        sender, message = receive(mailbox)
        assert sender == 1 and torch.equal(message, pattern(32 << 20, rank))
        sender, end = receive(mailbox)
        assert sender == 1 and isinstance(end, _C.SessionEnd) and end.in_good_order and not end.reason
        with pytest.raises(dist.DistBackendError, match="the session with rank 1 has ended"):
            mailbox.send(1, [torch.ones(1)])
    dist.barrier()
    if rank != 1:
        exchange(mailbox, others, 5)
        assert mailbox.receive(0.3) is None  # nothing else from rank 1
    dist.barrier()
    mailbox.close()


def test_a_mailbox_closes_in_good_order():
    run_ranks(3, close_in_order)


def let_threads_wait():
    """Have the other threads of this process run only while its main thread, on the same core, waits."""
    core = min(os.sched_getaffinity(0))
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            os.sched_setaffinity(thread, {core})
            if thread != os.getpid():
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def send_after_the_end(rank, world_size):
    """Rank 1 closes; rank 0 sends before its thread, which has received the end, can do anything else."""
    for turn in range(8):
        mailbox = open_mailbox(f"mailbox {turn}")
        exchange(mailbox, [1 - rank], turn)
        if rank == 0:
            let_threads_wait()
        dist.barrier()
        if rank == 1:
            mailbox.close(FAR.total_seconds())
        else:
            assert receive_end(mailbox, 1).in_good_order
            with pytest.raises(dist.DistBackendError, match="the session with rank 1 has ended"):
                mailbox.send(1, [torch.ones(1)])
        dist.barrier()
        mailbox.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the priority is one of Linux")
def test_nothing_is_sent_after_the_end_of_the_session():
    run_ranks(2, send_after_the_end, fresh=True)


def close_at_once(rank, world_size):
    """All ranks close at the same time, while messages are being sent."""
    for turn in range(5):
        mailbox = open_mailbox(f"mailbox {turn}")
        for peer in range(world_size):
            assert mailbox.send(peer, [pattern(500_000, turn)])
        dist.barrier()
        began = time.monotonic()
        mailbox.close(FAR.total_seconds())
        assert time.monotonic() - began < SLACK


def test_all_close_at_once():
    run_ranks(4, close_at_once)


def drop(rank, world_size):
    mailbox = open_mailbox()
    if rank == 1:
        del mailbox
        return
    end = receive_end(mailbox, 1)
    assert not end.in_good_order and end.reason
    mailbox.close()


def test_a_mailbox_that_is_dropped_looks_broken():
    run_ranks(2, drop)


def survive(rank, world_size, how):
    """Rank 1 dies while it is idle, or while it sends many small or large messages, very likely within a large one."""
    survivors = [0, 2, 3]
    communicator = comm.Communicator(dist.new_group(survivors)) if rank != 1 else None
    if rank == 1:
        dist.new_group(survivors)
    mailbox = open_mailbox()
    if rank == 1:
        exchange(mailbox, survivors, 1)
        dist.barrier()
        ready()
        message = torch.zeros({"idle": 0, "small": 5_000, "large": 64 << 20}[how], dtype=torch.uint8)
        while True:
            sent = how != "idle" and [mailbox.send(peer, [message], copy=False) for peer in survivors]
            if not sent or not all(sent):
                time.sleep(0.001)
    others = [each for each in survivors if each != rank]
    exchange(mailbox, [*others, 1], 1)
    dist.barrier()
    ready()
    end = receive_end(mailbox, 1)
    took = time.monotonic()
    assert not end.in_good_order and end.reason
    with pytest.raises(dist.DistBackendError, match="the session with rank 1 has ended"):
        mailbox.send(1, [torch.ones(1)])
    result = torch.full((1000,), float(rank))
    communicator.all_reduce(result)
    assert torch.equal(result, torch.full((1000,), 5.0))
    for turn in range(20):
        exchange(mailbox, others, turn)
        communicator.all_reduce(torch.ones(10))  # keeps the ranks in the same turn
    assert mailbox.receive(0.3) is None
    communicator.all_reduce(torch.ones(10))
    mailbox.close()
    communicator.close()
    return took, end.reason


@pytest.mark.parametrize("how", ["idle", "small", "large"])
def test_a_killed_peer_ends_only_its_own_session(how):
    killed = []

    def kill(pids):
        time.sleep(0.3)
        os.kill(pids[1], signal.SIGKILL)
        killed.append(time.monotonic())

    results = run_ranks(4, survive, how, dying=(1,), when_ready=kill)
    for rank in (0, 2, 3):
        took, reason = results[rank]
        print(f"{how}, rank {rank}: {took - killed[0]:.3f} s: {reason}")
        assert took - killed[0] < SLACK


def outlast_a_stopped_peer(rank, world_size):
    """Rank 1 stops. Return the longest time of a send, and the time of close, in seconds."""
    mailbox = open_mailbox(limit=4 << 20)
    store = dist.group.WORLD.get_group_store()
    if rank == 1:
        store.set("stopping", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    await_stop(int(store.get("stopping")))
    other = 2 - rank
    message, longest = pattern(1 << 20, rank), 0.0
    while True:
        began = time.monotonic()
        taken = mailbox.send(1, [message])
        longest = max(longest, time.monotonic() - began)
        if not taken:
            break
    for turn in range(20):
        exchange(mailbox, [other], turn)
    assert not mailbox.send(1, [])
    began = time.monotonic()
    mailbox.close(0.5)
    return longest, time.monotonic() - began


def test_a_stopped_peer_blocks_neither_sends_nor_close():
    results = run_ranks(3, outlast_a_stopped_peer, dying=(1,))
    for rank in (0, 2):
        longest, closing = results[rank]
        print(f"rank {rank}: the longest send {longest:.3f} s, close {closing:.3f} s")
        assert longest < SLACK and closing < SLACK


def fill(rank, world_size, length):
    """Both ranks send until sends are refused, then both receive. Return the accepted bytes, and the limit."""
    limit = 2 << 20
    mailbox = open_mailbox(limit=limit)
    peer, number = 1 - rank, 0
    refused = None
    while refused is None or time.monotonic() - refused < 0.5:  # the peer may still receive what was sent before
        if mailbox.send(peer, [torch.tensor([number]), pattern(length, number)]):
            number += 1
            refused = None
        else:
            refused = refused or time.monotonic()
            time.sleep(0.001)
    dist.barrier()
    numbers = [None] * 2
    dist.all_gather_object(numbers, number)
    messages, _ = receive_messages(mailbox, numbers[peer])
    for expected, message in enumerate(messages[peer]):
        assert message[:8].view(torch.int64).item() == expected and torch.equal(message[8:], pattern(length, expected))
    del messages, message
    dist.barrier()
    exchange(mailbox, [peer], 1)  # sends are accepted again
    dist.barrier()
    mailbox.close()
    return number * (length + 8 + 256), limit


@pytest.mark.parametrize("length", [0, 1_000, 1 << 20])
def test_the_memory_for_messages_that_a_peer_does_not_receive_is_limited(length):
    for taken, limit in run_ranks(2, fill, length):
        print(f"{length} bytes: {taken / limit:.2f} limits")
        assert limit <= taken <= 2 * (limit + length) + (1 << 20)


def close_in_the_middle(rank, world_size):
    """Rank 1 is stopped while it sends; the others close in the middle of its messages, and then it continues."""
    mailbox = open_mailbox()
    if rank == 1:
        message = torch.ones(64 << 20, dtype=torch.uint8)
        exchange(mailbox, [0, 2], 1)
        ready()
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGSTOP)).start()
        open_sessions = {0, 2}
        while open_sessions:
            for peer in [*open_sessions]:
                try:
                    if not mailbox.send(peer, [message], copy=False):
                        time.sleep(0.001)
                except dist.DistBackendError:
                    open_sessions.remove(peer)
        assert {receive(mailbox)[0] for _ in range(2)} == {0, 2}
        mailbox.close()
        return
    exchange(mailbox, [1], 1)
    while mailbox.receive(1):  # until rank 1 is stopped
        pass
    mailbox.close(0.1)
    memory = torch.zeros(64 << 20, dtype=torch.uint8)  # may get the memory of the incomplete message
    ready()
    time.sleep(0.5)
    assert not memory.any()


def test_memory_is_safe_when_a_mailbox_closes_in_the_middle_of_a_message():
    run_ranks(3, close_in_the_middle, when_ready=lambda pids: os.kill(pids[1], signal.SIGCONT))


def interrupt(rank, world_size):
    mailbox = open_mailbox()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if rank == 0:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            mailbox.receive()
        with pytest.raises(dist.DistBackendError, match="the mailbox is closed"):
            mailbox.receive()
    else:
        receive_end(mailbox, 0)


def test_ctrl_c_ends_receive():
    run_ranks(2, interrupt, fresh=True)


def hear_late(rank, world_size):
    """The wait that Ctrl-C should end ends by itself, before the thread that is to end it has had any time."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    first, second = open_mailbox("first"), open_mailbox("second")
    threads = {*os.listdir("/proc/self/task")}
    first.receive(0)  # that thread begins
    (thread,) = {*os.listdir("/proc/self/task")} - threads
    core = min(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        os.sched_setaffinity(busy.pid, {core})
        os.sched_setaffinity(int(thread), {core})
        os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            first.receive(0.4)
        threading.Timer(0.2, busy.kill).start()
        assert second.receive(1) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the priority is one of Linux")
def test_ctrl_c_ends_no_later_wait():
    run_ranks(1, hear_late, fresh=True)


def profile(rank, world_size):
    """Profile until receives are posted for messages that arrive later."""
    with torch.profiler.profile() as profiler:
        mailbox = open_mailbox()
        send_all(mailbox, 1 - rank, [pattern(200_000, 1)])
        receive(mailbox)
    assert not [event.name for event in profiler.events() if "send" in event.name or "recv" in event.name]
    send_all(mailbox, 1 - rank, [pattern(200_000, 1)])
    receive(mailbox)
    mailbox.close()


def test_the_profiler_sees_no_messages():
    run_ranks(2, profile, fresh=True)
