"""The stubs of the compiled module, compared with it; mypy's stubtest does not see bound functions' arguments."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from dltrain_ext import _C

STUB = ast.parse((Path(__file__).parents[2] / "dltrain_ext" / "_C.pyi").read_text())
CLASSES = [node for node in STUB.body if isinstance(node, ast.ClassDef)]
FUNCTIONS = [node for node in STUB.body if isinstance(node, ast.FunctionDef)]
UNTYPED = {"__doc__", "__module__", "__repr__", "__str__", "_pybind11_conduit_v1_"}


def as_bound(bound) -> ast.FunctionDef:
    """Return the signature that pybind11 writes into the docstring of a function or method."""
    line, *_ = inspect.getdoc(bound).splitlines()
    (function,) = ast.parse(f"def {line}: ...").body
    return function


def named(function: ast.FunctionDef) -> list[str]:
    """Return the parameters as they can be passed: '/' for each without a name, '*' before keyword-only ones."""
    given = function.args
    assert given.vararg is None and given.kwarg is None, f"{function.name}: C++ functions take no *args or **kwargs"
    positional = ["/"] * len(given.posonlyargs) + [one.arg for one in given.args]
    defaults = [""] * (len(positional) - len(given.defaults)) + [f"={ast.unparse(one)}" for one in given.defaults]
    found = [name + default for name, default in zip(positional, defaults, strict=True)]
    for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append(f"* {one.arg}" + (f"={ast.unparse(default)}" if default else ""))
    # pybind11 names unnamed parameters arg0, arg1, ...; and no caller passes a method's self by name.
    return ["/" if name == "self" or re.fullmatch(r"arg\d+", name) else name for name in found]


def members(node: ast.ClassDef) -> dict[str, ast.stmt]:
    found = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
    found |= {one.target.id: one for one in node.body if isinstance(one, ast.AnnAssign)}
    return found


def decorators(node: ast.stmt) -> list[str]:
    return [ast.unparse(one) for one in getattr(node, "decorator_list", [])]


def test_every_name_is_in_the_stubs():
    typed = {node.name for node in CLASSES + FUNCTIONS} | {
        n.target.id for n in STUB.body if isinstance(n, ast.AnnAssign)
    }
    assert typed == {name for name in dir(_C) if not name.startswith("__")}


@pytest.mark.parametrize("node", FUNCTIONS, ids=lambda node: node.name)
def test_functions_have_the_parameters_of_the_stubs(node):
    assert named(node) == named(as_bound(getattr(_C, node.name)))


@pytest.mark.parametrize("node", CLASSES, ids=lambda node: node.name)
def test_members_have_the_types_and_parameters_of_the_stubs(node):
    real = vars(getattr(_C, node.name))
    typed = members(node)
    constructed = hasattr(real.get("__init__"), "__func__")  # otherwise it is pybind11's, which raises
    assert typed.keys() == real.keys() - UNTYPED - (set() if constructed else {"__init__"})
    for name, member in typed.items():
        bound = real[name]
        assert ("property" in decorators(member)) == isinstance(bound, property), name
        assert ("staticmethod" in decorators(member)) == isinstance(bound, staticmethod), name
        if isinstance(member, ast.FunctionDef) and not isinstance(bound, property):
            assert named(member) == named(as_bound(getattr(bound, "__func__", bound))), name


@pytest.mark.parametrize("node", CLASSES, ids=lambda node: node.name)
def test_bases_are_in_the_stubs(node):
    typed = [ast.unparse(base) for base in node.bases]
    real = [base.__name__ for base in getattr(_C, node.name).__bases__ if base.__module__ == _C.__name__]
    assert typed == real
