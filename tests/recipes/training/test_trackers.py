"""Trackers beside metrics.jsonl."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from conf.closed import ConfigError
from conf.schema import LoggerConfig, WandbConfig
from recipes.training import trackers
from recipes.training.progress import TrainingProgress
from tests.recipes.test_sft import metrics


def test_tensorboard_gets_the_rows_of_the_metrics_file(sft: Callable[..., int], tmp_path: Path) -> None:
    assert sft(tmp_path, "logger=tensorboard") == 0
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    seen = [(event.step, event.value) for event in events.Scalars("train/loss")]
    wanted = [(row["step"], row["train/loss"]) for row in metrics(tmp_path)]
    assert [step for step, _ in seen] == [step for step, _ in wanted]
    assert [value for _, value in seen] == pytest.approx([value for _, value in wanted], rel=1e-6)


def test_wandb_keeps_the_identity_of_a_resumed_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []
    wandb = SimpleNamespace(init=lambda **options: calls.append(options))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    logger = WandbConfig(name="wandb", project="mine", mode="offline")
    for _ in range(2):
        trackers.start_tracker(logger, tmp_path, "abc123", Accelerator(cpu=True))
    assert [(call["id"], call["resume"], call["project"]) for call in calls] == [("abc123", "allow", "mine")] * 2


def test_a_missing_tracker_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="logger=tensorboard: the package is not installed; pip install tensorboard"):
        trackers.require_tracker(LoggerConfig(name="tensorboard"))


def test_lines_show_progress_where_there_is_no_terminal(caplog: pytest.LogCaptureFixture) -> None:
    row = {"train/loss": 1.25, "train/lr": 0.1, "perf/tokens_per_s": 1234.0}
    with caplog.at_level(logging.INFO), TrainingProgress(3) as progress:
        for step in (1, 2, 3):
            progress.update({"step": step} | row)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2  # the first and the last step; the rest is too soon
    assert lines[0].startswith("step 1/3  loss 1.2500  lr 0.1  1,234 tokens/s")
    assert lines[1].startswith("step 3/3")
