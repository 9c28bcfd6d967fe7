"""From a `_target_` to an object: the one place where a name in the configuration becomes code."""

import dataclasses
import importlib
import inspect
from collections.abc import Sequence
from enum import Enum
from typing import Any

from conf.closed import ConfigError, check_target

__all__ = ["instantiate", "locate"]


def locate(target: str, allow_targets: Sequence[str] = (), *, key: str = "_target_") -> Any:
    """Import what a dotted name means.

    Args:
        target: Dotted name, for example `recipes.losses.cross_entropy.CrossEntropy`.
        allow_targets: Modules allowed beside `conf.closed.ALLOWED_TARGETS`.
        key: Option that holds the name, for messages.

    Returns:
        The class or function.

    Raises:
        ConfigError: The name lies outside the allowed modules, leads out of them (as `torch.os.system` does), does not
            exist, or cannot be called.
    """
    check_target(key, target, allow_targets)
    try:
        found = _import(target)
    except Exception as error:  # importing a module runs it, so anything may come
        raise ConfigError(f"{key}={target} cannot be imported: {type(error).__name__}: {error}") from error
    origin = getattr(found, "__module__", None)
    if isinstance(origin, str):
        check_target(key, f"{origin}.{getattr(found, '__qualname__', type(found).__name__)}", allow_targets)
    if inspect.ismodule(found) or not callable(found):
        raise ConfigError(f"{key}={target} is a {type(found).__name__}: accepted are classes and functions")
    return found


def instantiate(config: Any, allow_targets: Sequence[str] = (), *, key: str = "", **further: Any) -> Any:
    """Call the `_target_` of an option group with the group's other options as keyword arguments.

    Enums are passed by their value (`Aggregation.token` as `"token"`), so that a target needs nothing of `conf`; nested
    groups are passed as the dataclasses they are.

    Args:
        config: Dataclass with a field `_target_`.
        allow_targets: Modules allowed beside `conf.closed.ALLOWED_TARGETS`.
        key: Name of the group, for messages, for example `loss`.
        **further: Arguments that are no options of the group.

    Returns:
        What the target returns.

    Raises:
        ConfigError: The target cannot be used (see `locate`), or does not take exactly these options.
    """
    target = locate(config._target_, allow_targets, key=f"{key}._target_" if key else "_target_")
    options = {
        field.name: _plain(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name != "_target_"
    } | further
    signature = inspect.signature(target)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(
            f"{key or type(config).__name__}: {config._target_}{signature} does not take the options "
            f"{', '.join(options)}: {error}"
        ) from error
    return target(**options)


def _import(target: str) -> Any:
    """The longest part of a dotted name that is a module, then the attributes that the rest names."""
    parts = target.split(".")
    for end in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:end])
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Not a module: try a shorter name. A module that misses something it imports is another matter.
            if end == 1 or error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(f"{target} has no module in front of its name")


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value
