"""The results of a run as --json writes them, and as they are read to be drawn or compared."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import Failure, Row, Table
from benchmarks.simulation import Section, Simulation


class Run(NamedTuple):
    """The tables by case, and `origin`: where and with what the figures were measured."""

    origin: Mapping[str, str]
    tables: Mapping[str, Table | Simulation]
    interrupted: bool = False


def write(path: Path, run: Run) -> None:
    """Write the whole run to a file, including the samples (in seconds)."""
    cases = {case: asdict(table) for case, table in run.tables.items()}
    text = json.dumps({"provenance": dict(run.origin), "interrupted": run.interrupted, "cases": cases}, indent=1)
    text = re.sub(r'\[[^][{}"]+\]', lambda numbers: " ".join(numbers[0].split()), text)  # one line per list of numbers
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def load(path: Path, argument: str) -> Run:
    """Read results, also of an older version. Raises Failure, which names the argument, if the file has none."""
    try:
        plain = json.loads(path.read_text())
        origin = {str(name): str(fact) for name, fact in plain["provenance"].items()}
        tables = {name: _table_of(case) for name, case in plain["cases"].items()}
        return Run(origin, tables, bool(plain.get("interrupted")))
    except OSError as error:
        raise Failure(f"{argument} {path}: {error.strerror}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise Failure(f"{argument} {path}: expected what --json writes, got something else ({reason})") from error


def _table_of(case: dict[str, Any]) -> Table | Simulation:
    if "sections" in case:
        return Simulation(**case | {"sections": {name: Section(**part) for name, part in case["sections"].items()}})
    return Table(**{"notes": []} | case | {"rows": [_row_of(row) for row in case["rows"]]})


def _row_of(row: dict[str, Any]) -> Row:
    return Row(**row | {"samples": [float(sample) for sample in row["samples"]]})
