"""Builds dltrain_ext._C against the torch that the environment has. What the project is stands in pyproject.toml."""

import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
ROOMS = ("core", "kernels", "comm", "bindings")
FLAGS = ["-std=c++20", "-O3", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-Wall", "-g0"]
BUILDING = {"build", "build_ext", "bdist_wheel", "dist_info", "editable_wheel", "install", "develop"}


def import_torch():
    """The environment's torch, also from inside pip's build isolation: it hides site-packages but keeps sys.prefix."""
    try:
        import torch
    except ModuleNotFoundError:
        sys.path.append(sysconfig.get_path("purelib"))
        try:
            import torch
        except ModuleNotFoundError:
            sys.exit(
                "dltrain_ext is built against PyTorch, and this build sees none. "
                "Run: pip install torch && pip install . "
                "(if torch is installed and the installer hides it, as uv does: pip install ninja setuptools && "
                "pip install --no-build-isolation .)"
            )
    return torch


def commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown: not built in a git checkout"


def extension_arguments() -> dict:
    """The parts of setup() that need torch."""
    torch = import_torch()
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    class Build(BuildExtension):
        """Leaves a note of what the extension was built against, to be read before it is loaded."""

        def run(self):
            super().run()
            note = Path(self.get_ext_fullpath("dltrain_ext._C")).parent / "_build_info.py"
            note.write_text(
                '"""Written by setup.py."""\n\n'
                f"VERSION = {self.distribution.get_version()!r}\n"
                f"COMMIT = {commit()!r}\n"
                f"TORCH = {torch.__version__!r}\n"
                f"PYTHON = {platform.python_version()!r}\n"
                f"FLAGS = {' '.join(FLAGS)!r}\n"
            )

    # The OpenMP symbols are left to torch's own runtime: two in one process would be two teams of threads.
    extension = CppExtension(
        "dltrain_ext._C",
        sources=sorted(str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / "csrc" / room).rglob("*.cpp")),
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args=FLAGS,
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": Build}}


setup(**(extension_arguments() if BUILDING & set(sys.argv) else {}))
