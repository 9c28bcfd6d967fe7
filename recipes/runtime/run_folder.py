"""The run folder: refused when it holds another run, and left as it was when a run is refused.

Everything here happens before Hydra writes its first file.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from conf.closed import ConfigError

__all__ = ["RunFolder", "claim", "require_shared_folder"]

_RESULTS = ("metrics.jsonl", "checkpoints", "final")


@dataclass
class RunFolder:
    """A folder that this run may write to.

    Attributes:
        path: Absolute path.
        config_subdir: Where Hydra saves the configuration, relative to `path`: `.hydra` for the first run, then
            `.hydra/resume-1`, and so on. None on ranks other than 0.
    """

    path: Path
    config_subdir: str | None
    _made: list[Path] = field(default_factory=list)  # folders that did not exist, outermost first
    _log: Path | None = None
    _log_size: int | None = None  # None: there was no log

    def discard(self) -> None:
        """Take away what a run that was refused before its first step has made; anything else stays."""
        if self.config_subdir is not None:
            for name in ("config.yaml", "hydra.yaml", "overrides.yaml"):
                (self.path / self.config_subdir / name).unlink(missing_ok=True)
            _remove_if_empty(self.path / self.config_subdir)
        if self._log is not None and self._log.exists():
            if self._log_size is None:
                self._log.unlink()
            else:
                os.truncate(self._log, self._log_size)
        for folder in reversed(self._made):
            _remove_if_empty(folder)


def claim(run_dir: Path, resume: str, *, rank: int = 0, config_subdir: str | None = ".hydra") -> RunFolder:
    """Make the run folder, or refuse it.

    Args:
        run_dir: The run folder, relative to the working directory or absolute.
        resume: `checkpoint.resume`: none, auto, or the path of a checkpoint or of a run folder.
        rank: Rank of this process; only rank 0 has a place for the configuration.
        config_subdir: Hydra's `output_subdir`.

    Raises:
        ConfigError: The folder holds another run, `resume` leads nowhere, or the folder cannot be made. Nothing in the
            folder has been touched.
    """
    run_dir = run_dir.absolute()
    is_used = any((run_dir / name).exists() for name in _RESULTS)
    if is_used and resume == "none":
        raise ConfigError(
            f"hydra.run.dir={run_dir} holds a run already: continue it with checkpoint.resume=auto, or choose another "
            "hydra.run.dir (without one, each run gets its own folder)"
        )
    if resume not in ("none", "auto"):
        source = Path(resume).absolute()
        if not source.exists():
            raise ConfigError(
                f"checkpoint.resume={resume}: {source} does not exist; accepted are none, auto, and the path of a "
                "checkpoint or of a run folder"
            )
        if is_used and run_dir.resolve() not in (source.resolve(), *source.resolve().parents):
            raise ConfigError(
                f"hydra.run.dir={run_dir} holds another run than checkpoint.resume={resume}: continue in that run's "
                "own folder or in a new one"
            )
    if config_subdir is not None and is_used and (run_dir / config_subdir).exists():
        resumes = len(list((run_dir / config_subdir).glob("resume-*")))
        config_subdir = f"{config_subdir}/resume-{resumes + 1}"
    missing = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"hydra.run.dir={run_dir}: the folder cannot be made ({error.strerror})") from error
    log = run_dir / ("run.log" if rank == 0 else f"run-rank{rank}.log")
    return RunFolder(
        path=run_dir,
        config_subdir=config_subdir if rank == 0 else None,
        _made=missing[::-1],
        _log=log,
        _log_size=log.stat().st_size if log.exists() else None,
    )


def require_shared_folder(hydra: DictConfig) -> None:
    """Refuse several ranks whose run folder would be named by the time, since each would make its own.

    Args:
        hydra: The `hydra` node of a composed configuration.

    Raises:
        ConfigError: WORLD_SIZE is above 1 and neither RUN_ID nor `hydra.run.dir` names the folder.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    template = str(OmegaConf.to_container(hydra.run, resolve=False)["dir"])  # type: ignore[index, call-overload]
    if world_size > 1 and "${now:" in template and "RUN_ID" not in os.environ:
        raise ConfigError(
            f"{world_size} ranks need one run folder: set the environment variable RUN_ID (the same for all), for "
            "example RUN_ID=$(date +%s), or give hydra.run.dir=<folder>"
        )


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
