"""Builds dltrain_ext._C against the torch that the environment has. What the project is stands in pyproject.toml."""

import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
BUILD = json.loads((ROOT / "csrc" / "build.json").read_text())
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


def cuda_or_reason(wish: str | None, torch_cuda: str | None, nvcc: str | None) -> str | None:
    """Whether to build for CUDA: None if so, else why not. Leaves with a message where the wish cannot be met.

    wish: DLTRAIN_CUDA; torch_cuda: the version that torch is built for; nvcc: the version of the compiler found.
    """
    if wish not in (None, "", "0", "1"):
        sys.exit(f"DLTRAIN_CUDA: expected 0 or 1, got {wish!r}")
    if wish == "0":
        return "DLTRAIN_CUDA=0"
    if torch_cuda is None:
        reason = "torch is built for the CPU"
    elif nvcc is None:
        reason = f"torch is built for CUDA {torch_cuda}, but there is no nvcc on the PATH or in CUDA_HOME"
    elif nvcc.split(".")[0] != torch_cuda.split(".")[0]:
        reason = f"torch is built for CUDA {torch_cuda}, but nvcc is of CUDA {nvcc}"
    else:
        return None
    if wish == "1":
        sys.exit(f"DLTRAIN_CUDA=1: cannot build for CUDA: {reason}")
    return reason


def nvcc_version(cuda_home: str | None) -> str | None:
    if cuda_home is None:
        return None
    try:
        command = [str(Path(cuda_home, "bin", "nvcc")), "--version"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r"release (\d+\.\d+)", text)
    return found and found[1]


def sources(cuda: bool) -> list[str]:
    paths = [
        path.relative_to(ROOT)
        for room in (*BUILD["torch_free_rooms"], "bindings")
        for path in sorted((ROOT / "csrc" / room).rglob("*"))
        if path.suffix in (".cpp", ".cu")
    ]
    return [str(path) for path in paths if cuda or "cuda" not in path.parts]


def extension_arguments() -> dict:
    """The parts of setup() that need torch."""
    torch = import_torch()
    from torch.utils import cpp_extension

    reason = cuda_or_reason(os.environ.get("DLTRAIN_CUDA"), torch.version.cuda, nvcc_version(cpp_extension.CUDA_HOME))
    cuda = reason is None
    print(f"dltrain_ext: building for {'the CPU and CUDA' if cuda else f'the CPU alone ({reason})'}")
    sanitizers = os.environ.get("DLTRAIN_SANITIZE")  # e.g. address,undefined: for the tests
    instrument = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"] if sanitizers else []
    debug = ["-O1", "-g1"] if sanitizers else ["-g0"]
    if os.environ.get("DLTRAIN_COVERAGE"):  # counts the lines that run, for gcov: for the tests too
        instrument += ["--coverage", "-fprofile-update=atomic"]
    flags = {"cxx": BUILD["flags"] + debug + instrument + ["-DDLTRAIN_CUDA"] * cuda}
    if cuda:
        # Torch would otherwise ask the GPUs that it sees, and there need not be one.
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", BUILD["cuda"]["architectures"])
        flags["nvcc"] = BUILD["cuda"]["flags"] + ["-DDLTRAIN_CUDA"]
    kind = cpp_extension.CUDAExtension if cuda else cpp_extension.CppExtension

    class Build(cpp_extension.BuildExtension):
        def build_extensions(self):
            self.extensions[0].extra_objects = self.loops_of_each_instruction_set()
            super().build_extensions()

        def loops_of_each_instruction_set(self) -> list[str]:
            def compile(item: tuple[str, list[str]]) -> list[str]:
                name, set_flags = item
                return self.compiler.compile(
                    ["csrc/kernels/cpu/loops.cpp"],
                    output_dir=str(Path(self.build_temp, name)),
                    macros=[("DLT_INSTRUCTION_SET", name)],
                    include_dirs=["csrc"],
                    extra_postargs=flags["cxx"] + set_flags,
                )

            with ThreadPoolExecutor() as pool:
                sets = BUILD["instruction_sets"].get(platform.machine(), {})
                return [path for objects in pool.map(compile, sets.items()) for path in objects]

        def run(self):
            """Leaves a note of what the extension was built against, to be read before it is loaded."""
            super().run()
            architectures = (
                f"{torch.version.cuda}, for {os.environ['TORCH_CUDA_ARCH_LIST']}" if cuda else f"none: {reason}"
            )
            note = Path(self.get_ext_fullpath("dltrain_ext._C")).parent / "_build_info.py"
            note.write_text(
                '"""Written by setup.py."""\n\n'
                f"VERSION = {self.distribution.get_version()!r}\n"
                f"COMMIT = {commit()!r}\n"
                f"TORCH = {torch.__version__!r}\n"
                f"PYTHON = {platform.python_version()!r}\n"
                f"FLAGS = {' '.join(BUILD['flags'])!r}\n"
                f"CUDA = {architectures!r}\n"
            )

    # The OpenMP symbols are left to torch's own runtime: two in one process would be two teams of threads.
    extension = kind(
        "dltrain_ext._C",
        sources=sources(cuda),
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args=flags,
        # __gcov_dump is for children that leave by os._exit, where nothing else writes what was counted.
        extra_link_args=instrument + ["-Wl,-u,__gcov_dump"] * ("--coverage" in instrument),
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": Build}}


setup(**(extension_arguments() if BUILDING & set(sys.argv) else {}))
