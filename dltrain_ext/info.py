"""Prints what a bug report needs: ``python -m dltrain_ext.info``."""

import os
import platform
from pathlib import Path

import torch

from dltrain_ext import __version__, _build_info, _ops, codecs, comm


def collect() -> dict[str, str]:
    """Returns a dict of the versions, the build flags and the properties of the machine, as text by name."""
    return {
        "dltrain_ext": __version__,
        "package": str(Path(_build_info.__file__).parent),
        "commit": _build_info.COMMIT,
        "torch": torch.__version__,
        "built against": f"torch {_build_info.TORCH}, Python {_build_info.PYTHON}",
        "build flags": _build_info.FLAGS,
        "Python": platform.python_version(),
        "system": platform.platform(),
        "CPU": _cpu(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "instruction set": f"{_ops.instruction_set()}, out of {', '.join(_ops.instruction_sets())} "
        f"(torch runs {torch.backends.cpu.get_cpu_capability()})",
        "CUDA": _build_info.CUDA,
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "NCCL": _nccl(),
        "algorithms": ", ".join(comm.ALGORITHMS),
        "codecs": ", ".join(codecs.CODECS),
    }


def _nccl() -> str:
    try:
        return _ops.nccl_version()
    except RuntimeError as error:
        return f"none: {error}"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


if __name__ == "__main__":
    facts = collect()
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")
