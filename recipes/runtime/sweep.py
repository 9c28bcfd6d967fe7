"""Sweeps: Hydra's sweeper and launcher choose the jobs, and each job is a process of its own.

Training state therefore never crosses from one job to the next, a job equals the same single run, and this process
stays free of torch.
"""

import json
import logging
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig

from recipes.runtime.interrupt import Interrupt

__all__ = ["SweepJob", "SweepJobFailed"]

log = logging.getLogger(__name__)

NO_CONFIG = "hydra.output_subdir=null"
"""Override under which the sweep itself runs: a job saves its own configuration."""

# What concerns the sweep, or what the job is given anew.
_OF_THE_SWEEP = ("hydra.mode", "hydra.run.", "hydra.sweep", "hydra/sweeper", "hydra.launcher", "hydra/launcher")


class SweepJobFailed(Exception):
    """A job ended with an exit code other than 0; its own message or traceback is on the screen and in its run.log."""


class SweepJob:
    """The task function of a sweep: runs one job to its end in a subprocess.

    Args:
        name: The recipe.
        flags: Command-line flags every job needs, for example `["--config-dir", "mine"]`.
    """

    def __init__(self, name: str, flags: Sequence[str]):
        self.name = name
        self.flags = list(flags)

    def __call__(self, cfg: DictConfig) -> float:
        """Run the job that Hydra has just set up.

        Returns:
            The value of its objective.json; NaN where it has none.

        Raises:
            SweepJobFailed: Its exit code is not 0.
            SystemExit: SIGINT or SIGTERM came; it was passed on and the job has ended.
        """
        hydra = HydraConfig.get()
        run_dir = Path(hydra.runtime.output_dir)
        kept = [line for line in hydra.overrides.hydra if not line.lstrip("+~").startswith(_OF_THE_SWEEP)]
        kept = [line for line in kept if line != NO_CONFIG]
        overrides = [*hydra.overrides.task, *kept, f"hydra.run.dir={_quoted(run_dir)}", "hydra.mode=RUN"]
        log.info("job %s: %s", hydra.job.num, " ".join(hydra.overrides.task))
        command = [sys.executable, "-m", f"recipes.{self.name}", *self.flags, *overrides]
        code = _run(command)
        if code != 0:
            raise SweepJobFailed(f"job {hydra.job.num} ended with exit code {code}; its log is {run_dir}/run.log")
        return _objective(run_dir)


def _run(command: Sequence[str]) -> int:
    """Run a command to its end; a signal is passed on, and afterwards ends this process too.

    The child leads its own process group: a Ctrl-C in the terminal reaches it once, through us, and leaves it the time
    to write a checkpoint.
    """
    with Interrupt() as interrupt, subprocess.Popen(command, start_new_session=True) as process:
        passed_on = False
        while True:
            try:
                code = process.wait(timeout=0.1)
                break
            except subprocess.TimeoutExpired:
                if interrupt.signal is not None and not passed_on:
                    process.send_signal(interrupt.signal)
                    passed_on = True
    if interrupt.signal is not None:
        raise SystemExit(128 + interrupt.signal)
    return code


def _objective(run_dir: Path) -> float:
    path = run_dir / "objective.json"
    value = json.loads(path.read_text())["value"] if path.exists() else None
    if value is None:
        log.warning("%s has no objective", run_dir)
        return math.nan
    return float(value)


def _quoted(path: Path) -> str:
    return QuotedString(text=str(path), quote=Quote.single).with_quotes()
