"""The machine code that nvcc generates for the kernels: registers, local memory, and the widths of memory accesses.

Without a GPU, this is how their speed is protected. It reads the library that CMake builds with nvcc:
DLTRAIN_SASS=build/cuda/libdltrain.a pytest python_tests/project/test_sass.py, with the packages nvidia-cuda-cuobjdump
and nvidia-cuda-nvdisasm.
"""

import collections
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from optimizers import FUSED

from dltrain_ext import codecs
from dltrain_ext.optim.rule import RULES

LIBRARY = os.environ.get("DLTRAIN_SASS")
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="needs DLTRAIN_SASS, a library that nvcc has compiled")
ARCHITECTURES = ("sm_80", "sm_90")
THREADS = 256  # per block
REGISTERS = 65536  # per multiprocessor
TILE = dict.fromkeys(codecs.CODECS, 256) | {"int4": 128, "fp8": 128}  # elements that a warp processes together


def updates():
    """Return, for each optimizer and each selection of its states, the kernel and its numbers of streams."""
    for name in FUSED:
        states = RULES[name.lower()].states
        for chosen in itertools.product(*((0, 1) if state.optional else (1,) for state in states)):
            bits = sum(bit << k for k, bit in enumerate(chosen))
            yield f"Update<{name}, {bits}u>", (2 + sum(chosen), 1 + sum(chosen))


STREAMS = dict(updates())


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, check=True, **options).stdout


@pytest.fixture(scope="module")
def tool():
    folders = [str(folder) for folder in Path(sys.prefix).glob("lib/python*/site-packages/nvidia/cu*/bin")]
    path = os.pathsep.join([*folders, os.environ["PATH"]])
    if shutil.which("cuobjdump", path=path) is None:
        pytest.skip("needs cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    return lambda what: run("cuobjdump", what, LIBRARY, env=os.environ | {"PATH": path})


def by_kernel(text, heading):
    """Return the listing of each kernel, by architecture and by the kernel's name and arguments."""
    found = {}
    for part in re.split(r"^arch = ", text, flags=re.M)[1:]:
        architecture = part.split()[0]
        functions = re.split(heading, part, flags=re.M)[1:]
        names = run("c++filt", input="\n".join(f.split()[0].rstrip(":") for f in functions)).splitlines()
        for name, body in zip(names, functions, strict=True):
            if kernel := re.search(r"(\w+_kernel)<(.*?)>\(", name.replace("dltrain::", "").replace("math::", "")):
                found[architecture, kernel[1], kernel[2]] = body
    return found


@pytest.fixture(scope="module")
def kernels(tool):
    """Return, for each kernel, bytes of local memory, registers, and accesses: by operation and width, and spills.

    Spills are the accesses of local memory in the loop over elements: between wide accesses of global memory.
    """
    usage = by_kernel(tool("--dump-resource-usage"), r"^ Function ")
    code = by_kernel(tool("--dump-sass"), r"^\s+Function : ")
    assert usage.keys() == code.keys() and {key[0] for key in code} >= set(ARCHITECTURES)
    found = {}
    for key, text in usage.items():
        ordered = []
        for operation, modifiers in re.findall(r"\s(LDG?|STG?|LDL|STL)((?:\.[A-Z0-9]+)*) ", code[key]):
            width = next((int(m.lstrip("US")) for m in modifiers.split(".") if m.lstrip("US").isdecimal()), 32)
            ordered.append((operation, width))
        wide = [i for i, (operation, width) in enumerate(ordered) if operation in ("LDG", "STG") and width == 128]
        loop = ordered[wide[0] : wide[-1]] if wide else []
        spills = sum(operation in ("LDL", "STL") for operation, _ in loop)
        stack, registers = re.search(r"STACK:(\d+)", text), re.search(r"REG:(\d+)", text)
        found[key] = int(stack[1]), int(registers[1]), spills, collections.Counter(ordered)
    return found


def of_codecs(kernels, operation):
    """Yield the kernels of an operation: the codec, quads of elements per lane, and the accesses."""
    types = {"raw": "Raw", "fp16": "FP16", "bf16": "BF16", "fp8": "FP8", "int8": "Int8", "int4": "Int4", "sign": "Sign"}
    for codec, name in types.items():
        found = [
            k for key, k in kernels.items() if key[2].startswith(f"{operation}<{name}>") and key[0] in ARCHITECTURES
        ]
        assert len(found) >= len(ARCHITECTURES), (operation, codec)
        yield from ((codec, TILE[codec] // 128, accesses) for *_, accesses in found)


def unit_width(codec):
    """Return the width of four words, a lane's part of a quad."""
    return {"raw": 128, "fp16": 64, "bf16": 64}.get(codec, 32)


def test_four_blocks_fit_and_local_memory_is_unused(kernels):
    for (architecture, kernel, arguments), (stack, registers, spills, accesses) in kernels.items():
        name = f"{architecture} {kernel} {arguments}: {registers} registers, {stack} bytes, {dict(accesses)}"
        streams, _ = STREAMS.get(arguments.rsplit(", ", 2)[0], (4, 0))
        blocks = 2 if arguments.endswith("true") else 3 if streams > 4 else 4
        assert registers * THREADS * blocks <= REGISTERS, name
        # An element's numbers, with their double arithmetic, are computed once per tensor or chunk, and may need some.
        assert spills == 0 and stack <= (64 if arguments.startswith(("Update", "Norms")) else 0), name
        assert not any(operation in ("LD", "ST") for operation, _ in accesses), name  # generic addressing


def test_encoding_reads_and_writes_at_full_width(kernels):
    """Own values are added first or later; with residuals; decoded or only summed; in fp32 and in two half types."""
    for codec, quads, accesses in of_codecs(kernels, "EncodeSum"):
        wide, half = accesses["LDG", 128], accesses["LDG", 64]
        assert wide >= 4 * quads and half >= 6 * quads, (codec, accesses)
        wide, half = accesses["STG", 128], accesses["STG", 64]
        units = collections.Counter({unit_width(codec): 2})
        assert wide >= 3 * quads + units[128] and half >= 6 * quads + units[64], (codec, accesses)
        assert accesses["STG", 32] >= units[32], (codec, accesses)


def test_decoding_reads_and_writes_at_full_width(kernels):
    for codec, quads, accesses in of_codecs(kernels, "Decode"):
        assert accesses["STG", 128] >= 2 * quads and accesses["STG", 64] >= 4 * quads, (codec, accesses)
        assert accesses["LDG", unit_width(codec)] >= 1, (codec, accesses)


@pytest.mark.parametrize("name", STREAMS)
def test_optimizers_read_and_write_at_full_width(kernels, name):
    streams, written = STREAMS[name]
    found = {key: k for key, k in kernels.items() if key[2].startswith(name) and key[0] in ARCHITECTURES}
    assert sum(key[2].endswith("false") for key in found) == 2 * len(ARCHITECTURES)  # for short and for long lists
    for *_, accesses in found.values():
        assert accesses["LDG", 128] >= streams and accesses["LDG", 64] >= 2 * streams, accesses
        assert accesses["STG", 128] >= written and accesses["STG", 64] >= 2 * written, accesses
