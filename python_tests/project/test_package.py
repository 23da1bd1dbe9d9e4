"""Installing, importing and the info command."""

import importlib
import re
import runpy
import shutil
import sys
from pathlib import Path

import commands
import conftest
import pytest
import torch

import dltrain_ext
from dltrain_ext import _build_info, codecs, comm

ROOT = Path(__file__).parents[2]
PACKAGE = Path(dltrain_ext.__path__[0])


@pytest.mark.parametrize("command", ["bdist_wheel", "dist_info", "editable_wheel"])
def test_the_error_of_a_build_without_torch_names_the_command(command, tmp_path):
    hidden = (
        f"import sys; sys.modules['torch'] = None; sys.argv = ['setup.py', '{command}']; exec(open('setup.py').read())"
    )
    done = commands.python("-c", f"__file__ = 'setup.py'; {hidden}", cwd=ROOT)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "Run: pip install torch && pip install ." in line
    assert "--no-build-isolation" in line


def test_another_torch_is_an_error_that_names_the_command(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "1.0.0")
    monkeypatch.delitem(sys.modules, "dltrain_ext._ops")
    built = re.escape(f"built against torch {_build_info.TORCH}, and this is torch 1.0.0")
    with pytest.raises(ImportError, match=f"{built}.*pip install"):
        importlib.import_module("dltrain_ext._ops")


def checkout(folder):
    """Make a checkout that was never built, as after `pip install .`, which puts the compiled part elsewhere."""
    ignore = shutil.ignore_patterns("*.so", "_build_info.py", "__pycache__")
    shutil.copytree(ROOT / "dltrain_ext", folder / "dltrain_ext", ignore=ignore)
    shutil.copytree(ROOT / "benchmarks", folder / "benchmarks", ignore=ignore)
    return folder


@pytest.mark.needs("matplotlib", "rich")
def test_in_an_unbuilt_checkout_the_installed_package_is_used(tmp_path):
    script = (
        "import runpy, sys; sys.argv[1:] = ['--list']\n"
        "try: runpy.run_module('benchmarks', run_name='__main__', alter_sys=True)\n"
        "finally: print(sys.modules['dltrain_ext.comm'].__file__, file=sys.stderr)"
    )
    done = commands.python("-c", script, cwd=checkout(tmp_path), PYTHONPATH=str(PACKAGE.parent))
    assert done.returncode == 0, done.stderr
    assert "allreduce" in done.stdout and "optim" in done.stdout
    assert str(PACKAGE / "comm" / "__init__.py") in done.stderr.split()


def test_the_error_without_any_build_names_the_command(tmp_path):
    # Only the checkout and torch's own site-packages are visible, without an installed dltrain_ext.
    blocked = (
        "import sys; from pathlib import Path; "
        "sys.path = ['.'] + [p for p in sys.path[1:] if not any(Path(p, 'dltrain_ext').glob('_C*'))]; "
        "import dltrain_ext"
    )
    clean = checkout(tmp_path)
    site = tmp_path / "site"
    site.mkdir()
    for entry in Path(torch.__file__).parents[1].iterdir():
        if "dltrain" not in entry.name:
            (site / entry.name).symlink_to(entry)
    done = commands.python("-S", "-c", blocked, cwd=clean, PYTHONPATH=str(site))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "dltrain_ext is not built" in last and "pip install ." in last


def test_info(capsys):
    runpy.run_path(str(PACKAGE / "info.py"), run_name="__main__")
    said = capsys.readouterr().out
    for part in (
        dltrain_ext.__version__,
        torch.__version__,
        *comm.ALGORITHMS,
        *codecs.CODECS,
        "instruction set",
        "build flags",
    ):
        assert part in said


def test_tests_whose_packages_are_missing_are_skipped_by_name(tmp_path):
    hidden = f"import sys; sys.modules.update(dict.fromkeys({conftest.OPTIONAL}))"  # None makes their import fail
    (tmp_path / "hiding.py").write_text(hidden)
    plugins = ["-p", "hiding", "-p", "no:hypothesispytest", "-p", "no:cacheprovider"]
    done = commands.python("-m", "pytest", *plugins, "--collect-only", "-q", cwd=ROOT, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout
    skipped = set(re.findall(r"^SKIPPED \[\d+\] \S+: (\w+) is not installed", done.stdout, re.M))
    assert skipped >= {"numpy", "rich", "matplotlib", "yaml"}
    assert "test_adamw.py::test_groups_have_their_own_options" in done.stdout  # has other tests with hypothesis


@pytest.mark.needs("matplotlib", "rich")
def test_benchmarks_quick(tmp_path):
    """Run one small case as a user starts it; CI runs all of them."""
    small = ["allreduce", "-b", "4K", "-e", "4K", "-n", "3", "--ranks", "2"]
    done = commands.python("-m", "benchmarks", *small, "--json", tmp_path / "out.json", "--plot", tmp_path, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gloo" in done.stdout and "WRONG" not in done.stdout
    assert (tmp_path / "allreduce.png").stat().st_size > 1000
    assert '"provenance"' in (tmp_path / "out.json").read_text()


@pytest.mark.needs("matplotlib", "rich")
def test_benchmarks_report_wrong_options():
    done = commands.benchmarks("nonsense")
    assert done.returncode == 2 and "optim" in done.stderr and "allreduce" in done.stderr
    done = commands.benchmarks("allreduce", "--algorithms", "rign")
    assert done.returncode == 2 and "ring, tree" in done.stderr
