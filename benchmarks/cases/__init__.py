"""The cases by name. A case is a module, or an object, whose docstring's first line says what it measures. It has

OVERVIEW    its options in the run of all cases, chosen so that all cases together take about four minutes
add_options(parser) -> None    adds its own command line options, each with a default
run(options, progress, keep) -> None    verifies each side, times them alternately; raises Failure with a clear text

run() passes its Table to keep() first, and then adds only complete rows, which are also shown if it is interrupted. A
case that times nothing passes a Simulation. benchmarks.plots decides what is drawn of either.
"""

from types import ModuleType

from benchmarks.cases import (
    allreduce,
    amp,
    codec,
    collectives,
    ddp,
    kfac,
    local_sgd,
    masters,
    membership,
    muon,
    optim,
    population,
    sharded,
    simulate,
    store,
    techniques,
)

CASES: dict[str, ModuleType | collectives.Case] = {
    "optim": optim,
    "masters": masters,
    "muon": muon,
    "amp": amp,
    "allreduce": allreduce,
    **collectives.CASES,
    "codec": codec,
    "ddp": ddp,
    "sharded": sharded,
    "kfac": kfac,
    "techniques": techniques,
    "store": store,
    "local_sgd": local_sgd,
    "membership": membership,
    "population": population,
    "simulate": simulate,
}
