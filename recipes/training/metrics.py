"""metrics.jsonl, and the trackers beside it."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MetricsFile:
    """Append-only metrics.jsonl: one JSON object a step, flushed as the step ends; non-finite values are null.

    Args:
        path: The file; created when the first line is written.
        last_step: Lines of later steps, and a torn last line, are cut away first; None keeps nothing.
    """

    def __init__(self, path: Path, last_step: int | None = None):
        self.path = path
        self.kept = [] if last_step is None else [row for row in read_metrics(path) if row["step"] <= last_step]
        if path.exists():
            aside = path.with_suffix(".jsonl.tmp")
            aside.write_text("".join(_line(row) for row in self.kept))
            aside.replace(path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one object and flush it."""
        with self.path.open("a") as file:
            file.write(_line(row))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file, in order; [] where there is none, a torn last line is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def _line(row: Mapping[str, Any]) -> str:
    finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}
    return json.dumps(finite, allow_nan=False) + "\n"
