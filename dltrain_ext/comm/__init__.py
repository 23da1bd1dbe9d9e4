"""All-reduce by plans that are data: choose, print and verify them, and run them over a torch.distributed group; and
reduce-scatter with a codec."""

from dltrain_ext.comm.collectives import all_reduce, reduce_scatter
from dltrain_ext.comm.communicator import Communicator, Work
from dltrain_ext.comm.plans import ALGORITHMS, Plan, Step, algorithms_for, plan, verify, verify_plans
from dltrain_ext.comm.tuning import Choice, Tuning

__all__ = [
    "ALGORITHMS",
    "Choice",
    "Communicator",
    "Plan",
    "Step",
    "Tuning",
    "Work",
    "algorithms_for",
    "all_reduce",
    "plan",
    "reduce_scatter",
    "verify",
    "verify_plans",
]
