"""README.md and docs/: their code runs, the messages that they quote exist, and they build without a warning."""

import contextlib
import gc
import io
import json
import os
import re
import shlex
import statistics
from functools import cache
from pathlib import Path

import pytest
import torch
from optimizers import FUSED
from ranks import ROOT, run_ranks
from torch.nn.parallel import DistributedDataParallel

from benchmarks.__main__ import parse
from dltrain_ext import amp, comm, ddp, optim
from dltrain_ext.optim.rule import RULES

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
SHOWING = [page for page in PAGES if "```python" in page.read_text()]
IN_A_GROUP = {
    "README.md",
    "all_reduce.md",
    "kfac.md",
    "local_sgd.md",
    "monitoring.md",
    "parameter_server.md",
    "recipes.md",
    "schedules.md",
    "techniques.md",
}  # of two ranks


def run_page(rank: int, world_size: int, page: Path, folder: str) -> None:
    """Run the Python blocks of a page, including hidden ones, one after another in one namespace."""
    from sybil import Sybil
    from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

    os.chdir(folder)
    for example in Sybil([PythonCodeBlockParser(), SkipParser()]).parse(page).examples():
        example.evaluate()


@pytest.mark.parametrize("page", SHOWING, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sybil")
    if page.name in IN_A_GROUP:
        run_ranks(2, run_page, page, str(tmp_path), timeout=600)
    else:
        monkeypatch.chdir(tmp_path)
        run_page(0, 1, page, str(tmp_path))


def test_printed_plans_are_up_to_date() -> None:
    text = (DOCS / "all_reduce.md").read_text()
    printed = re.findall(r"<!-- printed -->\n```\n(.*?)```", text, re.DOTALL)
    calls = re.findall(r"^print\((comm\.plan\(.*?\))\)", text, re.M)
    assert len(printed) == 2
    assert [drawn.strip() for drawn in printed] == [str(eval(call, {"comm": comm})).strip() for call in calls]


@cache
def sources() -> dict[Path, str]:
    """Return the source by file, with adjacent string literals of Python or C++ joined."""
    files = [ROOT / "setup.py", *(ROOT / "dltrain_ext").rglob("*.py")]
    for suffix in ("h", "cpp", "cu", "cuh"):
        files += [path for path in (ROOT / "csrc").rglob(f"*.{suffix}") if "tests" not in path.parts]
    return {path: re.sub(r'"\s+f?"', "", path.read_text()) for path in files}


def says(source: str, parts: list[str]) -> bool:
    """Return whether the source contains the parts in this order, each near the previous one."""
    near = ".{0,1000}?".join(re.escape(part) for part in parts)
    return re.search(near, source, re.DOTALL) is not None


def quoted() -> list[str]:
    return re.findall(r"^- `(.+)`$", (DOCS / "troubleshooting.md").read_text(), re.M)


@pytest.mark.parametrize("message", quoted())
def test_an_explained_message_is_in_the_code(message: str) -> None:
    parts = [part for piece in message.split("…") if (part := piece.strip(" :,.;'"))]
    assert parts, "the message has no fixed part"
    assert any(says(source, parts) for source in sources().values()), parts


def test_messages_are_explained_and_unknown_ones_are_not_found() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    assert len(quoted()) == len(re.findall(r"^- ", text, re.M)) > 50
    assert not any(says(source, ["model: expected a DistributedDataSerial, got "]) for source in sources().values())


def test_the_tests_of_the_contracts_exist() -> None:
    text = (DOCS / "contracts.md").read_text()
    named = re.findall(r"`(\w+/test_\w+\.py)::(test_\w+)`", text)
    assert len(named) > 30 and set(re.findall(r"## C(\d+):", text)) == {str(number) for number in range(1, 14)}
    for file, test in named:
        assert f"def {test}(" in (ROOT / "python_tests" / file).read_text(), f"{file}::{test}"
    cpp = "".join(path.read_text() for path in (ROOT / "csrc" / "tests").rglob("*.cpp"))
    for suite, test in re.findall(r"`([A-Z]\w+)\.([A-Z]\w+)`", text):
        assert re.search(rf"TEST\w*\({suite}, {test}\)", cpp), f"{suite}.{test}"


def table(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, without the table's header."""
    below = (DOCS / page).read_text().split(f"## {heading}\n")[1]
    found = re.search(r"(^\|.*\n)+", below, re.M)
    assert found, heading
    lines = found.group().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_states_have_the_documented_size() -> None:
    rows = table("memory.md", "Optimizer state")
    rows = [(call, *cells) for calls, *cells in rows for call in re.split(", (?=`)", calls)]
    assert {re.sub(r"[`(].*", "", call.strip("`")) for call, *_ in rows} == set(FUSED)
    for call, *said in rows:
        dtypes, choices = ("float32", "bfloat16", "bfloat16", "float16"), ("auto", "auto", "8bit", False)
        for dtype, masters, expected in zip(dtypes, choices, said, strict=True):
            if not expected:
                assert not RULES[call.strip("`").lower().split("(")[0]].compact
                continue
            weight = torch.nn.Parameter(torch.zeros(1000, 1000, dtype=getattr(torch, dtype)))
            weight.grad = torch.zeros_like(weight)
            name, _, options = call.strip("`").rstrip(")").partition("(")
            given = eval(f"dict({options})")
            optimizer = getattr(optim, name)([weight], lr=0.1, master_weights=masters, **given)
            optimizer.step()
            tensors = [value for value in optimizer.state[weight].values() if torch.is_tensor(value)]
            kept = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
            assert sum(kept.values()) / weight.numel() == pytest.approx(float(expected), abs=1e-4), (call, dtype)


def bytes_of_feedback(rank: int, world_size: int) -> list[float]:
    """Return bytes per element for each number of the table: of all living tensors, minus a run without feedback."""
    found = []
    for feedback, dtype in ((False, "fp32"), (True, "fp32"), (True, "bf16")):
        for scaler in (None, amp.LossScaler("cpu")):
            model = DistributedDataParallel(torch.nn.Linear(512, 512, bias=False))
            state = ddp.register(model, "int8", error_feedback=feedback, feedback_dtype=dtype, scaler=scaler)
            for _ in range(2):
                loss = model(torch.ones(1, 512)).sum()
                (loss if scaler is None else scaler.scale(loss)).backward()
            del loss
            gc.collect()
            alive = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
            kept = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in alive}
            found.append(sum(kept.values()) / 512**2)
            state.communicator.close()
            del model, state, alive
    return [each - found[0] for each in found]


def test_feedback_has_the_documented_size() -> None:
    said = [int(cell) for row in table("memory.md", "The DDP hook") for cell in row[1:]]
    assert run_ranks(2, bytes_of_feedback, fresh=True)[0] == pytest.approx(said, abs=0.1)


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "choosing.md"], ids=lambda page: page.name)
def test_times_are_those_of_the_measured_tables(page: Path) -> None:
    kept = set(re.findall(r"([\d.]+) ms", (DOCS / "measured.md").read_text()))
    times = [
        time
        for found in re.findall(r"([\d.]+)(?: (?:to|and) ([\d.]+))? ms", page.read_text())
        for time in found
        if time
    ]
    assert len(times) > 12 and set(times) <= kept


