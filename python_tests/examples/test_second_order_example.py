"""The example of K-FAC: its table, in one process and on ranks."""

from pathlib import Path

import pytest
from ranks import run_example

pytestmark = pytest.mark.needs("rich", "sklearn")


@pytest.mark.parametrize("ranks", [0, 2])
def test_kfac_takes_fewer_steps(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    said = run_example(
        "second_order.py", tmp_path, "--seeds", 1, "--target", "0.9", "--optimizers", "adamw", "kfac", ranks=ranks
    )
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in said.splitlines() if line.startswith("│")]
    assert [row[:2] for row in rows] == [["AdamW", "1 of 1"], ["K-FAC", "1 of 1"]]
    adamw, kfac = (float(row[2]) for row in rows)
    assert 0 < kfac < 0.7 * adamw
