"""Checkpoints: whole or absent, the same format for any number of ranks.

    checkpoints/step-00000010/
      state/        trainable parameters, persistent buffers and AdamW moments (torch.distributed.checkpoint)
      run.json      step, counters, data cursor, configuration, versions (`RunState`)
      COMPLETE      format version; written last

A folder is written under a temporary name, flushed to the disk and published by one rename. Whatever has no COMPLETE
marker is skipped, and said. Frozen parameters are not stored: they come from `model.name` again.

Only tensors go into `state/`, so loading unpickles nothing but the format's own index.
"""

import hashlib
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from conf.closed import ConfigError
from recipes.runtime.outcome import StopRun
from recipes.training.ranks import rank_and_world, sum_over_ranks, wait_for_ranks

FORMAT_VERSION = 1
_MARKER = "COMPLETE"


class SaveError(StopRun):
    """A checkpoint could not be published: the run ends with exit code 1, the earlier ones are untouched."""

    def __init__(self, message: str):
        super().__init__(1, message)


@dataclass
class RunState:
    """Everything beside tensors that a run continues from.

    Attributes:
        step: Steps taken, skipped ones included.
        skipped: Steps in which the optimizer did not move.
        best_step: Checkpointed step with the best objective so far.
        best_value: Its objective.
        loader: Data cursor (`DatumLoader.state_dict`).
        ledger: Data ledger.
        config: The configuration as plain containers.
        frozen: Hash of the parameters that are not trained (`frozen_fingerprint`).
        reference: Hash of a frozen reference's parameters; None without one.
        environment: Versions, thread count, device and rank count that results may depend on.
        tracker_id: Identity of the run in an outside tracker.
    """

    step: int = 0
    skipped: int = 0
    best_step: int | None = None
    best_value: float | None = None
    loader: dict[str, Any] = field(default_factory=dict)
    ledger: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    frozen: str | None = None
    reference: str | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    tracker_id: str | None = None


class DamagedCheckpoint(ConfigError):
    """A checkpoint is marked complete and cannot be read."""


def frozen_fingerprint(model: nn.Module) -> str | None:
    """Hash of the parameters that are not trained, by exact sums of their bits; None where all are trained.

    They are not stored, so a resume has to find the same ones again.
    """
    digest = hashlib.blake2b(digest_size=16)
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    for name, parameter in frozen:
        local = _local(parameter.detach()).contiguous()
        bits = local.view({2: torch.int16, 4: torch.int32, 8: torch.int64}.get(local.element_size(), torch.int8))
        weighed = bits.reshape(-1)[::2].sum(dtype=torch.int64)  # every second once more: a swap of neighbours shows
        digest.update(f"{name} {list(local.shape)} {int(bits.sum(dtype=torch.int64))} {int(weighed)}\n".encode())
    return digest.hexdigest() if frozen else None


def checkpoint_name(step: int) -> str:
    """Folder name after `step` optimizer steps, for example step-00000010."""
    return f"step-{step:08d}"


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return [path for path in _step_folders(run_dir) if (path / _MARKER).exists()]


def incomplete_checkpoints(run_dir: Path) -> list[Path]:
    """Folders that look like checkpoints and are not complete."""
    return [path for path in _step_folders(run_dir) if not (path / _MARKER).exists()]


