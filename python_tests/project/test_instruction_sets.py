"""One build for all processors of an architecture: the selected instruction set; no code of one is in another."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dltrain_ext
from dltrain_ext import _ops

ROOT = Path(__file__).parents[2]
BUILD = json.loads((ROOT / "csrc" / "build.json").read_text())
VARIABLE = "DLTRAIN_INSTRUCTION_SET"
WORK = """
import hashlib, sys
sys.modules["numpy"] = None  # whose wheels want newer processors than ours
import torch
from dltrain_ext import _ops, codecs, optim
torch.manual_seed(0)
params = [torch.nn.Parameter(torch.randn(n)) for n in (1, 7, 1000, 30001)]
for optimizer in (optim.AdamW(params, amsgrad=True), optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)):
    for step in range(3):
        for p in params:
            p.grad = torch.sin(p.detach() + step)
        optimizer.step()
both = ("nearest", "stochastic")
wires = [codecs.encode(params[-1], codec, rounding=rounding).wire for codec in codecs.CODECS for rounding in both]
bits = b"".join(bytes(tensor.detach().view(torch.uint8).tolist()) for tensor in [*params, *wires])
print(_ops.instruction_set(), hashlib.sha256(bits).hexdigest())
"""


def run(*prefix: str, **environment: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(Path(dltrain_ext.__path__[0]).parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [*prefix, sys.executable, "-c", WORK],
        env={**os.environ, "PYTHONPATH": path, "ATEN_CPU_CAPABILITY": "default", **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_every_set_gives_the_same_bits():
    results = {}
    for name in _ops.instruction_sets():
        done = run(**{VARIABLE: name})
        assert done.returncode == 0, done.stderr
        chosen, results[name] = done.stdout.split()
        assert chosen == name
    assert len(set(results.values())) == 1, results
    assert "portable" in results


@pytest.mark.skipif(bool(os.environ.get(VARIABLE)), reason=f"{VARIABLE} is set")
def test_the_best_is_chosen():
    assert _ops.instruction_set() == _ops.instruction_sets()[0]


def test_an_unusable_set_is_an_error_at_import():
    done = run(**{VARIABLE: "avx1024"})
    assert done.returncode != 0
    assert f"{VARIABLE} on this processor: expected one of" in done.stderr and "got 'avx1024'" in done.stderr


needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")


@needs_x86
@pytest.mark.exhaustive
@pytest.mark.skipif(not shutil.which("qemu-x86_64"), reason="needs qemu-user: apt install qemu-user")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the address sanitizer does not run under qemu")
@pytest.mark.parametrize(("processor", "chosen"), [("Nehalem", "portable"), ("Haswell", "avx2")])
def test_no_illegal_instruction(processor, chosen):
    """An emulated processor without AVX, or without AVX-512, ends a program that uses it."""
    done = run("qemu-x86_64", "-cpu", processor)
    assert done.returncode == 0, done.stderr
    here = run(**{VARIABLE: "portable"}).stdout.split()[1]
    assert done.stdout.split() == [chosen, here]


@needs_x86
@pytest.mark.exhaustive
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.parametrize("name", BUILD["instruction_sets"]["x86_64"])
def test_loops_share_no_function(name, tmp_path):
    """The linker keeps one copy of an inline function, which must not use a special instruction set."""
    flags = [flag for flag in BUILD["flags"] if flag != "-fopenmp"] + BUILD["instruction_sets"]["x86_64"][name]
    command = ["g++", *flags, f"-DDLT_INSTRUCTION_SET={name}", "-Icsrc", "-c", "csrc/kernels/cpu/loops.cpp"]
    subprocess.run([*command, "-o", str(tmp_path / "loops.o")], cwd=ROOT, check=True)
    listed = subprocess.run(["nm", "-C", str(tmp_path / "loops.o")], capture_output=True, text=True, check=True).stdout
    symbols = dict(reversed(found) for found in re.findall(r"^[0-9a-f ]{16} (\S) (.+)$", listed, re.M))
    shared = {symbol for symbol, kind in symbols.items() if (kind.isupper() or kind in "wvu") and kind != "U"}
    assert shared == {f"dltrain::cpu::{name}::loops"}
    needed = {symbol for symbol, kind in symbols.items() if kind == "U"}
    of_libc = {"memcpy", "memset", "memmove", "pow"}  # the last for the powers of beta, once a tensor
    assert needed <= of_libc, "other functions have to be inlined"
