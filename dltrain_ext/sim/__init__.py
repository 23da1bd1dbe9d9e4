"""Estimates the time of all-reduces, parameter servers and training steps on a modelled network, by plan and codec."""

from dltrain_ext.comm.cost_model import Estimate, Network, Speed, parameter_server, simulate
from dltrain_ext.sim.sites import LocalSGDEstimate, local_sgd
from dltrain_ext.sim.staleness import StalenessEstimate, bounded_staleness
from dltrain_ext.sim.training import StepEstimate, best, break_even, training_step

__all__ = [
    "Estimate",
    "LocalSGDEstimate",
    "Network",
    "Speed",
    "StalenessEstimate",
    "StepEstimate",
    "best",
    "bounded_staleness",
    "break_even",
    "local_sgd",
    "parameter_server",
    "simulate",
    "training_step",
]
