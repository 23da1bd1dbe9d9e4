"""The path of a gradient, fused: all-reduce plans, a DDP comm hook and one-pass optimizers for PyTorch."""

import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path


def _is_built(package: Path) -> bool:
    return any((package / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES)


# Where Python starts in the checkout (python -m benchmarks), this folder hides the installed package, which alone holds
# the compiled part after `pip install .`: then the installed package is taken, whole.
if not _is_built(Path(__path__[0])):
    _installed = next((path for entry in sys.path if _is_built(path := Path(entry, "dltrain_ext"))), None)
    if _installed is None:
        raise ImportError(
            f"dltrain_ext is not built for this Python ({sys.executable}). Run, in its checkout: "
            "pip install torch && pip install ."
        )
    __path__[:] = [str(_installed)]

from dltrain_ext import amp, codecs, comm, ddp, optim, sim  # noqa: E402
from dltrain_ext._build_info import VERSION as __version__  # noqa: E402

__all__ = ["__version__", "amp", "codecs", "comm", "ddp", "optim", "sim"]
