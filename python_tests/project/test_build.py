"""How setup.py selects what is built, and that the CUDA sources of every module compile without a GPU."""

import importlib.util
import json
import platform
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
BUILD = json.loads((ROOT / "csrc" / "build.json").read_text())


@pytest.fixture(scope="module")
def setup():
    """Return the names defined by setup.py, which does nothing but print the project's name here."""
    argv, sys.argv = sys.argv, ["setup.py", "-q", "--name"]
    try:
        return runpy.run_path(str(ROOT / "setup.py"))
    finally:
        sys.argv = argv


NONE = "there is no nvcc that runs"


def found(setup, version):
    """Return a toolkit of that version, or the reason why there is none."""
    return version if version == NONE else setup["Toolkit"]("/cuda", "/cuda/include", version, ["8.0"])


@pytest.mark.parametrize(
    ("wish", "torch_cuda", "nvcc", "reason"),
    [
        (None, "13.0", "13.0", None),
        ("1", "13.0", "13.1", None),
        (None, None, "13.0", "torch is built for the CPU"),
        (None, "13.0", NONE, NONE),
        (None, "12.6", "13.0", "nvcc is of CUDA 13.0"),
        ("0", "13.0", "13.0", "DLTRAIN_CUDA=0"),
    ],
)
def test_cuda_is_built_where_torch_and_nvcc_have_it(setup, wish, torch_cuda, nvcc, reason):
    got = setup["cuda_or_reason"](wish, torch_cuda, found(setup, nvcc))
    assert got is None if reason is None else reason in got


@pytest.mark.parametrize(
    ("wish", "torch_cuda", "nvcc", "text"),
    [
        ("1", None, "13.0", "DLTRAIN_CUDA=1: cannot build for CUDA: torch is built for the CPU"),
        ("1", "13.0", NONE, NONE),
        ("1", "12.6", "13.0", "nvcc is of CUDA 13.0"),
    ],
)
def test_an_impossible_request_is_an_error(setup, wish, torch_cuda, nvcc, text):
    with pytest.raises(SystemExit, match=text):
        setup["cuda_or_reason"](wish, torch_cuda, found(setup, nvcc))


@pytest.mark.parametrize(("given", "said"), [(None, None), ("", None), ("0", "0"), ("1", "1")])
def test_switches_are_0_or_1(setup, monkeypatch, given, said):
    monkeypatch.delenv("DLTRAIN_CUDA", raising=False)
    if given is not None:
        monkeypatch.setenv("DLTRAIN_CUDA", given)
    assert setup["switch"]("DLTRAIN_CUDA") == said


def test_other_values_of_a_switch_are_an_error(setup, monkeypatch):
    monkeypatch.setenv("DLTRAIN_CUDA", "yes")
    with pytest.raises(SystemExit, match="DLTRAIN_CUDA: expected 0 or 1, got 'yes'"):
        setup["switch"]("DLTRAIN_CUDA")


@pytest.mark.parametrize(("given", "flags"), [("0", ["-DDLT_PRIVATE_CPYTHON=0"]), ("1", [])])
def test_private_calls_of_cpython_can_be_left_out(setup, monkeypatch, given, flags):
    monkeypatch.setenv("DLTRAIN_CUDA", "0")
    monkeypatch.setenv("DLTRAIN_PRIVATE_CPYTHON", given)
    (extension,) = setup["extension_arguments"]()["ext_modules"]
    assert [flag for flag in extension.extra_compile_args["cxx"] if "CPYTHON" in flag] == flags


def make_toolkit(folder, headers="include", top=None):
    """Make an nvcc that prints the version of CUDA 12.6."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        "#!/bin/sh\ncase $1 in\n"
        "--version) echo 'Cuda compilation tools, release 12.6, V12.6.20' ;;\n"
        f"--dryrun) echo '#$ TOP={top or folder}/bin/..' >&2 ;;\n"
        "--list-gpu-code) echo 'sm_75 sm_80 sm_90'; esac\n"
    )
    nvcc.chmod(0o755)
    if headers:
        (folder / headers).mkdir(parents=True)
        (folder / headers / "cuda_runtime.h").touch()
    return folder


def test_a_toolkit_is_found_by_its_headers(setup, tmp_path, monkeypatch):
    whole = make_toolkit(tmp_path / "whole")
    wrapper = make_toolkit(tmp_path / "wrapper", headers=None, top=whole)
    conda = make_toolkit(tmp_path / "conda", headers=f"targets/{platform.machine()}-linux/include")
    broken = make_toolkit(tmp_path / "broken", headers=None)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    for path, home, include in (
        (whole, whole, "include"),
        (wrapper, whole, "include"),
        (conda, conda, f"targets/{platform.machine()}-linux/include"),
    ):
        monkeypatch.setenv("PATH", f"{path}/bin", prepend=":")
        wanted = setup["Toolkit"](str(home), str(home / include), "12.6", ["7.5", "8.0", "9.0"])
        assert setup["find_toolkit"]() == wanted
        monkeypatch.setenv("CUDA_HOME", str(path))  # takes precedence over the PATH
        monkeypatch.setenv("PATH", f"{broken}/bin", prepend=":")
        assert setup["find_toolkit"]() == wanted
        monkeypatch.delenv("CUDA_HOME")
    reason = f"{broken}/bin/nvcc is of CUDA 12.6, but there is no include/cuda_runtime.h in {broken}"
    assert setup["find_toolkit"]() == reason
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert "there is no nvcc that runs" in setup["find_toolkit"]()


def test_only_architectures_that_the_toolkit_supports_are_built(setup):
    wanted = BUILD["cuda"]["architectures"]
    assert setup["architectures"](wanted, ["7.5", "8.0", "8.6", "9.0"]) == "7.5;8.0;9.0+PTX"
    assert setup["architectures"](wanted, ["7.5", "8.0", "9.0", "10.0", "12.0"]) == "7.5;8.0;9.0;10.0+PTX;12.0+PTX"
    with pytest.raises(SystemExit, match="nvcc compiles for none of 7.5.*, but for 5.2"):
        setup["architectures"](wanted, ["5.2"])


def test_sources_of_each_kind(setup):
    plain, cuda = set(setup["sources"](False)), set(setup["sources"](True))
    assert plain < cuda
    assert all("/cuda/" in path for path in cuda - plain)
    assert not any(path.endswith(".cu") for path in plain)
    assert {path.split("/")[1] for path in plain} == {*BUILD["torch_free_modules"], "bindings"}


MEMBERS = """
#include <torch/csrc/autograd/python_variable.h>
#pragma GCC poison _PyDict_GetItem_KnownHash ma_keys
#include "bindings/optim/members.h"

