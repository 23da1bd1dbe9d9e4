"""Builds dltrain_ext._C against the torch of the environment. The project's metadata is in pyproject.toml."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from setuptools import setup

ROOT = Path(__file__).parent
BUILD = json.loads((ROOT / "csrc" / "build.json").read_text())
BUILDING = {"build", "build_ext", "bdist_wheel", "dist_info", "editable_wheel", "install", "develop"}


def import_torch():
    """Imports the environment's torch, also in pip's build isolation: it hides site-packages but keeps sys.prefix."""
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


class Toolkit(NamedTuple):
    """A CUDA toolkit: its folders, its version, and the architectures of its nvcc, as torch names them ("8.0")."""

    home: str
    include: str
    version: str
    architectures: list[str]


def find_toolkit() -> Toolkit | str:
    """The toolkit of CUDA_HOME or CUDA_PATH, of the nvcc on the PATH, or of /usr/local/cuda; else why there is none."""
    given = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = Path(given or "/usr/local/cuda", "bin", "nvcc")
    if not given and (found := shutil.which("nvcc")):
        nvcc = Path(found)

    def output_of(*arguments: str) -> str:
        done = subprocess.run([nvcc, *arguments], capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    try:
        version = re.search(r"release (\d+\.\d+)", output_of("--version"))
        top = re.search(r"TOP=(.+)", output_of("--dryrun", "-E", "-x", "cu", os.devnull))
        numbers = re.findall(r"sm_(\d+)(\d)\b", output_of("--list-gpu-code"))
    except (OSError, subprocess.CalledProcessError):
        return f"there is no nvcc that runs on the PATH or in CUDA_HOME (tried {nvcc})"
    if not version:
        return f"{nvcc} --version names no release"
    # The nvcc on the PATH may be a link or a script, so nvcc itself is asked for the folder of the toolkit.
    homes = dict.fromkeys([str(nvcc.parents[1]), *([os.path.normpath(top[1])] if top else [])])
    targets = [f"targets/{name}-linux/include" for name in (platform.machine(), "sbsa")]  # sbsa: Arm servers
    for home in homes:
        for include in (Path(home, part) for part in ("include", *targets)):
            if Path(include, "cuda_runtime.h").exists():
                return Toolkit(home, str(include), version[1], [".".join(number) for number in numbers])
    return f"{nvcc} is of CUDA {version[1]}, but there is no include/cuda_runtime.h in {' or '.join(homes)}"


def switch(name: str) -> str | None:
    """Returns the value of an environment variable that may be 0 or 1; None if it is not set."""
    wish = os.environ.get(name) or None
    if wish not in (None, "0", "1"):
        sys.exit(f"{name}: expected 0 or 1, got {wish!r}")
    return wish


def cuda_or_reason(wish: str | None, torch_cuda: str | None, toolkit: Toolkit | str) -> str | None:
    """Returns None if the build is for CUDA, else the reason why not. Exits with a message if the wish cannot be met.

    wish: DLTRAIN_CUDA; torch_cuda: the CUDA version of torch; toolkit: the result of find_toolkit.
    """
    if wish == "0":
        return "DLTRAIN_CUDA=0"
    if torch_cuda is None:
        reason = "torch is built for the CPU"
    elif isinstance(toolkit, str):
        reason = f"torch is built for CUDA {torch_cuda}, but {toolkit}"
    elif toolkit.version.split(".")[0] != torch_cuda.split(".")[0]:
        reason = f"torch is built for CUDA {torch_cuda}, but nvcc is of CUDA {toolkit.version}"
    else:
        return None
    if wish == "1":
        sys.exit(f"DLTRAIN_CUDA=1: cannot build for CUDA: {reason}")
    return reason


def architectures(wanted: list[str], known: list[str]) -> str:
    """Returns a TORCH_CUDA_ARCH_LIST of the wanted ones that the toolkit knows, with PTX of the last for later GPUs."""
    names = [name for name in wanted if name.removesuffix("+PTX") in known]
    if not names:
        sys.exit(f"nvcc compiles for none of {', '.join(wanted)}, but for {', '.join(known) or 'nothing'}")
    return ";".join([*names[:-1], names[-1].removesuffix("+PTX") + "+PTX"])


def sources(cuda: bool) -> list[str]:
    paths = [
        path.relative_to(ROOT)
        for module in (*BUILD["torch_free_modules"], "bindings")
        for path in sorted((ROOT / "csrc" / module).rglob("*"))
        if path.suffix in (".cpp", ".cu")
    ]
    return [str(path) for path in paths if cuda or "cuda" not in path.parts]


def in_units(paths: list[str], folder: Path) -> list[str]:
    """Returns the sources, with one file per unit that includes all of its sources: then headers are compiled once."""
    units = []
    for name in BUILD["units"]:
        included = [path for path in paths if path.startswith(f"csrc/{name}/") and path.endswith(".cpp")]
        paths = [path for path in paths if path not in included]
        unit = Path(folder, f"{name.replace('/', '_')}.cpp")
        text = "".join(f'#include "{Path(path).relative_to("csrc")}"\n' for path in included)
        if not unit.exists() or unit.read_text() != text:  # an unchanged file is not compiled again
            unit.parent.mkdir(parents=True, exist_ok=True)
            unit.write_text(text)
        units.append(str(unit))
    return [*units, *paths]


def extension_arguments() -> dict:
    """Returns the arguments of setup() that need torch."""
    torch = import_torch()
    toolkit = find_toolkit()
    reason = cuda_or_reason(switch("DLTRAIN_CUDA"), torch.version.cuda, toolkit)
    cuda = reason is None
    print(f"dltrain_ext: building for {'the CPU and CUDA' if cuda else f'the CPU alone ({reason})'}")
    sanitizers = os.environ.get("DLTRAIN_SANITIZE")  # e.g. address,undefined, for the tests
    instrument = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"] if sanitizers else []
    debug = ["-O0", "-g1"] if sanitizers else ["-g0"]  # as in CMakeLists.txt
    if os.environ.get("DLTRAIN_COVERAGE"):  # counts the lines that run, for gcov; also for the tests
        instrument += ["--coverage", "-fprofile-update=atomic"]
    memory = ["--param=ggc-min-heapsize=4000000"]  # kB: otherwise GCC spends a tenth of its time on collecting garbage
    public = ["-DDLT_PRIVATE_CPYTHON=0"] * (switch("DLTRAIN_PRIVATE_CPYTHON") == "0")
    flags = {"cxx": BUILD["flags"] + memory + debug + instrument + public + ["-DDLTRAIN_CUDA"] * cuda}
    include_dirs = [str(ROOT / "csrc")]
    if cuda:
        os.environ["CUDA_HOME"] = toolkit.home  # before torch looks for it
        include_dirs += [toolkit.include] * (toolkit.include != "/usr/include")
        # Otherwise torch takes the architectures of the GPUs that it finds, and there may be none.
        if not os.environ.get("TORCH_CUDA_ARCH_LIST"):
            os.environ["TORCH_CUDA_ARCH_LIST"] = architectures(BUILD["cuda"]["architectures"], toolkit.architectures)
        flags["nvcc"] = BUILD["cuda"]["flags"] + ["-DDLTRAIN_CUDA"]
    from torch.utils import cpp_extension

    kind = cpp_extension.CUDAExtension if cuda else cpp_extension.CppExtension

    class Build(cpp_extension.BuildExtension):
        def build_extension(self, extension):
            extension.sources = in_units(extension.sources, Path(self.build_temp))
            extension.extra_objects = self.loops_of_each_instruction_set()
            super().build_extension(extension)

        def loops_of_each_instruction_set(self) -> list[str]:
            def compile(item: tuple[str, list[str]]) -> list[str]:
                name, set_flags = item
                return self.compiler.compile(
                    ["csrc/kernels/cpu/loops.cpp"],
                    output_dir=str(Path(self.build_temp, name)),
                    macros=[("DLT_INSTRUCTION_SET", name)],
                    include_dirs=[str(ROOT / "csrc")],
                    extra_postargs=flags["cxx"] + set_flags,
                )

            with ThreadPoolExecutor() as pool:
                sets = BUILD["instruction_sets"].get(platform.machine(), {})
                return [path for objects in pool.map(compile, sets.items()) for path in objects]

        def run(self):
            """Also writes a file that says what the extension was built against. It is read before the extension."""
            super().run()
            built_for = (
                f"{torch.version.cuda}, by nvcc {toolkit.version} for {os.environ['TORCH_CUDA_ARCH_LIST']}"
                if cuda
                else f"none: {reason}"
            )
            note = Path(self.get_ext_fullpath("dltrain_ext._C")).parent / "_build_info.py"
            note.write_text(
                '"""Written by setup.py."""\n\n'
                f"VERSION = {self.distribution.get_version()!r}\n"
                f"COMMIT = {commit()!r}\n"
                f"TORCH = {torch.__version__!r}\n"
                f"PYTHON = {platform.python_version()!r}\n"
                f"FLAGS = {' '.join(BUILD['flags'])!r}\n"
                f"CUDA = {built_for!r}\n"
            )

    # Torch's own runtime resolves the OpenMP symbols: two runtimes in one process would have two teams of threads.
    extension = kind(
        "dltrain_ext._C",
        sources=sources(cuda),
        include_dirs=include_dirs,
        extra_compile_args=flags,
        # __gcov_dump is for children that end by os._exit, which does not write the counts.
        extra_link_args=instrument + ["-Wl,-u,__gcov_dump"] * ("--coverage" in instrument),
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": Build}}


setup(**(extension_arguments() if BUILDING & set(sys.argv) else {}))
