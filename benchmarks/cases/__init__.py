"""The cases by name. A case is a module, or an object, whose docstring's first line says what it measures, with

OVERVIEW    its own options in the run of all cases: so few and so small that all take about two minutes
add_options(parser) -> None    its own command line options; every one has a default
run(options, progress, keep) -> None    verify each side, time the sides interleaved; raise Failure with a clear text

run() hands its Table to keep() before it fills it, with rows that are complete: they are shown, interrupted or not.
One that times nothing keeps a Simulation. What is drawn of either, benchmarks.plots decides.
"""

from types import ModuleType

from benchmarks.cases import allreduce, amp, codec, collectives, ddp, optim, simulate

CASES: dict[str, ModuleType | collectives.Case] = {
    "optim": optim,
    "amp": amp,
    "allreduce": allreduce,
    **collectives.CASES,
    "codec": codec,
    "ddp": ddp,
    "simulate": simulate,
}
