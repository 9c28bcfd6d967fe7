"""What a result may depend on beside the configuration, and which options a resumed run may change."""

import dataclasses
import platform
from enum import Enum
from importlib.metadata import version
from typing import Any

import torch

from conf.closed import ConfigError
from recipes.training.ranks import rank_and_world

_MAY_DIFFER = (
    "launch.",
    "logger.",
    "eval.",
    "checkpoint.",
    "train.max_steps",
    "train.microbatch_size",
    "collate.max_tokens",
)


def plain(value: Any) -> Any:
    """A configuration dataclass as nested dicts, lists and JSON scalars; enums become their values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, device, thread and rank counts: what bit-exactness is promised for."""
    packages = {name: version(name) for name in ("torch", "transformers", "accelerate", "numpy")}
    return {
        "python": platform.python_version(),
        **packages,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "ranks": rank_and_world()[1],
    }


def environment_changes(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One phrase for each item that differs, for example `torch 2.13.0 -> 2.14.0`."""
    keys = sorted({*saved, *now})
    return [f"{key} {saved.get(key)} -> {now.get(key)}" for key in keys if saved.get(key) != now.get(key)]


def require_same_options(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse a resume under another configuration than the checkpoint's.

    Args:
        saved: Configuration of the checkpoint, as nested plain containers.
        now: This run's, likewise.

    Raises:
        ConfigError: Names the first key that differs and may not, with both values.
    """
    before, after = _flat(saved), _flat(now)
    for key in sorted({*before, *after}):
        if before.get(key) != after.get(key) and not key.startswith(_MAY_DIFFER):
            raise ConfigError(
                f"{key}={after.get(key)} differs from the checkpoint's {key}={before.get(key)}: a resumed run may "
                "change only launch, logger, eval, checkpoint, train.max_steps, train.microbatch_size, "
                "collate.max_tokens"
            )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
