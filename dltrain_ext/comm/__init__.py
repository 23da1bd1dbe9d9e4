"""Collectives over a torch.distributed group, in any codec. What they do is a plan, which is data that can be selected,
printed and verified."""

from dltrain_ext.comm.collectives import all_gather, all_reduce, broadcast, reduce, reduce_scatter
from dltrain_ext.comm.communicator import CallOptions, Communicator
from dltrain_ext.comm.owners import Owners
from dltrain_ext.comm.plans import ALGORITHMS, COLLECTIVES, Plan, Step, algorithms_for, plan, verify, verify_plans
from dltrain_ext.comm.tuning import Choice, Tuning
from dltrain_ext.comm.work import Work

__all__ = [
    "ALGORITHMS",
    "COLLECTIVES",
    "CallOptions",
    "Choice",
    "Communicator",
    "Owners",
    "Plan",
    "Step",
    "Tuning",
    "Work",
    "algorithms_for",
    "all_gather",
    "all_reduce",
    "broadcast",
    "plan",
    "reduce",
    "reduce_scatter",
    "verify",
    "verify_plans",
]
