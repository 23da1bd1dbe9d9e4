"""Children of fork() that use objects of their parent: an error says so, and neither of them hangs or crashes."""

import contextlib
import tempfile
import textwrap
import warnings
from pathlib import Path

import commands
import pytest
from ranks import ROOT, as_torchrun

BEGIN = """
import os, signal, sys, tempfile, warnings
import torch, torch.distributed as dist
from torch import nn
from dltrain_ext import amp, codecs, comm, ddp, optim
signal.alarm(300)  # who hangs is killed, and its children find no parent

def in_child(body, leave=None):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        signal.alarm(200)
        try:
            body()
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
        if leave is not None:
            leave()
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0, "the child did not leave well"

torch.set_num_threads(2)
store = dist.FileStore(tempfile.mkdtemp() + "/store", 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
communicator = comm.Communicator()
ones = torch.ones(300_000)
communicator.all_reduce(ones, async_op=True).wait()  # the worker has begun
"""


def run(body):
    """Run the body in a process that is forked from a server, and exits by os._exit."""
    with tempfile.TemporaryDirectory() as folder:
        as_torchrun(1, execute, BEGIN + textwrap.dedent(body), Path(folder, "said"), fresh=True)
        return Path(folder, "said").read_text().splitlines()


def execute(script, file):
    warnings.simplefilter("ignore")
    with file.open("w", buffering=1) as said, contextlib.redirect_stdout(said):
        exec(script, {"__name__": "script"})


def run_as_script(body):
    """Run the body in a process that exits like any Python program."""
    done = commands.python("-c", BEGIN + textwrap.dedent(body), PYTHONPATH=str(ROOT), PYTHONWARNINGS="ignore")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


CALLS = {
    "all_reduce": "communicator.all_reduce(ones)",
    "async": "communicator.all_reduce(ones, async_op=True).wait()",
    "reduce_scatter": "communicator.reduce_scatter(torch.empty(4), torch.ones(4))",
    "tune": "communicator.tune(seconds=0)",
    "wait": "work.wait()",
    "hook": "state.communicator.all_reduce(ones)",
    "of the group": "comm.all_reduce(ones)",
    "new one": "comm.Communicator()",
    "new state": "ddp.AllReduceState()",
}


def test_collectives_name_the_fork():
    calls = "\n".join(f"    attempt(lambda: {call})" for call in CALLS.values())
    lines = run(
        f"""
work = communicator.all_reduce(ones, async_op=True)
comm.all_reduce(torch.ones(4))
state = ddp.AllReduceState()
def attempt(call):
    try:
        call()
        print("passed", flush=True)
    except RuntimeError as error:
        print(error, flush=True)
def body():
{calls}
in_child(body, lambda: os._exit(0))
communicator.all_reduce(ones, "avg")
print("parent", communicator.stats()["calls"], bool((ones == 1).all()))
"""
    )
    *said, parent = lines
    assert parent == "parent 3 True"
    assert len(said) == len(CALLS)
    for line in said:
        assert "process" in line and "fork" in line and "spawn" in line, line


@pytest.mark.parametrize(
    ("run", "leave"), [(run, "lambda: os._exit(0)"), (run_as_script, "None")], ids=["_exit", "exit"]
)
def test_dropping_objects_in_a_child_does_not_affect_the_parent(run, leave):
    """torch's group has been destroyed: otherwise a child waits forever at its exit, also without dltrain_ext."""
    lines = run(
        f"""
import gc
dist.destroy_process_group()
def body():
    global communicator
    communicator.close()
    communicator.close()
    del communicator
    gc.collect()
in_child(body, {leave})
work = communicator.all_reduce(ones, async_op=True)
work.wait()
communicator.close()
communicator.close()
print("parent")
"""
    )
    assert lines == ["parent"]


def test_a_child_does_not_wait_for_the_thread_of_gloo():
    """Nor does it if no connection is left that uses the thread."""
    lines = run_as_script(
        """
from dltrain_ext.comm import transports
dist.destroy_process_group()
communicator.close()
devices = transports.gloo_devices()
def body():
    global devices
    del devices
in_child(body)
print("parent")
"""
    )
    assert lines == ["parent"]


def test_a_child_encodes_and_steps():
    """It uses its own thread only, because torch's threads would wait forever."""
    lines = run(
        """
values = torch.randn(1_000_000)
params = [nn.Parameter(torch.randn(1_000_000)) for _ in range(2)]
for p in params:
    p.grad = torch.ones_like(p)
optimizer = optim.AdamW(params, lr=0.1)
def work():
    out = codecs.decode(codecs.encode(values, "int8"))
    optimizer.step()
    torch.set_num_threads(1)
    return out.double().sum() + params[0].detach().double().sum()
optimizer.step()
def body():
    print(float(work()))
in_child(body, lambda: os._exit(0))
print(float(work()))
"""
    )
    assert len(lines) == 2 and lines[0] == lines[1]


def test_workers_of_a_data_loader_encode():
    lines = run(
        """
class Encoded(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return codecs.encode(torch.full((100_000,), float(index)), "int8").wire
first = codecs.encode(torch.full((100_000,), 3.0), "int8").wire
wires = list(torch.utils.data.DataLoader(Encoded(), num_workers=2, multiprocessing_context="fork"))
print(len(wires), torch.equal(wires[3][0], first))
communicator.all_reduce(ones)
"""
    )
    assert lines == ["4 True"]


def test_a_child_makes_a_group_of_its_own():
    lines = run(
        """
def body():
    dist.distributed_c10d._world.pg_map.clear()
    dist.distributed_c10d._update_default_pg(None)
    own = dist.FileStore(tempfile.mkdtemp() + "/store", 1)
    dist.init_process_group("gloo", store=own, rank=0, world_size=1)
    tensor = torch.ones(4)
    comm.Communicator().all_reduce(tensor)
    print(tensor.tolist())
in_child(body, lambda: os._exit(0))
"""
    )
    assert lines == ["[1.0, 1.0, 1.0, 1.0]"]
