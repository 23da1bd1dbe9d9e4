"""The example of asynchronous training: its orders obey the methods, and its runs depend on nothing but the seed."""

import json

import pytest
from ranks import ROOT, run_example

pytestmark = pytest.mark.needs("sklearn", "rich")


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import asynchronous

    return asynchronous


@pytest.mark.parametrize("staleness", [0, 2, None])
def test_an_order_obeys_the_staleness(example, staleness):
    method = example.Method("", "all" if staleness == 0 else 1, staleness)
    order, time = example.order_of_arrival(method, 4, 30, 3, (0.2, 5.0))
    assert sum(what == "push" for what, _ in order) == 4 * 30
    clocks, furthest = [0] * 4, 0
    for what, worker in order:
        if what == "push":
            clocks[worker] += 1
        elif staleness is not None:
            assert min(clocks) >= clocks[worker] - staleness
        furthest = max(furthest, max(clocks) - min(clocks))
    assert furthest > (0 if staleness is None else staleness)
    assert 30 < time < 5.5 * 30


def test_it_repeats_its_results(tmp_path, tmp_path_factory):
    files = [tmp_path_factory.mktemp("results") / "results.json" for _ in range(2)]
    options = "--steps", 8, "--workers", 3, "--seeds", 1, "--lr", 0.5
    for file in files:
        printed = run_example("asynchronous.py", tmp_path, *options, "--json", file, ranks=0)
        assert "compensated" in printed
    first, second = (json.loads(file.read_text())["rows"] for file in files)
    assert first == second
    results = {(row["name"], row["delay_compensation"]): row["results"][0][0] for row in first}
    assert len(set(results.values())) > 2  # the methods differ
