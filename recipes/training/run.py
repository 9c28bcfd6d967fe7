"""The record of one training run: its state, metrics, checkpoints and objective (design: the run folder).

Not a trainer: a recipe's loop calls it, and it never calls the loop.
"""

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from conf.schema import CheckpointConfig, Direction, LoggerConfig, ObjectiveConfig, Which
from recipes.training.checkpoint import (
    RunState,
    discard_later,
    find_resume,
    load_checkpoint,
    prune_checkpoints,
    read_state,
    run_folder_of,
    save_checkpoint,
)
from recipes.training.environment import describe_environment, environment_changes, plain, require_same_options
from recipes.training.metrics import MetricsFile, read_metrics
from recipes.training.ranks import wait_for_ranks
from recipes.training.trackers import log_metrics, new_tracker_id, start_tracker

log = logging.getLogger(__name__)


class Run:
    """State, metrics and checkpoints of a run.

    Args:
        run_dir: Run folder, shared by all ranks.
        config: The recipe's typed configuration; its groups checkpoint, logger and objective are used here.
        model: The model, unwrapped.
        optimizer: Its AdamW.
        accelerator: Tells the main process, which alone writes files of the run.
        default_metric: Objective where the configuration names none.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Any,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        accelerator: Accelerator,
        default_metric: str,
    ):
        self.run_dir = run_dir
        self.config = plain(config)
        self.checkpoint: CheckpointConfig = config.checkpoint
        self.logger: LoggerConfig = config.logger
        self.objective: ObjectiveConfig = config.objective
        self.metric = self.objective.metric or default_metric
        self.model = model
        self.optimizer = optimizer
        self.accelerator = accelerator
        self.is_main = accelerator.is_main_process
        self.state = RunState(config=self.config, environment=describe_environment(accelerator.device))
        self.candidate: float | None = None  # this step's objective, where it is better than the best checkpoint's

    def resume(self) -> None:
        """Continue from the checkpoint that the configuration means, or open an empty record.

        Afterwards `state` holds where the run stands; a step of 0 is a fresh start.

        Raises:
            ConfigError: The checkpoint does not fit this model or this configuration.
        """
        source = find_resume(self.checkpoint.resume, self.run_dir)
        if source is not None:
            saved = read_state(source)
            require_same_options(saved.config, self.config)
            load_checkpoint(source, self.model, self.optimizer)
            if changes := environment_changes(saved.environment, self.state.environment):
                log.warning("resumed in another environment, not bit for bit: %s", ", ".join(changes))
            saved.config, saved.environment = self.config, self.state.environment
            self.state = saved
            log.info("resumed from %s (step %d)", source, saved.step)
        if self.state.tracker_id is None:
            self.state.tracker_id = new_tracker_id()
        if self.is_main:
            self._cut_back(source)
        self.tracker = start_tracker(self.logger, self.run_dir, self.state.tracker_id, self.accelerator)
        wait_for_ranks()

    def _cut_back(self, source: Path | None) -> None:
        """Take away what the run folder holds beyond the resumed step."""
        for name in discard_later(self.run_dir, self.state.step):
            log.warning("checkpoint %s is incomplete or later than the resumed step: skipped and removed", name)
        (self.run_dir / "objective.json").unlink(missing_ok=True)
        path = self.run_dir / "metrics.jsonl"
        if source is not None and run_folder_of(source) != self.run_dir.resolve():
            history = run_folder_of(source) / "metrics.jsonl"
            if history.exists():
                shutil.copyfile(history, path)
        self.metrics = MetricsFile(path, None if source is None else self.state.step)

    def record(self, row: Mapping[str, Any]) -> None:
        """Write one metrics row and note whether its objective is better than the best checkpoint's."""
        value = row.get(self.metric)
        self.candidate = value if value is not None and self._is_better(value, self.state.best_value) else None
        if self.is_main:
            self.metrics.append(row)
            log_metrics(self.tracker, row)

    def save_if_due(self, *, is_last: bool, interrupted: bool) -> None:
        """Publish a checkpoint on schedule, at the end, on an evaluation's best, and on an interruption.

        Every rank must call it, with the same arguments.

        Raises:
            SaveError: The disk refused, or a weight is not finite; the earlier checkpoints are untouched.
        """
        every = self.checkpoint.every_steps
        is_best = self.candidate is not None and self.metric.startswith("eval/")
        if not (interrupted or (every and (self.state.step % every == 0 or is_last or is_best))):
            return
        if self.candidate is not None:
            self.state.best_step, self.state.best_value = self.state.step, self.candidate
        save_checkpoint(self.run_dir, self.model, self.optimizer, self.state)
        if self.is_main:
            prune_checkpoints(self.run_dir, self.checkpoint.keep, self.state.best_step)
        wait_for_ranks()

    def is_finished(self, num_steps: int) -> bool:
        """Whether this folder holds the result of a run of at least `num_steps` steps."""
        rows = read_metrics(self.run_dir / "metrics.jsonl")
        has_result = (self.run_dir / "objective.json").exists() and (self.run_dir / "final").is_dir()
        return has_result and bool(rows) and rows[-1]["step"] >= num_steps

    def finish(self) -> float | None:
        """Write objective.json on the main process; returns the objective (None where no row has the metric)."""
        rows = read_metrics(self.run_dir / "metrics.jsonl") if self.is_main else []
        values = [row[self.metric] for row in rows if row.get(self.metric) is not None]
        value = None
        if values:
            best = min if self.objective.direction == Direction.min else max
            value = best(values) if self.objective.which == Which.best else values[-1]
        elif self.is_main:
            log.warning("objective: no step has a finite %s, so its value is null", self.metric)
        if self.is_main:
            write_json(self.run_dir / "objective.json", {"name": self.metric, "value": value})
            if self.tracker is not None:
                self.tracker.finish()
        return value

    def _is_better(self, value: float, than: float | None) -> bool:
        if than is None:
            return True
        return value < than if self.objective.direction == Direction.min else value > than


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file by temporary name and rename."""
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(json.dumps(content, indent=1) + "\n")
    aside.replace(path)
