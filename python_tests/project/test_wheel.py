"""A wheel as its user has it: DLTRAIN_WHEEL names it, and DLTRAIN_PYTHON a Python that has only the wheel and torch."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WHEEL = os.environ.get("DLTRAIN_WHEEL", "")
PYTHON = os.environ.get("DLTRAIN_PYTHON", "")

CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

pytestmark = pytest.mark.skipif(not (WHEEL and PYTHON), reason="needs DLTRAIN_WHEEL and DLTRAIN_PYTHON; CI has them")

USER = """
import torch
from torch import Tensor, nn

import dltrain_ext
from dltrain_ext import amp, codecs, comm, ddp, fsdp, info, optim, reference, sim


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.ones(2, 4)).square().sum()
    return loss


def train(name: str) -> float:
    model = nn.Linear(4, 3)
    optimizer: torch.optim.Optimizer = {"AdamW": optim.AdamW, "SGD": optim.SGD, "LARS": optim.LARS}[name](
        model.parameters(), lr=0.01
    )
    scaler = amp.LossScaler("cpu")
    before = loss_of(model)
    scaler.scale(before).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    return (loss_of(model) - before).item()


assert all(train(name) < 0 for name in ("AdamW", "SGD", "LARS"))

gradient = torch.linspace(-1, 1, 1000)
residual: Tensor = codecs.zero_residual(gradient)
message: codecs.Encoded = codecs.encode(gradient, "int8", residual=residual)
torch.testing.assert_close(codecs.decode(message) + residual, gradient)

comm.verify("ring", 4)
plan: str = str(comm.plan("ring", 1, 4))
network = sim.Network(bandwidth=1e9, latency=1e-5)
seconds: float = sim.simulate("ring", 8, 1_000_000, codec="int8", network=network).seconds
assert plan and seconds > 0

version: str = dltrain_ext.__version__
facts: dict[str, str] = info.collect()
assert facts["dltrain_ext"] == version
print(ddp.allreduce_hook, fsdp.register, reference.adamw_)
"""


def run(*command: str, folder: Path) -> str:
    """Run a program in a folder without the checkout; return its output. Warnings fail, except torch's about NumPy."""
    warnings = {"PYTHONWARNINGS": "error,ignore:Failed to initialize NumPy:UserWarning"}
    done = subprocess.run(command, cwd=folder, env=CLEAN | warnings, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    return done.stdout


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(USER)
    return tmp_path / "program.py"


def test_a_wheel_contains_the_package_and_nothing_else():
    package = {path.relative_to(ROOT) for end in ("py", "pyi") for path in (ROOT / "dltrain_ext").rglob(f"*.{end}")}
    wanted = {str(path) for path in package} | {"dltrain_ext/py.typed", "dltrain_ext/_build_info.py"}
    wanted.add(f"dltrain_ext/_C{sysconfig.get_config_var('EXT_SUFFIX')}")
    named = [name for name in zipfile.ZipFile(WHEEL).namelist() if not name.endswith("/")]
    info = {name for name in named if ".dist-info/" in name}
    assert set(named) - info == wanted
    kept = {name.split("/", 1)[1] for name in info}
    assert kept == {"METADATA", "RECORD", "WHEEL", "licenses/LICENSE", "top_level.txt"}


def test_info_needs_only_torch(tmp_path):
    printed = run(PYTHON, "-m", "dltrain_ext.info", folder=tmp_path)
    assert "instruction set" in printed and "site-packages" in printed


def test_a_program_runs(program, tmp_path):
    run(PYTHON, str(program), folder=tmp_path)


def test_a_program_passes_the_type_check(program, tmp_path):
    """mypy finds the types in the wheel, as in any installed package."""
    seen_as = ["--python-executable", PYTHON, "--cache-dir", str(ROOT / ".mypy_cache")]
    typed = [sys.executable, "-m", "mypy", "--strict", *seen_as, str(program)]
    assert "Success" in run(*typed, folder=tmp_path)