# Sections of measured.md, and which files in benchmarks/results their tables are from.
SOURCES = {
    "Optimizers": "cpu/*",
    "Muon": "cpu/muon.json",
    "All-reduces within a host": "allreduce/shm-*",
    "All-reduces over loopback": "allreduce/allreduce-loopback.json",
    "All-reduces between hosts": "allreduce/allreduce-4-hosts-*",
    "The other collectives": "collectives/*",
    "Two levels": "allreduce/allreduce-2-hosts-*",
    "DDP": "ddp/*",
    "Sharded training": "sharded/*",
    "Population based training": "population/copy-*",
    "The cost of techniques": "techniques.json",
    "The parameter server": "store/*",
    "K-FAC": "kfac/*",
    "On a GPU": "cuda/*",
    "Training over slow links": "local_sgd/*",
    "Jobs whose members come and go": "membership/*",
}


def saved_seconds(pattern: str) -> list[float]:
    """Return the medians and the longest times of all sides in these files, and their other figures."""
    found: list[float] = []
    for path in sorted((ROOT / "benchmarks" / "results").glob(pattern)):
        cases = json.loads(path.read_text()).get("cases", {}) if path.suffix == ".json" else {}
        for row in (row for case in cases.values() for row in case["rows"]):
            if row["samples"]:
                found += [statistics.median(row["samples"]), max(row["samples"])]
            found += [figure for figure in row["figures"].values() if isinstance(figure, int | float)]
    return found


