"""The benchmark simulate: its output and plots, that they are marked as simulated, and the saved comparisons."""

import json
from pathlib import Path

import commands
import pytest
from ranks import ROOT

from benchmarks.report import number
from benchmarks.simulated import topologies
from dltrain_ext import codecs, comm, sim

pytestmark = pytest.mark.needs("matplotlib", "rich")

RESULTS = ROOT / "benchmarks" / "results" / "simulate"
PARTS = ["all-reduce", "topologies", "break-even", "training", "slow-links", "published", "measured"]


def run(*arguments: object) -> commands.Done:
    return commands.benchmarks("simulate", "--quick", *arguments)


def tables(heading: str) -> list[list[list[str]]]:
    """Return the cells of the tables below a heading of docs/simulation.md, without their headers."""
    section = (ROOT / "docs" / "simulation.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    found = [part.splitlines()[2:] for part in section.strip().split("\n\n") if part.startswith("|")]
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in lines] for lines in found]


def sections(path: Path) -> dict[str, list[dict[str, object]]]:
    simulation = json.loads(path.read_text())["cases"]["simulate"]
    assert simulation["simulated"] and "SIMULATED" in simulation["title"]
    return {name: section["rows"] for name, section in simulation["sections"].items()}


def test_all_parts_are_shown_as_simulated(tmp_path: Path) -> None:
    done = run("--json", tmp_path / "out.json", "--plot", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"simulated: {part}" in done.stdout for part in PARTS)
    assert "peer/ours" not in done.stdout  # nor any other heading of timed results
    found = sections(tmp_path / "out.json")
    assert list(found) == PARTS
    assert not any("samples" in row for rows in found.values() for row in rows)
    for name in ("simulated-allreduce.png", "simulated-topologies.png", "simulated-efficiency.png"):
        assert (tmp_path / name).stat().st_size > 10_000

    assert {row["plan"] for row in found["all-reduce"]} == set(comm.ALGORITHMS)
    exact = {name for name in comm.ALGORITHMS if comm.plan(name, 0, 1).exact}
    lossy = {row["plan"] for row in found["all-reduce"] if row["codec"] == "int8"}
    assert lossy == set(comm.ALGORITHMS) - exact
    efficiency = {
        (row["model"], row["link, Gbit/s"], row["codec"], row["ranks"]): row["efficiency %"]
        for row in found["training"]
    }
    assert len(efficiency) == 2 * 2 * 2 * 4  # models, links, codecs, world sizes
    for (model, link, codec, ranks), percent in efficiency.items():
        assert 0 < percent <= 100
        assert percent <= efficiency[model, 100.0, codec, ranks]
        assert percent <= efficiency[model, link, "int8", ranks]
        assert percent <= efficiency[model, link, codec, 8]