def save_checkpoint(run_dir: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: RunState) -> Path:
    """Publish a checkpoint; every rank must call it.

    Args:
        run_dir: Run folder.
        model: The model, unwrapped.
        optimizer: Its AdamW.
        state: Written by rank 0.

    Raises:
        SaveError: The disk refused, or a weight is not finite. Nothing is published then.
    """
    rank, world_size = rank_and_world()
    final = run_dir / "checkpoints" / checkpoint_name(state.step)
    aside = final.with_name(f".tmp-{final.name}")
    require_finite_weights(model)
    failure: BaseException | None = None
    try:
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
    except OSError as error:
        failure = error
    _all_succeeded(failure, final)
    try:
        with _one_process_is_fine():
            dcp.save(_tensors(model, optimizer), checkpoint_id=aside / "state", no_dist=world_size == 1)
    except (OSError, RuntimeError, dcp.CheckpointException) as error:
        failure = error
    _all_succeeded(failure, final, aside)
    try:
        if rank == 0:
            _write_synced(aside / "run.json", json.dumps(asdict(state), indent=1))
            _write_synced(aside / _MARKER, json.dumps({"format_version": FORMAT_VERSION, "step": state.step}) + "\n")
            _sync_folder(aside / "state")
            publish(aside, final)
    except OSError as error:
        failure = error
    _all_succeeded(failure, final, aside)
    return final


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Copy a checkpoint's tensors into a model and its optimizer, in place; every rank must call it.

    Raises:
        ConfigError: The checkpoint belongs to a model with other parameters.
        DamagedCheckpoint: A file cannot be read.
    """
    _, world_size = rank_and_world()
    state_path = path / "state"
    wanted = _tensors(model, optimizer)
    try:
        metadata = dcp.FileSystemReader(state_path).read_metadata().state_dict_metadata
    except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise DamagedCheckpoint(f"{path} is damaged ({reason(error)}); resume from another checkpoint") from error
    stored = {name: list(item.size) for name, item in metadata.items() if isinstance(item, TensorStorageMetadata)}
    problems = [f"{name} is missing" for name in wanted if name not in stored]
    problems += [f"{name} is not in this model" for name in stored if name not in wanted]
    problems += [
        f"{name} is {stored[name]}, here {list(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in stored and stored[name] != list(tensor.shape)
    ]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(
            f"{path} is a checkpoint of another model: {problems[0]}{more}; resume with the model it was made with"
        )
    try:
        with _one_process_is_fine():
            dcp.load(wanted, checkpoint_id=state_path, no_dist=world_size == 1)  # copies into the tensors of `wanted`
    except (OSError, RuntimeError, EOFError, ValueError, dcp.CheckpointException) as error:
        raise DamagedCheckpoint(f"{path} is damaged ({reason(error)}); resume from another checkpoint") from error


def read_state(path: Path) -> RunState:
    """Read what a checkpoint holds beside tensors.

    Raises:
        ConfigError: The format version is another one.
        DamagedCheckpoint: A file cannot be read.
    """
    try:
        version = json.loads((path / _MARKER).read_text())["format_version"]
        if version == FORMAT_VERSION:
            return RunState(**json.loads((path / "run.json").read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{path} is damaged ({reason(error)}); resume from another checkpoint") from error
    raise ConfigError(f"{path} has checkpoint format {version}; this version reads format {FORMAT_VERSION}")


def find_resume(resume: str, run_dir: Path) -> list[Path]:
    """The checkpoints that `checkpoint.resume` allows, the one to be tried first in front; []: start afresh.

    Args:
        resume: none, auto (any complete one of this run, the newest first), or the path of a checkpoint, of a run
            folder or of its checkpoints folder (that one alone).
        run_dir: This run's folder.

    Raises:
        ConfigError: A path without a complete checkpoint.
    """
    if resume == "none":
        return []
    if resume == "auto":
        return complete_checkpoints(run_dir)[::-1]
    path = Path(resume)
    if (path / _MARKER).exists():
        return [path]
    if not path.exists():
        raise ConfigError(
            f"checkpoint.resume={resume}: no such folder; accepted are none, auto, or a checkpoint's or run's path"
        )
    complete = complete_checkpoints(path.parent if path.name == "checkpoints" else path)
    if not complete:
        raise ConfigError(f"checkpoint.resume={resume}: no complete checkpoint there (it would have a {_MARKER} file)")
    return complete[-1:]


def run_folder_of(checkpoint: Path) -> Path:
    """The run folder that a checkpoint lies in."""
    return checkpoint.resolve().parent.parent


def discard_later(run_dir: Path, step: int) -> tuple[list[str], list[str]]:
    """Remove what a run cannot continue over: checkpoints after `step`, half-written ones, leftovers.

    Returns:
        Names of the complete ones that were removed, and of the half-written ones.
    """
    later = [path for path in complete_checkpoints(run_dir) if path.name > checkpoint_name(step)]
    incomplete = incomplete_checkpoints(run_dir)
    leftovers = [path for mark in (".tmp-*", ".del-*") for path in (run_dir / "checkpoints").glob(mark)]
    for path in [*later, *incomplete, *leftovers]:
        remove(path)
    return [path.name for path in later], [path.name for path in incomplete]


def prune_checkpoints(run_dir: Path, keep: int, best_step: int | None) -> None:
    """Remove all but the newest `keep` checkpoints and the best one."""
    complete = complete_checkpoints(run_dir)
    best = None if best_step is None else checkpoint_name(best_step)
    for path in complete[:-keep]:
        if path.name != best:
            remove(path)


def require_finite_weights(model: nn.Module) -> None:
    """Refuse to write weights that are not finite; every rank must call it.

    Raises:
        SaveError: Names the first such parameter.
    """
    bad = [name for name, p in model.named_parameters() if p.requires_grad and not torch.isfinite(_local(p)).all()]
    device = next(model.parameters()).device
    if int(sum_over_ranks(torch.tensor(len(bad), device=device))):
        raise SaveError(f"weights are not finite ({', '.join(bad[:3]) or 'on another rank'}): not saved")


def publish(aside: Path, final: Path) -> None:
    """Rename a finished folder to its name; a folder of that name is moved out of the way first and removed after."""
    _sync_folder(aside)
    replaced = final.with_name(f".del-{final.name}")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    aside.rename(final)
    _sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a folder so that a kill in between leaves no half of it under its name."""
    doomed = path.with_name(f".del-{path.name.removeprefix('.tmp-').removeprefix('.del-')}")
    if path != doomed:
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _step_folders(run_dir: Path) -> list[Path]:
    return sorted(path for path in (run_dir / "checkpoints").glob("step-*") if path.is_dir())


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}


def _optimized(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Name -> tensor of all that is stored; shared tensors once. Moments that do not exist yet are made as zeros."""
    names = _names(model)
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors |= {
        f"model.{name}": value
        for name, value in model.state_dict().items()
        if name not in parameters and isinstance(value, Tensor)
    }
    for parameter in _optimized(optimizer):
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        tensors |= {f"optim.{names[id(parameter)]}.{key}": value for key, value in state.items()}
    return tensors


@contextmanager
def _one_process_is_fine() -> Iterator[None]:
    """Silence the warning that no process group is there."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _all_succeeded(failure: BaseException | None, final: Path, aside: Path | None = None) -> None:
    """Agree over all ranks; where one failed, clean up and raise on every rank."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    failures = int(sum_over_ranks(torch.tensor(int(failure is not None), device=device)))
    if failures == 0:
        return
    wait_for_ranks()
    if aside is not None and rank_and_world()[0] == 0:
        shutil.rmtree(aside, ignore_errors=True)
    raise SaveError(f"could not write {final}: {reason(failure)}; the earlier checkpoints are untouched") from failure


def reason(failure: BaseException | None) -> str:
    """One line for what went wrong; the operating system's own word where there is one."""
    if failure is None:
        return "another rank failed"
    if isinstance(failure, dcp.CheckpointException):
        failure = next(iter(failure.failures.values()))[0]
    cause: BaseException | None = failure
    while cause is not None:
        if isinstance(cause, OSError):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    return (str(failure).strip() or type(failure).__name__).splitlines()[0]


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
