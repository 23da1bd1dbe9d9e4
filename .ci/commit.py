#!/usr/bin/env python3
"""The checks that every commit has to pass, on a clean clone without a GPU.

    bash .ci/run                run all portions, one after another
    bash .ci/run NAME ...       run these portions; each first installs what it needs
    bash .ci/run --list         list the names of the portions

For Debian: tools are installed by apt-get, as root or by sudo. nvcc has to be installed. Results are in build/commit.
"""

import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from steps import ROOT, Step, run

TEST = re.search(r"<!-- test -->\n```bash\n(.+)\n```", (ROOT / "README.md").read_text())[1]
PYTHON = ".venv/bin/python"
TOOLS = Step(
    "tools",
    "sudo=$([ $(id -u) = 0 ] || echo sudo); $sudo apt-get update -qq; "
    "$sudo apt-get install -y -qq cmake ninja-build libgtest-dev iproute2 procps >/dev/null",
    300,
)
# Installs what the README's test command installs, if that command has not run yet.
ENVIRONMENT = Step("environment", f"[ -x .venv/bin/pytest ] || {{ {TEST.rpartition(' && ')[0]}; }}", 900)


def cpp(name: str, *options: str) -> str:
    """Return a command that builds the C++ tests of the modules without torch in build/NAME."""
    return f"cmake -S . -B build/{name} -G Ninja {' '.join(options)} && cmake --build build/{name}"


def cpp_tests(name: str, tests: str = "*") -> str:
    """Return a command that runs the tests in four processes, since tests whose ranks wait leave a core idle.

    Skipped tests are counted and not listed, so that failures are among the last lines.
    """
    tests = f"build/{name}/dltrain_tests --gtest_brief=1 --gtest_filter='{tests}'"
    processes = f"printf '%s\\n' 0 1 2 3 | xargs -P 4 -I % env GTEST_SHARD_INDEX=% {tests}"
    return f"export GTEST_TOTAL_SHARDS=4; {processes} | grep -v -e ': Skipped$' -e '^no CUDA device$'"


SLOW = "AllReduce.Feeds*:AllReduce.*Millions*:AllReduce.AddsTheNoise*:*AllReduceOn*:Simulate.*:FailureDetector.*"
THREADED = (  # tests of code that has its own threads, and of the CUDA kernels that are quick to emulate
    "*Queue*:*Mailbox*:*FailureDetector*:Executor.*:AllReduce.TakesHalves:AllReduce.Spreads*:AllReduce.IsTheSame*:"
    "*FoldOn.Scales*:"
    "*FoldOn.Adds*:*CodecOn.Sees*:*ReduceOn.IsFinite*:*ReadsItsScalars*:Memory*:*Nccl*:*ReduceScatter*:*TwoLevels*:"
    "*Layout*:*Feedback*:*PsNode*:Shm.*"
)

PORTIONS = {
    "tests": [TOOLS, Step("the README's test command", TEST, 3000)],
    "wheel": [
        TOOLS,
        ENVIRONMENT,
        Step("a wheel", f"rm -rf build/dist && {PYTHON} -m pip wheel -q --no-deps --wheel-dir build/dist .", 600),
        Step(
            "install it with torch only",
            "rm -rf build/beside-torch && python3 -m venv build/beside-torch; "
            "build/beside-torch/bin/pip install -q torch==2.13.0; "
            "build/beside-torch/bin/pip install -q --no-deps build/dist/*.whl",
            600,
        ),
        Step(
            "its tests and its self-test",
            "(cd build; beside-torch/bin/python -m dltrain_ext.selftest --quick --device cpu) & "
            "DLTRAIN_WHEEL=$(echo $PWD/build/dist/*.whl) DLTRAIN_PYTHON=$PWD/build/beside-torch/bin/python "
            f"{PYTHON} -m pytest -q python_tests/project/test_wheel.py; wait $!",
            300,
        ),
    ],
    "style": [
        TOOLS,
        ENVIRONMENT,
        Step("pre-commit", f"{PYTHON} -m pip install -q pre-commit==4.7.0 mypy==2.4.1 'setuptools>=77'", 300),
        Step("style and types", "PATH=$PWD/.venv/bin:$PATH pre-commit run --all-files --show-diff-on-failure", 300),
        Step("clang-tidy", "PATH=$PWD/.venv/bin:$PATH pre-commit run --all-files --hook-stage manual clang-tidy", 300),
    ],
    "cpp": [
        TOOLS,
        Step(
            "C++ and emulated CUDA, sanitized",
            cpp("address", "-DDLTRAIN_CUDA=EMULATED", "-DDLTRAIN_SANITIZE=address,undefined"),
            900,
        ),
        Step("C++ tests, addresses", cpp_tests("address", f"-{SLOW}"), 600),
        Step(
            "C++ and emulated CUDA, for threads",
            cpp("thread", "-DDLTRAIN_CUDA=EMULATED", "-DDLTRAIN_SANITIZE=thread"),
            900,
        ),
        Step("C++ tests, threads", cpp_tests("thread", THREADED), 600),
    ],
    "cuda": [
        TOOLS,
        ENVIRONMENT,
        Step("C++ and CUDA, by nvcc", cpp("cuda", "-DDLTRAIN_CUDA=ON"), 900),
        Step("C++ tests", cpp_tests("cuda"), 600),
        Step(
            "the machine code of the kernels",
            f"{PYTHON} -m pip install -q nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm; "
            f"DLTRAIN_SASS=$PWD/build/cuda/libdltrain.a {PYTHON} -m pytest -q python_tests/project/test_sass.py",
            300,
        ),
        Step(
            "the declarations of NCCL",
            f"{PYTHON} -m pip install -q --no-deps nvidia-nccl-cu13; "
            f"{PYTHON} -m pytest -q python_tests/comm/test_connections.py -k 'declarations or real'",
            300,
        ),
        Step(
            "the portions for a GPU, without one",
            f"printf '%s\\n' 1 2 5 3 4 | PYTHON=$PWD/{PYTHON} xargs -P 2 -n 1 .ci/gpu --dry",
            600,
        ),
    ],
    "benchmarks": [TOOLS, ENVIRONMENT, Step("benchmarks", f"{PYTHON} -m benchmarks --quick", 300)],
}


def main(arguments: list[str]) -> bool:
    if arguments == ["--list"]:
        print(*PORTIONS, sep="\n")
        return True
    if unknown := [name for name in arguments if name not in PORTIONS]:
        sys.exit(f"expected portions out of {', '.join(PORTIONS)}, got {', '.join(unknown)}\n\n{__doc__}")
    os.environ.setdefault("DEBIAN_FRONTEND", "noninteractive")
    wanted = arguments or [*PORTIONS]
    steps = dict.fromkeys(step for name in wanted for step in PORTIONS[name])  # without duplicates
    return run([*steps], ROOT / "build" / "commit", "-".join(arguments) or "all")


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
