"""The cases by name. A case is a module whose docstring's first line says what it measures, with

add_options(parser) -> None    its own command line options; every one has a default
run(options, progress) -> Table    verify each side, time the sides interleaved; raise Failure with a clear text

One that times nothing returns a Simulation, and draws it: plot(folder, name, simulation) -> the files.
"""

from types import ModuleType

from benchmarks.cases import allreduce, amp, codec, ddp, optim, reduce_scatter, simulate

CASES: dict[str, ModuleType] = {
    "optim": optim,
    "amp": amp,
    "allreduce": allreduce,
    "reduce_scatter": reduce_scatter,
    "codec": codec,
    "ddp": ddp,
    "simulate": simulate,
}