def test_options_select_what_is_simulated(tmp_path: Path) -> None:
    done = run(
        *("--parts", "all-reduce,break-even", "--max-ranks", 12, "--ranks-per-host", 2, "--nbytes", "1M"),
        *("--bandwidth", 1, "--codecs", "raw,sign", "--algorithms", "ring,oneshot", "--memory-bandwidth", "5"),
        *("--json", tmp_path / "out.json"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = sections(tmp_path / "out.json")
    assert list(found) == ["all-reduce", "break-even"]
    sides = [(row["codec"], row["plan"], row["ranks"]) for row in found["all-reduce"]]
    assert sorted(sides) == sorted((c, a, p) for c in ("raw", "sign") for a in ("ring", "oneshot") for p in (2, 4, 8))
    ring = {row["ranks"]: row for row in found["all-reduce"] if (row["codec"], row["plan"]) == ("raw", "ring")}
    assert ring[8]["ms"] > 1e3 * 2 * 3 / 4 * 2**20 / (1e9 / 8)  # the time of a ring of the four hosts
    assert {(row["codec"], row["against"]) for row in found["break-even"]} == {("sign", "raw"), ("sign", "bf16")}
    assert {row["memory GB/s"] for row in found["break-even"]} == {5.0}


def test_the_docs_contain_the_topologies(tmp_path: Path) -> None:
    done = commands.benchmarks("simulate", "--parts", "topologies", "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = sections(tmp_path / "out.json")["topologies"]
    found = {(row["hosts"], row["ranks"], row["what"], row["topology"]): row["ms"] for row in rows}
    many = [(layout, ranks) for layout in ("up to 16", "one per rank") for ranks in (64, 256, 1024)]
    columns = [("one per rank", 4), ("one per rank", 16), *many]
    for what, table in zip(("exchange", "step"), tables("Topologies compared"), strict=True):
        assert [line[0] for line in table] == list(topologies.TOPOLOGIES)
        for name, *cells in table:
            assert cells == [number(found[layout, ranks, what, name]) for layout, ranks in columns]
    for ranks in (4, 16):  # so the docs show them once
        for what in ("exchange", "step"):
            for name in topologies.TOPOLOGIES:
                assert found["up to 16", ranks, what, name] == found["one per rank", ranks, what, name]


def test_the_docs_contain_the_stale_reads() -> None:
    (table,) = tables("Stale reads")
    assert len(table) == 7
    bounds = {cells[0]: None if cells[0] == "None" else int(cells[0]) for cells in table}
    found = {
        name: sim.bounded_staleness(4, staleness=bound, compute=1.0, stragglers=(0.1, 4.0), pushes=400_000)
        for name, bound in bounds.items()
    }
    for name, *cells in table:
        seconds, waiting = found[name].seconds, found[name].waiting
        assert cells == [f"{seconds:.2f}", f"{found['0'].seconds / seconds:.2f}x", f"{100 * waiting:.0f} %"]


def test_the_docs_contain_the_slow_links(tmp_path: Path) -> None:
    done = run("--parts", "slow-links", "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    now, kept = (sections(path)["slow-links"] for path in (tmp_path / "out.json", RESULTS / "simulate-slow-links.json"))
    assert [pytest.approx(row) for row in kept] == now
    found = {}
    for row in kept:
        schedule = (row["sync every"], row["fragments"], row["delay"], row["codec"])
        found.setdefault(schedule, {})[row["Gbit/s"]] = row
    shares, times = tables("Training over slow links")
    assert [tuple(line[:4]) for line in shares] == [tuple(str(part) for part in schedule) for schedule in found]
    for (*_, sent, mean, slow, middle, fast), links in zip(shares, found.values(), strict=True):
        assert (sent, mean) == (f"{number(links[1.0]['MB/step'])} MB", number(links[1.0]["mean Gbit/s"]))
        assert [slow, middle, fast] == [f"{number(row['computing %'])} %" for row in links.values()]
    for sync_every in (100, 500):
        each = {schedule[1:]: links for schedule, links in found.items() if schedule[0] == sync_every}
        assert [tuple(line[:3]) for line in times] == [tuple(str(part) for part in schedule) for schedule in each]
        for (*_, burst, peak, a, b, c, x, y, z), links in zip(times, each.values(), strict=True):
            assert (burst, peak) == (f"{number(links[1.0]['burst GB'])} GB", number(links[1.0]["peak Gbit/s"]))
            assert [a, b, c] == [number(row["all-reduce s"]) for row in links.values()]
            assert [x, y, z] == [number(row["stands still s"]) for row in links.values()]


def test_sites_are_options(tmp_path: Path) -> None:
    done = run(
        *("--parts", "slow-links", "--sites", 2, "--site-parameters", 10**6, "--site-step", 0.5),
        *("--json", tmp_path / "out.json"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    row = sections(tmp_path / "out.json")["slow-links"][0]
    assert (row["sync every"], row["codec"], row["MB/step"]) == (1, "raw", 4)
    assert 0.5 + 4e6 / (0.1e9 / 8) < row["step s"] < 1.1


def test_the_saved_comparison_equals_the_simulated_one(tmp_path: Path) -> None:
    done = run("--parts", "published", "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    now, kept = (sections(path)["published"] for path in (tmp_path / "out.json", RESULTS / "simulate-published.json"))
    assert len(now) == len(kept) > 10
    for row, before in zip(now, kept, strict=True):
        assert row == pytest.approx(before)
        assert all(row[name] for name in ("source", "where", "what", "inputs", "assumed"))
        if row["reported"] is not None:
            assert row["off %"] == pytest.approx(100 * (row["simulated"] / row["reported"] - 1))


def test_the_docs_contain_the_saved_comparison() -> None:
    (table,) = tables("Beside published results")
    kept = [row for row in sections(RESULTS / "simulate-published.json")["published"] if row["reported"] is not None]
    assert [line[-1] for line in table] == [f"{round(row['off %']):+d} %" for row in kept]
    for line, row in zip(table, kept, strict=True):
        digits = 2 if row["unit"] == "x" else 0
        shown = [float(cell.rstrip("x %ms")) for cell in line[2:4]]
        assert shown == [round(row["reported"], digits), round(row["simulated"], digits)]


def test_the_model_predicts_the_measured_times(tmp_path: Path) -> None:
    done = run("--parts", "measured", "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row["what"]: row for row in sections(tmp_path / "out.json")["measured"]}
    assert found["all"]["median off %"] <= 15
    assert found["all"]["figures"] == sum(found[f"{ranks} ranks"]["figures"] for ranks in (2, 3, 4)) > 300
    (table,) = tables("Beside what was measured")
    assert [line[0] for line in table] == list(found)
    for what, figures, median, worst in table:
        row = found[what]
        assert (int(figures), median) == (row["figures"], f"{row['median off %']:.0f} %"), what
        assert worst == f"{row['worst off %']:+.0f} %", what


@pytest.mark.parametrize(
    ("code", "answer", "arguments"),
    [
        (2, f"valid: {', '.join(PARTS)}", ["--parts", "everything"]),
        (2, "'-3' is not a number above 0", ["--bandwidth=-3"]),
        (2, "'fast' is not a number above 0", ["--links", "10,fast"]),
        (2, "is not a size", ["--nbytes", "10MB"]),
        (1, "--measured /nowhere: No such file", ["--parts=measured", "--measured=/nowhere"]),
        (2, ", ".join(codecs.CODECS), ["--codecs", "int3"]),
        (1, "these only take the codec raw: recursive_doubling", ["--codecs=int8", "--algorithms=recursive_doubling"]),
        (1, "--max-ranks: expected at least one host of 16 ranks, got 8", ["--max-ranks=8", "--ranks-per-host=16"]),
    ],
)
def test_wrong_options_are_errors(code: int, answer: str, arguments: list[str]) -> None:
    done = run(*arguments)
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    assert answer in " ".join(output.split())
