"""metrics.jsonl."""

import json
from pathlib import Path

from recipes.training.metrics import MetricsFile, read_metrics


def test_rows_are_on_disk_as_soon_as_appended_and_non_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.append({"step": 1, "train/loss": float("nan"), "train/lr": 0.1})
    assert path.read_text() == '{"step": 1, "train/loss": null, "train/lr": 0.1}\n'


def test_resume_cuts_later_rows_and_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    for step in range(5):
        metrics.append({"step": step, "train/loss": step / 3})
    whole = path.read_text()
    with path.open("a") as file:
        file.write('{"step": 5, "train/lo')
    resumed = MetricsFile(path, last_step=3)
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3]
    resumed.append({"step": 4, "train/loss": 4 / 3})
    assert path.read_text() == whole


def test_floats_survive_exactly(tmp_path: Path) -> None:
    MetricsFile(tmp_path / "m.jsonl").append({"step": 1, "x": 0.1 + 0.2})
    assert json.loads((tmp_path / "m.jsonl").read_text())["x"] == 0.1 + 0.2


def test_a_fresh_start_keeps_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).append({"step": 1})
    MetricsFile(path)
    assert read_metrics(path) == []
