"""The record of one training run: its state, metrics, checkpoints and objective, as they lie in the run folder.

Not a trainer: a recipe's loop calls it, and it never calls the loop.
"""

import json
import logging
import resource
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from safetensors import SafetensorError

from conf.closed import ConfigError, nearest
from conf.schema import CheckpointConfig, CommonConfig, Direction, ObjectiveConfig, Which
from recipes.models.build import LanguageModel
from recipes.models.errors import ModelError
from recipes.models.export import export_model
from recipes.training.checkpoint import (
    DamagedCheckpoint,
    RunState,
    SaveError,
    discard_later,
    find_resume,
    frozen_fingerprint,
    load_checkpoint,
    prune_checkpoints,
    publish,
    read_state,
    reason,
    require_finite_weights,
    run_folder_of,
    save_checkpoint,
)
from recipes.training.environment import describe_environment, environment_changes, plain, require_same_options
from recipes.training.metrics import MetricsFile, read_metrics
from recipes.training.ranks import largest_over_ranks, wait_for_ranks
from recipes.training.step import StepResult
from recipes.training.trackers import log_metrics, new_tracker_id, start_tracker

log = logging.getLogger(__name__)


STEP_METRICS = (
    *("train/loss", "train/grad_norm", "train/lr", "train/tokens", "train/weight_total", "train/skipped"),
    *("time/step_s", "perf/tokens_per_s", "mem/peak_gib"),
)
"""What `Run.step_metrics` gives for every step."""


class Cursor(Protocol):
    """The place of a run in what it trains on, as `datum.loader.DatumLoader` has it.

    Attributes:
        num_steps: Steps of the whole run.
    """

    num_steps: int

    def state_dict(self) -> dict[str, Any]:
        """The place after the steps taken: what JSON can hold, the same on every rank."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from such a place, or refuse it with a DataError."""
        ...


def objective_metric(objective: ObjectiveConfig, evaluated: Sequence[str], measured: Sequence[str]) -> str:
    """Name of the number by which runs are compared: `objective.metric`, else the evaluation's, else the steps' own.

    Args:
        objective: Options.
        evaluated: Metrics of this run's evaluation, its default objective first; empty without one.
        measured: Further metrics of this recipe's steps, beside STEP_METRICS; its default objective first.

    Raises:
        ConfigError: This run never measures the metric.
    """
    known = [*STEP_METRICS, *measured, *evaluated]
    if objective.metric is None:
        return evaluated[0] if evaluated else measured[0]
    if objective.metric not in known:
        near = nearest(objective.metric, known)
        hint = f"did you mean {near}?" if near else f"it measures {', '.join(known)}"
        raise ConfigError(f"objective.metric={objective.metric} is never measured by this run; {hint}")
    return objective.metric


