"""The path of a gradient, fused: all-reduce plans, a DDP comm hook and one-pass optimizers for PyTorch."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

# Where Python starts in the checkout (python -m benchmarks), this folder hides the installed package, which alone holds
# the compiled part after `pip install .`. The package is taken, whole, from where that part is.
_folders = [*__path__, *(str(Path(entry, "dltrain_ext")) for entry in sys.path)]
_compiled = PathFinder.find_spec("_C", _folders)
if _compiled is None or _compiled.origin is None:
    raise ImportError(
        f"dltrain_ext is not built for this Python ({sys.executable}). Run, in its checkout: "
        "pip install torch && pip install ."
    )
__path__[:] = [str(Path(_compiled.origin).parent)]

from dltrain_ext import amp, codecs, comm, ddp, optim, sim  # noqa: E402
from dltrain_ext._build_info import VERSION as __version__  # noqa: E402

__all__ = ["__version__", "amp", "codecs", "comm", "ddp", "optim", "sim"]
