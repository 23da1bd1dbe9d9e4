"""What --json wrote, as the tables that it was written from."""

import json
from pathlib import Path
from typing import Any

from benchmarks.harness import Failure, Row, Table
from benchmarks.simulation import Section, Simulation


def load(path: Path) -> tuple[dict[str, str], dict[str, Table | Simulation]]:
    """The provenance, and the tables by case."""
    try:
        kept = json.loads(path.read_text())
        return kept["provenance"], {name: table_of(case) for name, case in kept["cases"].items()}
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise Failure(f"{path}: not what --json writes: {error}") from None


def table_of(case: dict[str, Any]) -> Table | Simulation:
    if "sections" in case:
        return Simulation(**case | {"sections": {name: Section(**part) for name, part in case["sections"].items()}})
    return Table(**case | {"rows": [Row(**row) for row in case["rows"]]})
