"""The example of monitoring: each logger has the numbers of all ranks."""

import json
import re
from pathlib import Path

import pytest
from ranks import run_example

pytestmark = pytest.mark.needs("matplotlib", "rich", "sklearn")


def run(loggers: str, folder: Path) -> str:
    (folder / "run").mkdir()
    options = ["--steps", 4, "--every", 2, "--to", loggers, "--folder", folder / "logs"]
    return run_example("monitoring.py", folder / "run", *options)


def lines_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()]


def test_writes_lines_of_json(tmp_path: Path) -> None:
    said = run("jsonl", tmp_path)
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == [2, 4]
    assert 0 < lines[1]["ddp/codec_error/min"] < lines[1]["ddp/codec_error/max"] < 0.1
    assert lines[0]["comm/wire_bytes/max"] < lines[1]["comm/wire_bytes/max"] and lines[1]["late/rank"] in (0, 1)
    assert re.match(r"\d+ numbers every 2 steps; rank [01] was the last one, by -?[\d.]+ ms\n", said), said


@pytest.mark.needs("tensorboard", "mlflow", "sqlalchemy")
def test_tensorboard_and_mlflow_have_the_same_numbers(tmp_path: Path) -> None:
    import mlflow
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run("jsonl,tensorboard,mlflow", tmp_path)
    folder, lines = tmp_path / "logs", lines_of(tmp_path)
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (logged_run,) = client.search_runs(["0"])
    for name in lines[0].keys() - {"step", "time"}:
        wanted = [(line["step"], line[name]) for line in lines if name in line]
        scalars = [(event.step, event.value) for event in events.Scalars(name)]
        logged = [(metric.step, metric.value) for metric in client.get_metric_history(logged_run.info.run_id, name)]
        assert [step for step, _ in wanted] == [step for step, _ in scalars] == [step for step, _ in logged]
        assert [value for _, value in scalars] == pytest.approx([value for _, value in wanted], rel=1e-6)
        assert [value for _, value in logged] == pytest.approx([value for _, value in wanted], rel=1e-6)
