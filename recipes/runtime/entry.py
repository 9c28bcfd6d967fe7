"""The entry of every recipe: from the command line to `train(config, run_dir)`, and from its end to an exit code.

A wrong configuration never reaches `train`: it is refused with exit code 2 and at most three lines on stderr, before
the run folder exists and without importing torch. `recipes.runtime.outcome` says what the other codes mean and how a
loop chooses among them.
"""

import gc
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig

from conf.closed import ConfigError
from recipes.runtime import outcome
from recipes.runtime.command_line import CommandLine, Composed
from recipes.runtime.outcome import StopRun
from recipes.runtime.run_folder import RunFolder, claim, require_shared_folder
from recipes.runtime.sweep import NO_CONFIG, SweepJob, SweepJobFailed

__all__ = ["recipe", "run"]

Train = Callable[[Any, Path], object]


def recipe(name: str, train: Train) -> Callable[[], None]:
    """The `main` of a recipe, for `python -m` and for a console script.

    Args:
        name: Name of the recipe: its module is `recipes.<name>`, its primary configuration `conf/<name>.yaml`.
        train: `train(config, run_dir)` with the checked dataclass and the run folder, which exists. It imports torch
            itself. What it returns is not used; a sweep reads objective.json.

    Returns:
        A function without arguments that reads `sys.argv` and ends the process.
    """

    def main() -> None:
        _leave(run(name, train, sys.argv[1:]))

    return main


def run(name: str, train: Train, argv: Sequence[str]) -> int:
    """Run a recipe with the given arguments and return the exit code; messages are printed.

    Args:
        name: As for `recipe`.
        train: As for `recipe`.
        argv: Flags and overrides.
    """
    outcome.reset()
    try:
        return _run(name, train, argv)
    except ConfigError as error:
        return _refused("config error", error, speaks=_rank() == 0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        GlobalHydra.instance().clear()


def _run(name: str, train: Train, argv: Sequence[str]) -> int:
    line = CommandLine(name, argv)
    if line.shows_only:
        try:
            line.show()
            sys.stdout.flush()
        except BrokenPipeError:  # the reader, `head` for example, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if line.is_sweep():
        return _sweep(name, line)
    composed = line.compose(line.args.overrides)
    if composed.cfg.hydra.mode == RunMode.MULTIRUN:  # a file asks for it
        return _sweep(name, line)
    hydra, resume = composed.cfg.hydra, composed.config.checkpoint.resume
    require_shared_folder(hydra)
    folder = claim(composed.run_dir, resume, rank=_rank(), config_subdir=hydra.output_subdir)
    return _train(train, line, composed, folder)


def _train(train: Train, line: CommandLine, composed: Composed, folder: RunFolder) -> int:
    """Let Hydra set up logging and save the configuration, then train."""
    ended: list[int] = []

    def task(cfg: DictConfig) -> None:
        with _sigterm_exits():
            ended.append(_code_of(train, composed.config, folder))

    line.start(composed, folder.config_subdir, task)
    return ended[0]


def _code_of(train: Train, config: Any, folder: RunFolder) -> int:
    try:
        train(config, folder.path)
        return 0
    except StopRun as stop:
        _say(str(stop))
        return stop.code
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception as error:
        return _failed(error, folder)


def _failed(error: Exception, folder: RunFolder) -> int:
    """Report what `train` raised: exit code 2 for a typed error before the first step, else 1."""
    from datum.errors import DataError
    from recipes.models.errors import ModelError
    from recipes.rollouts.sampler import RolloutError

    kinds = {
        ConfigError: "config error",
        DataError: "data error",
        ModelError: "model error",
        RolloutError: "rollout error",
    }
    kind = next((name for kind, name in kinds.items() if isinstance(error, kind)), None)
    is_transient = isinstance(error, RolloutError)  # a server that does not answer is no mistake in what was given
    if kind is not None and not is_transient and not outcome.first_step_taken():
        # Ranks fail alike here; the first one of each machine speaks, since files differ between machines.
        code = _refused(kind, error, speaks=int(os.environ.get("LOCAL_RANK", _rank())) == 0)
        folder.discard()
        return code
    _log_to_files("".join(traceback.format_exception(error)))
    if kind is not None and not _wants_traceback():
        print("\n".join(_lines(kind, error)), file=sys.stderr)
    else:
        traceback.print_exception(error)
    return 1


def _sweep(name: str, line: CommandLine) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("a sweep cannot run under torchrun or accelerate launch: every rank would start all its jobs")
    line.check_sweep()
    flags = ["--config-name", line.args.config_name] if line.args.config_name else []
    flags += ["--config-dir", line.args.config_dir] if line.args.config_dir else []
    overrides = [*line.args.overrides, "hydra.mode=MULTIRUN", NO_CONFIG]
    try:
        line.hydra.multirun(config_name=line.name, task_function=SweepJob(name, flags), overrides=overrides)
    except SweepJobFailed as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 1
    except SystemExit as stop:
        return int(str(stop.code))
    return 0


def _refused(kind: str, error: Exception, *, speaks: bool) -> int:
    if speaks:
        if _wants_traceback():
            traceback.print_exception(error)
        print("\n".join(_lines(kind, error)), file=sys.stderr)
    return 2


def _lines(kind: str, error: Exception) -> list[str]:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return [f"{kind}: {lines[0] if lines else type(error).__name__}", *lines[1:3]]


def _wants_traceback() -> bool:
    return os.environ.get("HYDRA_FULL_ERROR") == "1"


def _say(message: str) -> None:
    """One message on stderr and in the log file, from rank 0."""
    _log_to_files(message)
    if _rank() == 0:
        print(message, file=sys.stderr)


def _log_to_files(message: str) -> None:
    record = logging.LogRecord(__name__, logging.ERROR, __file__, 0, message, None, None)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)


@contextmanager
def _sigterm_exits() -> Iterator[None]:
    """Outside a loop's own `Interrupt`, SIGTERM ends the process with code 143 as SIGINT ends it with 130."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _leave(code: int) -> None:
    """End the process; with ranks, without the teardown in which gloo can hang or abort after a finished run."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        sys.exit(code)
    gc.collect()
    if code == 0:
        distributed.barrier()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
