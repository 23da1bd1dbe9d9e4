"""The modules and their dependencies, checked by the includes and imports of the sources."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# C++ module -> the modules that it may use
CPP_MODULES = {
    "core": set(),
    "math": {"core"},
    "kernels": {"math", "core"},
    "comm": {"kernels", "core"},
    "ps": {"comm", "kernels", "core"},
    "bindings": {"ps", "comm", "kernels", "core"},
    "tests": {"ps", "comm", "kernels", "math", "core"},
}

# Inside a module: part -> the parts that it may use.
PARTS = {
    "comm": {
        "plan": set(),
        "program": {"plan"},
        "transport": {"plan"},  # error texts of messages name their call
        "fault": set(),
        "run": {"program", "plan", "transport", "fault"},
    },
    "ps": {"core": set(), "run": {"core"}},
}

# Python module -> the modules of the package that it may use
MODULES = {
    "__init__": {"amp", "codecs", "comm", "ddp", "elastic", "kfac", "local_sgd", "monitor", "optim", "population"}
    | {"sim", "_build_info"},
    "_ops": {"_C", "_build_info"},
    "_arguments": set(),
    "reference": set(),
    "codecs": {"_ops", "_arguments"},
    "comm": {"codecs", "_ops", "_arguments"},
    "optim": {"comm", "codecs", "_ops", "_arguments"},
    "amp": {"optim", "_ops", "_arguments"},
    "compress": {"comm", "codecs", "_ops", "_arguments"},
    "ddp": {"compress", "comm", "amp", "_ops", "_arguments"},
    "fsdp": {"compress", "comm", "_arguments"},
    "kfac": {"comm", "codecs", "_arguments"},
    "population": {"comm", "_arguments"},
    "monitor": {"compress", "comm", "_arguments"},
    "elastic": {"comm", "_arguments"},
    "local_sgd": {"elastic", "ps", "compress", "comm", "optim", "_ops", "_arguments"},
    "ps": {"elastic", "amp", "optim", "comm", "codecs", "_ops", "_arguments"},
    "lightning": {"ddp", "local_sgd", "compress", "amp"},
    "sim": {"comm", "codecs", "_ops", "_arguments"},
    "selftest": {"ddp", "sim", "info", "amp", "optim", "comm", "codecs", "reference", "_ops"},
    "advise": {"selftest", "sim", "amp", "optim", "comm", "codecs"},
    "info": {"codecs", "comm", "_ops", "__init__", "_build_info"},
}
PUBLIC = MODULES.keys() - {"__init__", "_ops", "_arguments", "compress"}


def sources() -> list[Path]:
    return [path for suffix in ("h", "cpp", "cu", "cuh") for path in sorted((ROOT / "csrc").rglob(f"*.{suffix}"))]


def wrong_includes(path: Path) -> Iterator[str]:
    module, part, *_ = path.relative_to(ROOT / "csrc").parts
    text = path.read_text()
    for included in re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.M):
        its_module, its_part, *_ = *included.split("/"), ""
        if not (ROOT / "csrc" / included).is_file():
            yield f"{included} is not written from csrc/ on"
        elif its_module not in CPP_MODULES[module] | {module}:
            yield f"{module} may not use {included}"
        elif module in PARTS and its_module == module and its_part not in PARTS[module][part] | {part}:
            yield f"{module}/{part} may not use {included}"
    for included in re.findall(r"^\s*#\s*include\s+<([^>]+)>", text, re.M):
        if module != "bindings" and re.match(r"(torch|ATen|c10|caffe2|pybind11)/|Python\.h|pyconfig\.h", included):
            yield f"{module} may not use torch or Python, but includes <{included}>"


def violations(paths: Iterable[Path], wrong: Callable[[Path], Iterable[str]]) -> list[str]:
    return [f"{path.relative_to(ROOT)}: {text}" for path in paths for text in wrong(path)]


def test_includes_are_allowed_dependencies():
    assert len(sources()) > 100
    assert not violations(sources(), wrong_includes)


def test_every_cpp_module_is_listed():
    assert {path.relative_to(ROOT / "csrc").parts[0] for path in sources()} <= CPP_MODULES.keys()


@pytest.mark.parametrize("folder", ["comm/plan", "ps/core"])
def test_topologies_and_clocks_include_no_codec_and_no_transport(folder):
    for path in (ROOT / "csrc" / folder).iterdir():
        assert not re.findall(rf'#include "(?!{folder}/|core/)', path.read_text()), path


def imports(path: Path) -> set[str]:
    """Return the modules of dltrain_ext that a file imports; 'dltrain_ext' itself is '__init__'."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            children = [f"{node.module}.{alias.name}" for alias in node.names]
            names = children if node.module == "dltrain_ext" else [node.module]
        else:
            continue
        for name in names:
            package, *rest = name.split(".")
            if package == "dltrain_ext":
                module = rest[0] if rest else "__init__"
                exists = (ROOT / "dltrain_ext" / module).is_dir() or (ROOT / "dltrain_ext" / f"{module}.py").is_file()
                found.add(module if exists or module in ("_C", "_build_info") else "__init__")
    return found


def package_files() -> list[Path]:
    return [path for path in sorted((ROOT / "dltrain_ext").rglob("*.py")) if path.name != "_build_info.py"]


def wrong_imports(path: Path) -> Iterator[str]:
    module = path.relative_to(ROOT / "dltrain_ext").parts[0].removesuffix(".py")
    for imported in sorted(imports(path) - MODULES[module] - {module}):
        yield f"{module} may not use {imported}"
    if module != "_ops" and re.search(r"^[^#]*\btorch\.ops\.|dltrain_ext\._C", path.read_text(), re.M):
        yield "_ops alone names the compiled part"


def test_imports_are_allowed_dependencies():
    assert len(package_files()) > 40
    assert not violations(package_files(), wrong_imports)


@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_benchmarks_and_examples_import_public_modules(folder):
    for path in sorted((ROOT / folder).rglob("*.py")):
        assert imports(path) <= PUBLIC | {"__init__"}, path