PYBIND11_MODULE(members, module) {
  module.def("look_up", [](const py::dict& state, const py::list& params) {
    dltrain::bindings::Members<1> members({"value"});
    members.look_up(state, params, 1);
    py::list found;
    for (size_t i = 0; i < members.size(); ++i) {
      PyObject* const value = members[i].values[0];
      found.append(value ? py::reinterpret_borrow<py::object>(value) : py::none());
    }
    return found;
  });
}
"""


class Hashed(torch.nn.Parameter):
    def __hash__(self):
        return 7

    __eq__ = object.__eq__


@pytest.mark.exhaustive
def test_state_is_also_found_by_the_public_api_of_cpython(tmp_path):
    """This is the code of DLTRAIN_PRIVATE_CPYTHON=0; another portion of .ci/full tests the rest of such a build."""
    from torch.utils.cpp_extension import include_paths, library_paths

    (tmp_path / "members.cpp").write_text(MEMBERS)
    folders = [ROOT / "csrc", *include_paths(), sysconfig.get_path("include")]
    subprocess.run(
        ["g++", "-std=c++20", "-shared", "-fPIC", "-DDLT_PRIVATE_CPYTHON=0", tmp_path / "members.cpp"]
        + [f"-isystem{folder}" for folder in folders]
        + [f"-L{folder}" for folder in library_paths()]
        + ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10", "-o", tmp_path / "members.so"],
        check=True,
    )
    spec = importlib.util.spec_from_file_location("members", tmp_path / "members.so")
    members = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(members)
    kinds = torch.nn.Parameter, torch.Tensor, Hashed, torch.nn.Buffer
    params = [kind(torch.ones(1)) for kind in kinds for _ in range(10)]
    state = {p: {"value": object()} for p in params}
    lacking, unhashable = torch.ones(1), [1.0]
    state[lacking] = {"other": 1}
    found = members.look_up(state, [*params, lacking, torch.ones(1), unhashable])
    assert all(value is state[p]["value"] for p, value in zip(params, found, strict=False))
    assert found[len(params) :] == [None] * 3


needs_nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")


@needs_nvcc
@pytest.mark.parametrize("path", sorted((ROOT / "csrc/bindings").rglob("cuda/*.cpp")), ids=lambda path: path.name)
def test_bindings_to_cuda_compile(setup, path):
    """The headers may be those of any torch; only linking needs a torch that is built for CUDA."""
    from torch.utils.cpp_extension import include_paths

    folders = [ROOT / "csrc", *include_paths(), setup["find_toolkit"]().include, sysconfig.get_path("include")]
    subprocess.run(
        ["g++", *BUILD["flags"], "-fsyntax-only", "-DDLTRAIN_CUDA", str(path)]
        + [f"-isystem{folder}" for folder in folders]
        + ["-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE"] * (torch.version.cuda is None),
        check=True,
    )


@pytest.fixture(scope="module")
def tests_with_cuda(tmp_path_factory) -> Path:
    """Build the C++ tests for the device of this machine."""
    if not shutil.which("cmake") or not shutil.which("nvcc"):
        pytest.skip("needs cmake and nvcc")
    folder = tmp_path_factory.mktemp("build")
    options = ["-DDLTRAIN_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=native"]
    done = subprocess.run(["cmake", "-S", ROOT, "-B", folder, *options], capture_output=True, text=True)
    if "GTest" in done.stderr:
        pytest.skip("needs GoogleTest: apt install libgtest-dev")
    assert done.returncode == 0, done.stderr
    subprocess.run(["cmake", "--build", folder, "--parallel"], check=True)
    return folder / "dltrain_tests"


@pytest.mark.gpu
@pytest.mark.parametrize("tool", [None, "memcheck", "racecheck"])
def test_cpp_tests_on_the_device(tests_with_cuda, tool):
    """Kernels, streams and the executor with virtual ranks are tested, without and with compute-sanitizer."""
    command = [str(tests_with_cuda)]
    if tool:
        if not shutil.which("compute-sanitizer"):
            pytest.skip("needs compute-sanitizer")
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *command]
    done = subprocess.run([*command, "--gtest_filter=*cuda*:StreamQueue*"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
