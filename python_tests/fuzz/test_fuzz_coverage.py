"""Checks that every public name has a fuzz test."""

import importlib
import inspect
from pathlib import Path

import fuzzing
import torch
from optimizers import FUSED

from dltrain_ext import amp, codecs, comm, ddp, elastic, fsdp, kfac, local_sgd, monitor, optim, population, sim

# Names that hold or return what other tests pass in, and names without arguments.
DATA = {
    *("codecs.CODECS", "codecs.ErrorBound", "codecs.DecodeStats", "sim.Estimate", "sim.StepEstimate"),
    *("sim.StalenessEstimate", "sim.StepEstimate.efficiency", "sim.Speed.from_list", "sim.Speed.to_list"),
    *("sim.LocalSGDEstimate", "sim.LocalSGDEstimate.efficiency", "sim.LocalSGDEstimate.mean_bandwidth"),
    *(
        "ddp.AllReduceState.grad_stats",
        "comm.Communicator.check_process",
        "comm.Communicator.drain",
        "comm.Communicator.run_bucket",
        "comm.Communicator.submit_bucket",
    ),
    *(
        "comm.Communicator.counted",
        "monitor.Finding",
        "population.Winner",
        # Outer optimizers and parameter servers call these.
        *(f"elastic.Membership.{name}" for name in ("enter", "announce", "changed", "recover", "keep", "is_founded")),
        *(f"elastic.Membership.{name}" for name in ("check_alike", "is_over", "has_left", "is_left_out", "give_up")),
        *(f"elastic.Membership.{name}" for name in ("watch", "silent", "end", "has_ended")),
        *(f"elastic.Membership.{name}" for name in ("number", "members", "epoch", "leave", "has_state")),
        "comm.Communicator.connect",
        "comm.CallOptions",
        "comm.Work.then",
        "comm.Plan.to_json",
    ),
}
# FSDP calls these with its own arguments; python_tests/fsdp/test_fsdp.py tests their errors.
ELSEWHERE = {f"fsdp.ShardedState.{name}" for name in ("all_reduce", "reduce_scatter", "all_gather")}


def public():
    for module in (amp, codecs, comm, ddp, elastic, fsdp, kfac, local_sgd, monitor, optim, population, sim):
        where = module.__name__.rpartition(".")[2]
        names = getattr(module, "__all__", ["GradStats", "LossScaler"])
        for name in names:
            yield f"{where}.{name}"
            kind = getattr(module, name)
            if not inspect.isclass(kind):
                continue
            for base in kind.__mro__:
                if base.__module__.startswith("dltrain_ext.") and base.__module__ != "dltrain_ext._C":
                    own = {method for method, value in vars(base).items() if callable(value) or is_property(value)}
                    yield from (f"{where}.{name}.{method}" for method in own if not method.startswith("_"))
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("dltrain_ext::"):
            yield f"ops.{name.removeprefix('dltrain_ext::')}"


def is_property(value):
    return isinstance(value, property | classmethod | staticmethod)


def test_every_public_name_is_fuzzed():
    for path in Path(__file__).parent.glob("test_fuzz_*.py"):
        importlib.import_module(path.stem)
    names = set(public()) - DATA - ELSEWHERE
    inner = {f"optim.{kind}.sum_squares" for kind in FUSED} | {"optim.LAMB.max_grad_norm"}
    assert names - fuzzing.covered == inner