@pytest.mark.parametrize("section", SOURCES)
def test_measured_times_are_those_of_saved_results(section: str) -> None:
    """A median that leaves out some steps may differ by 1 %."""
    text = (DOCS / "measured.md").read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    saved, units = saved_seconds(SOURCES[section]), {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
    cells = [cell for line in text.splitlines() if line.startswith("|") for cell in line.split("|")]
    times = [time for cell in cells for time in re.findall(r"(?:^ *|at most )([\d,.]*\d) (s|ms|µs)\b", cell)]
    assert times
    for number, unit in times:
        value = float(number.replace(",", ""))
        tolerance = 0.5 * 10.0 ** -len(number.partition(".")[2]) + 0.01 * value
        assert any(abs(seconds / units[unit] - value) <= tolerance for seconds in saved), f"{number} {unit}"


def commands(text: str) -> list[list[str]]:
    """Return the commands `python -m benchmarks` of a page, as lists of words, also those that another one runs."""
    found = [shlex.split(command) for command in re.findall(r"`(python -m benchmarks[^`]*)`", text)]
    found += [shlex.split(line) for line in text.splitlines() if line.startswith("python -m benchmarks")]
    parts = [part for words in found for part in " ".join(words).split("python -m benchmarks")[1:]]
    return [part.split() for part in parts]


@pytest.mark.needs("rich")
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page.read_text())], ids=lambda page: page.name)
def test_benchmark_commands_have_valid_options(page: Path) -> None:
    for words in commands(page.read_text()):
        parse([*words, "python"] if words[-1:] == ["--"] else words)


def build(rank: int, world_size: int, folder: Path) -> tuple[int, str]:
    from sphinx.cmd.build import main

    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = main(["-W", "-n", "-q", "--keep-going", str(DOCS), str(folder)])
    return status, said.getvalue()


def test_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    ((status, said),) = run_ranks(1, build, tmp_path, fresh=True, timeout=600)
    assert status == 0, said
    for page in DOCS.rglob("*.md"):
        assert (tmp_path / page.relative_to(DOCS).with_suffix(".html")).stat().st_size > 0


def shown(page: Path) -> str:
    """Return the text of a page without comments."""
    return re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    folders = "examples|benchmarks|csrc|dltrain_ext|docker|docs|python_tests"
    for name in re.findall(rf"(?<![\w/])(?:\.\./)*((?:{folders})/[\w./-]*\w)", shown(page)):
        assert (ROOT / name).exists(), name


def test_links_of_the_readme_exist() -> None:
    """Sphinx checks those of docs/."""
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", shown(ROOT / "README.md"))
    assert len(links) > 15
    for link in links:
        assert (ROOT / link).exists(), link
    pages = [page for page in DOCS.rglob("*.md") if page.parent.name != "decisions"]  # these have their own index
    assert {str(page.relative_to(ROOT)) for page in pages} - set(links) == {
        "docs/index.md",
        "docs/reference/api.md",
    }
