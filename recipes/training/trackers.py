"""TensorBoard and Weights & Biases beside metrics.jsonl, through Accelerate's tracker interface."""

import importlib.util
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker

from conf.closed import ConfigError
from conf.schema import LoggerConfig, WandbConfig

_INSTALL = {"tensorboard": "pip install tensorboard", "wandb": "pip install wandb"}


def new_tracker_id() -> str:
    """A run identity that a resume hands on."""
    return uuid.uuid4().hex[:12]


def require_tracker(logger: LoggerConfig) -> None:
    """Refuse a logger whose package is not installed.

    Raises:
        ConfigError: Names the pip command.
    """
    if logger.name in _INSTALL and importlib.util.find_spec(logger.name) is None:
        raise ConfigError(f"logger={logger.name}: the package is not installed; {_INSTALL[logger.name]}")


def start_tracker(
    logger: LoggerConfig, run_dir: Path, tracker_id: str, accelerator: Accelerator
) -> GeneralTracker | None:
    """Open the configured tracker on the main process; None elsewhere and for logger=none."""
    if logger.name == "none" or not accelerator.is_main_process:
        return None
    tracker: GeneralTracker
    if isinstance(logger, WandbConfig):
        tracker = WandBTracker(
            logger.project,
            id=tracker_id,
            resume="allow",
            name=logger.run_name or run_dir.name,
            entity=logger.entity,
            mode=logger.mode,
            dir=str(run_dir),
        )
    else:
        tracker = TensorBoardTracker("tensorboard", logging_dir=str(run_dir))
    tracker.start()
    return tracker


def log_metrics(tracker: GeneralTracker | None, row: Mapping[str, Any]) -> None:
    """Hand one metrics row to the tracker, at its own step; null values are left out."""
    if tracker is not None:
        values = {key: value for key, value in row.items() if key != "step" and value is not None}
        tracker.log(values, step=row["step"])
