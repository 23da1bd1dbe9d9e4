"""Fused gradient communication and optimizers for PyTorch: all-reduce plans, a DDP comm hook, one-pass optimizers."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

# In a checkout (python -m benchmarks) this folder hides the installed package, and after `pip install .` only that one
# contains the compiled part. So the whole package is loaded from the folder of the compiled part.
_folders = [*__path__, *(str(Path(entry, "dltrain_ext")) for entry in sys.path)]
_compiled = PathFinder.find_spec("_C", _folders)
if _compiled is None or _compiled.origin is None:
    raise ImportError(
        f"dltrain_ext is not built for this Python ({sys.executable}). Run, in its checkout: "
        "pip install torch && pip install ."
    )
__path__[:] = [str(Path(_compiled.origin).parent)]

# fsdp and lightning are imported by name only: they take seconds to load, or need a package that may be missing.
from dltrain_ext import amp, codecs, comm, ddp, elastic, kfac, local_sgd, monitor, optim, population, sim  # noqa: E402
from dltrain_ext._build_info import VERSION as __version__  # noqa: E402

__all__ = [
    "__version__",
    "amp",
    "codecs",
    "comm",
    "ddp",
    "elastic",
    "kfac",
    "local_sgd",
    "monitor",
    "optim",
    "population",
    "sim",
]
