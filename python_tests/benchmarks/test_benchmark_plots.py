"""The plots of the benchmarks, drawn from small tables: which plots each table gives, and the texts in them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import commands
import pytest
from matplotlib.colors import to_hex

from benchmarks import plots, saved_results
from benchmarks.allreduce_ranks import Result, Side
from benchmarks.cases.allreduce import make_row
from benchmarks.harness import Failure, Row, Table
from benchmarks.plots.bars import times
from benchmarks.plots.rates import LINK
from benchmarks.plots.sizes import curves_of, fastest
from benchmarks.plots.style import OURS, PEER
from benchmarks.simulation import Section, Simulation

pytestmark = pytest.mark.needs("matplotlib", "rich")


def row(workload: str, side: str, ms: float, x: float | None = None, **figures: float | None) -> Row:
    ours = not side.startswith(("torch", "gloo", "plain"))
    return Row(workload, side, ours, True, "0", [ms / 1e3, ms / 1e3, 1.1 * ms / 1e3], figures=figures, x=x)


def limits() -> Table:
    long = "a peer whose name is long"
    rows = [
        row("AdamW", "ours", 10, **{"% of limit": 103.2}),
        row("AdamW", f"torch {long}", 0.02, **{"% of limit": 18.0}),
        row("in the cache", "ours", 2, **{"% of limit": None}),
    ]
    return Table("Steps", [*rows, Row("AdamW", "torch wrong", False, False, "1e9")], [])


def sizes() -> Table:
    times = {
        "gloo": (6, 7, 20, 90),
        "ring": (3, 4, 12, 80),
        "tree": (1, 2, 30, 200),
        "ring int8": (2, 2, 4, 25),
        "tree int8": (1, 3, 9, 60),
        "auto": (1, 2, 12, 81),
    }
    chosen = {"auto": ["tree", "tree", "ring", "ring"]}
    rows = [
        row(f"{x}", f"{side}: {chosen[side][at]}" if side in chosen else side, ms, x)
        for side, by_size in times.items()
        for at, (x, ms) in enumerate(zip((2**10, 2**14, 2**20, 2**24), by_size, strict=True))
    ]
    return Table("all_reduce", rows, [], x_label="message, bytes")


def rates() -> Table:
    times = {"plain DDP": (800, 80, 40, 30), "torch fp16_compress_hook": (410, 50, 35, 29), "int8": (200, 40, 42, 31)}
    rows = [
        row("none" if x is None else f"{x:g}gbit", side, ms, x)
        for side, by_rate in times.items()
        for x, ms in zip((0.1, 1.0, 10.0, None), by_rate, strict=True)
    ]
    return Table("DDP", rows, [], x_label=LINK)


def codecs() -> Table:
    figures = {"raw": (32, 0, 0), "bf16": (16, 2e-3, 2e-3), "int8": (8.125, 7e-3, 2e-2), "fp8": (8.25, 3e-2, 1e-2)}
    names = ("bits/element", "rms error, normal", "rms error, heavy")
    rows = [
        Row("all", codec, True, True, "0", figures=dict(zip(names, values, strict=True)))
        for codec, values in figures.items()
    ]
    return Table("codecs", [row("int8", "encode", 3, **{"% of limit": 50.0}), *rows], [], summary="all")


def simulation() -> Simulation:
    ranks = (8, 64, 512)
    plans = [{"codec": "int8", "plan": plan, "ranks": n, "ms": n * 1.0} for plan in ("ring", "tree") for n in ranks]
    step = {"model": "ResNet-50", "link, Gbit/s": 10.0, "codec": "int8", "efficiency %": 90}
    steps = [step | {"ranks": n} for n in ranks]
    times = [{"hosts": "one per rank", "what": "step", "topology": "one server", "ranks": n, "ms": n} for n in ranks]
    sections = {"all-reduce": plans, "topologies": times, "training": steps, "published": [{"what": "no plot"}]}
    return Simulation("SIMULATED", {name: Section(rows, ["codec"]) for name, rows in sections.items()}, [])


CASES: Mapping[str, tuple[Table | Simulation, dict[str, list[str]]]] = {
    "limits": (
        limits(),
        {
            "case": ["AdamW", "in the cache", "torch a peer whose name is long", "20 us", "ours", "peers"],
            "case-limit": ["103 %, 10 ms", "18 %, 20 us", "AdamW", "limit"],
        },
    ),
    "sizes": (
        sizes(),
        {"case": ["gloo", "ring", "tree", "auto", "int8", "1 KiB", "16 MiB", "fastest", "selected by auto"]},
    ),
    "rates": (
        rates(),
        {"case": ["plain DDP", "faster than torch fp16_compress_hook", "no limit", "0.1", "8.59", "3.55"]},
    ),
    "codecs": (
        codecs(),
        {"case": ["encode"], "case-limit": ["50 %"], "case-error": ["int8", "8.125, 8.25", "heavy", "error: raw"]},
    ),
    "simulation": (
        simulation(),
        {
            "simulated-allreduce": ["SIMULATED, not measured", "ring", "tree", "int8"],
            "simulated-topologies": ["SIMULATED, not measured", "one server", "hosts: one per rank", "step, ms"],
            "simulated-efficiency": ["SIMULATED, not measured", "ResNet-50", "10 Gbit/s"],
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_table_gives_its_plots(name: str, tmp_path: Path) -> None:
    table, texts = CASES[name]
    written = plots.draw(tmp_path / "new", "case", table)
    assert sorted(written) == sorted((tmp_path / "new").iterdir())
    assert {path.stem for path in written} == set(texts)
    for stem, expected in texts.items():
        assert (tmp_path / "new" / f"{stem}.png").read_bytes().startswith(b"\x89PNG\r\n")
        svg = (tmp_path / "new" / f"{stem}.svg").read_text()
        assert "<svg" in svg and [text for text in expected if text not in svg] == []


def test_the_same_table_gives_the_same_files(tmp_path: Path) -> None:
    first, second = (plots.draw(tmp_path / name, "case", sizes()) for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_rows_that_were_not_timed_are_not_drawn(tmp_path: Path) -> None:
    assert plots.draw(tmp_path, "case", Table("t", [Row("w", "ours", True, False, "wrong")], [])) == []


def test_ours_has_one_colour_also_where_it_is_compared_as_a_peer() -> None:
    coded = replace(row("w", "ours int8 state", 2), ours=False)
    (axes,) = times(Table("t", [row("w", "ours", 1), coded, row("w", "torch", 3)], [])).axes
    assert [to_hex(bar.get_facecolor()).upper() for bar in axes.patches] == [OURS, OURS, PEER]


def test_the_fastest_plan_changes_where_the_curves_cross() -> None:
    curves = [curve for curve in curves_of(sizes()) if curve.kind == "" and curve.name != "auto"]
    (begin, middle, first), (from_middle, end, second) = fastest(curves)
    assert (first, second) == ("tree", "ring") and (begin, end) == (2**10, 2**24)
    assert middle == from_middle and 2**14 < middle < 2**20


def test_the_plan_that_a_tuned_auto_selected_is_in_its_side() -> None:
    result = Result(2**10, Side("auto"), 0, None, None, [1e-3], chosen="tree")
    (curve,) = curves_of(Table("all_reduce", [make_row(result, 2, "cpu")], []))
    assert (curve.name, curve.chosen) == ("auto", {2**10: "tree"})


def touch(figure: object, path: Path) -> list[Path]:
    """Replaces `save`, because the plots themselves are tested above."""
    paths = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg")]
    for each in paths:
        each.touch()
    return paths


def test_saved_results_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, drawn = tmp_path / "kept.json", tmp_path / "plots"
    run = saved_results.Run({"commit": "0"}, {name: table for name, (table, _) in CASES.items()})
    saved_results.write(file, run)
    assert saved_results.load(file, "FILE") == run

    monkeypatch.setattr(plots, "save", touch)
    done = commands.benchmarks("plot", file, drawn)
    assert done.returncode == 0
    assert set(done.stdout.splitlines()) == {f"wrote {path}" for path in drawn.iterdir()}
    assert {path.name for path in drawn.iterdir()} >= {"limits-limit.svg", "rates.png", "simulated-efficiency.svg"}


@pytest.mark.parametrize("text", ["", "[]", '{"provenance": {}}', '{"provenance": {}, "cases": {"ddp": {"rows": 1}}}'])
def test_a_file_of_another_format_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text(text)
    with pytest.raises(Failure, match="kept.json: expected what --json writes"):
        saved_results.load(tmp_path / "kept.json", "FILE")