class Run:
    """State, metrics, checkpoints and results of a run.

    Args:
        run_dir: Run folder, shared by all ranks; the main process alone writes to it, but for checkpoint shards.
        config: The recipe's typed configuration.
        language_model: What is trained.
        optimizer: Its AdamW.
        cursor: Place in the data or in the prompts.
        accelerator: Tells the main process and the device.
        metric: The objective (`objective_metric`).
        reference: Hash of the weights of a frozen reference, which a resumed run has to find again.
    """

    def __init__(
        self,
        run_dir: Path,
        config: CommonConfig,
        language_model: LanguageModel,
        optimizer: torch.optim.Optimizer,
        cursor: Cursor,
        accelerator: Accelerator,
        *,
        metric: str,
        reference: str | None = None,
    ):
        self.run_dir = run_dir
        self.config = config
        self.checkpoint: CheckpointConfig = config.checkpoint
        self.objective: ObjectiveConfig = config.objective
        self.metric = metric
        self.language_model = language_model
        self.optimizer = optimizer
        self.cursor = cursor
        self.accelerator = accelerator
        self.is_main = accelerator.is_main_process
        self.state = RunState(
            config=plain(config),
            frozen=frozen_fingerprint(language_model.scoring),
            reference=reference,
            environment=describe_environment(accelerator.device),
        )
        self.resumed_from: Path | None = None  # run folder of the checkpoint that was loaded
        self._saved_environment: dict[str, Any] = {}
        self._candidate: float | None = None  # this step's objective, where it beats the best checkpoint's

    # ------------------------------------------------------------------------------------------------------- beginning

    def is_finished(self) -> bool:
        """Whether the run was asked to resume a folder that already holds the result of as many steps."""
        rows = read_metrics(self.run_dir / "metrics.jsonl")
        has_result = (self.run_dir / "objective.json").exists() and (self.run_dir / "final").is_dir()
        is_done = (
            self.checkpoint.resume == "auto" and has_result and bool(rows) and rows[-1]["step"] >= self.cursor.num_steps
        )
        wait_for_ranks()  # nobody cuts the files back before all have looked
        if is_done:
            log.info("%s is finished already after %d steps: nothing to do", self.run_dir, rows[-1]["step"])
        return is_done

    def resume(self) -> None:
        """Continue from the checkpoint that the configuration means, or open an empty record (`state.step` is then 0).

        What the folder holds beyond the resumed step is taken away.

        Raises:
            ConfigError: The checkpoint does not fit this model or this configuration.
            DataError: It does not fit the data.
        """
        source = self._load_first_readable(find_resume(self.checkpoint.resume, self.run_dir))
        if source is not None:
            self.resumed_from = run_folder_of(source)
            if changes := environment_changes(self._saved_environment, self.state.environment):
                log.warning("resumed in another environment, so not bit for bit: %s", ", ".join(changes))
            left = self.cursor.num_steps - self.state.step
            log.info("resumed from %s, after step %d: %d steps left", source, self.state.step, left)
        self.state.tracker_id = self.state.tracker_id or new_tracker_id()
        if self.is_main:
            self._cut_back(source)
        self._tracker = start_tracker(self.config.logger, self.run_dir, self.state.tracker_id, self.accelerator)
        wait_for_ranks()

    def _load_first_readable(self, candidates: Sequence[Path]) -> Path | None:
        """Load the first checkpoint that can be read; a damaged one is skipped, and said, if others are left."""
        for path in candidates:
            try:
                saved = read_state(path)
                require_same_options(saved.config, self.state.config)
                if saved.frozen != self.state.frozen:
                    raise ConfigError(
                        f"{path} was trained on other frozen weights than model.name={self.config.model.name} has now: "
                        "a resume needs the same base model"
                    )
                if saved.reference != self.state.reference:
                    raise ConfigError(
                        f"{path} was trained against another reference than model.name={self.config.model.name} gives "
                        "now: a resume needs the same first weights"
                    )
                self.cursor.load_state_dict(saved.loader)
                load_checkpoint(path, self.language_model.scoring, self.optimizer)
            except DamagedCheckpoint as error:
                if path == candidates[-1]:
                    raise
                log.warning("skipped: %s", error)
                continue
            is_here = run_folder_of(path) == self.run_dir.resolve()
            if not is_here or saved.config["eval"] != self.state.config["eval"]:
                saved.best_step = saved.best_value = None  # it lies elsewhere, or was measured otherwise
            self._saved_environment = saved.environment
            saved.config, saved.environment = self.state.config, self.state.environment
            self.state = saved
            return path
        return None

    def _cut_back(self, source: Path | None) -> None:
        later, incomplete = discard_later(self.run_dir, self.state.step)
        for name in later:
            log.warning("checkpoint %s is later than the step resumed from: removed", name)
        for name in incomplete:
            log.warning("checkpoint %s was not written to its end: skipped and removed", name)
        if (self.run_dir / "final").exists():
            log.warning("final/ holds the result of an earlier run until this one ends")
        (self.run_dir / "objective.json").unlink(missing_ok=True)
        path = self.run_dir / "metrics.jsonl"
        if source is not None and run_folder_of(source) != self.run_dir.resolve():
            history = run_folder_of(source) / "metrics.jsonl"
            if history.exists():
                shutil.copyfile(history, path)
        self._metrics = MetricsFile(path, None if source is None else self.state.step)

    # ---------------------------------------------------------------------------------------------------------- a step

    def step_metrics(self, step: int, result: StepResult, *, elapsed_s: float) -> dict[str, Any]:
        """Count a finished step (from 1) and return its metrics row."""
        self.state.step = step
        self.state.skipped += not result.updated
        return {
            "step": step,
            "train/loss": result.loss,
            "train/grad_norm": result.grad_norm,
            "train/lr": result.lr,
            "train/tokens": result.tokens,
            "train/weight_total": result.weight_total,
            "train/skipped": self.state.skipped,
            "time/step_s": elapsed_s,
            "perf/tokens_per_s": result.tokens / elapsed_s,
            "mem/peak_gib": peak_gib(self.accelerator.device),
        }

    def record(self, row: Mapping[str, Any]) -> None:
        """Write one metrics row and note whether its objective beats the best checkpoint's."""
        value = row.get(self.metric)
        self._candidate = value if value is not None and self._is_better(value, self.state.best_value) else None
        if self.is_main:
            self._metrics.append(row)
            log_metrics(self._tracker, row)

    def save_if_due(self, *, interrupted: bool = False) -> None:
        """Publish a checkpoint on schedule, after the last step, on an evaluation's best, or on an interruption.

        Every rank must call it, with the same argument.

        Raises:
            SaveError: The disk refused, or a weight is not finite; the earlier checkpoints are untouched.
        """
        every, step = self.checkpoint.every_steps, self.state.step
        is_best = self._candidate is not None and self.metric.startswith("eval/")
        if not (interrupted or (every and (step % every == 0 or step == self.cursor.num_steps or is_best))):
            return
        if self._candidate is not None:
            self.state.best_step, self.state.best_value = step, self._candidate
        self.state.loader = self.cursor.state_dict()
        save_checkpoint(self.run_dir, self.language_model.scoring, self.optimizer, self.state)
        if self.is_main:
            prune_checkpoints(self.run_dir, self.checkpoint.keep, self.state.best_step)
        wait_for_ranks()

    # ------------------------------------------------------------------------------------------------------------- end

    def finish(self) -> float | None:
        """Publish final/ and objective.json; returns the objective, None where no step has a finite one.

        Raises:
            SaveError: The model cannot be written; a checkpoint is tried instead.
        """
        require_finite_weights(self.language_model.scoring)
        failure: Exception | None = None
        if self.is_main:
            failure = self._publish_final()
        if largest_over_ranks(int(failure is not None), self.accelerator.device):
            self.save_if_due(interrupted=True)  # the training is not lost with its export
            raise SaveError(f"could not write {self.run_dir / 'final'}: {reason(failure)}; a checkpoint is kept")
        value = self.objective_value()
        if self.is_main:
            if value is None:
                log.warning("objective: no step has a finite %s, so its value is null", self.metric)
            write_json(self.run_dir / "objective.json", {"name": self.metric, "value": value})
            if self._tracker is not None:
                self._tracker.finish()
        return value

    def _publish_final(self) -> Exception | None:
        aside = self.run_dir / ".tmp-final"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            export_model(self.language_model, aside)
            publish(aside, self.run_dir / "final")
        except (OSError, SafetensorError, ModelError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            return error
        return None

    def objective_value(self) -> float | None:
        """The objective metric of the last or the best step that has it."""
        rows = read_metrics(self.run_dir / "metrics.jsonl")
        values = [row[self.metric] for row in rows if row.get(self.metric) is not None]
        if not values or self.objective.which == Which.last:
            return values[-1] if values else None
        return min(values) if self.objective.direction == Direction.min else max(values)

    def _is_better(self, value: float, than: float | None) -> bool:
        if than is None:
            return True
        return value < than if self.objective.direction == Direction.min else value > than


def peak_gib(device: torch.device) -> float:
    """Largest memory so far: allocated on a GPU, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss counts bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file by temporary name and rename."""
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(json.dumps(content, indent=1) + "\n")
    aside.replace(path)
