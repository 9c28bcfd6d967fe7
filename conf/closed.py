"""The configuration is closed: what is not declared in `conf.schema` is refused, at any level.

`to_config` turns what Hydra composed into plain dataclasses. It is the only way in: a misspelt key, a wrong type, a value
that is missing, an interpolation that leads nowhere, an illegal combination or a `_target_` outside the allowed modules ends
in a `ConfigError` that names the key. This module imports no torch.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

__all__ = ["ALLOWED_TARGETS", "ConfigError", "check_target", "field_keys", "nearest", "to_config", "unknown_key"]

ALLOWED_TARGETS = ("transformers", "torch", "peft", "datum", "recipes")
"""Modules that a `_target_` may name without `allow_targets`."""

_DOTTED_NAMES = ("eval.score",)  # options that name a function, held to the same rule as a `_target_`


class ConfigError(ValueError):
    """The configuration is wrong: exit code 2, no step taken. The message names the key and what is accepted."""


def to_config(cfg: DictConfig) -> Any:
    """Check a composed configuration and return it as an instance of its dataclass.

    Args:
        cfg: What Hydra composed, without the `hydra` node. Its root must be typed by a dataclass of `conf.schema`.

    Returns:
        The root dataclass, nested groups included, every `__post_init__` run, interpolations resolved.

    Raises:
        ConfigError: Naming every unknown key, or the first value that is wrong.
    """
    root = OmegaConf.get_type(cfg)
    if root is None or not dataclasses.is_dataclass(root):
        raise ConfigError(
            "the primary configuration is not typed: its defaults list must begin with a schema, for example `- sft_schema` "
            "(to repeat a saved run, give the lines of its .hydra/overrides.yaml as overrides)"
        )
    unknown = list(_unknown_keys(cfg, ""))
    if unknown:
        known = list(field_keys(cfg))
        raise ConfigError("; ".join(unknown_key(key, known) for key in unknown))
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise ConfigError("; ".join(f"{key} is required: give {key}=<value>" for key in missing))
    try:
        config = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(value_error(error)) from error
    allow_targets = getattr(config, "allow_targets", ())
    for key, target in _targets(config, ""):
        check_target(key, target, allow_targets)
    return config


def check_target(key: str, target: str, allow_targets: Sequence[str] = ()) -> None:
    """Refuse a dotted name outside `ALLOWED_TARGETS` and `allow_targets`.

    Args:
        key: Option that holds the name, for the message.
        target: Dotted name, for example `recipes.losses.cross_entropy.CrossEntropy`.
        allow_targets: Further modules; a module allows what is inside it (`my.losses` allows `my.losses.Best`, not
            `my.lossesx.Best`).

    Raises:
        ConfigError: If no allowed module holds the name.
    """
    allowed = (*ALLOWED_TARGETS, *allow_targets)
    if not any(target.startswith(f"{module}.") for module in allowed):
        module = target.partition(".")[0]
        raise ConfigError(
            f"{key}={target}: a target must lie in one of the modules {', '.join(allowed)}; to trust another one give "
            f"allow_targets=[{module}]"
        )


def unknown_key(key: str, known: Iterable[str]) -> str:
    """One line that says a key is unknown, which one is nearest, and what stands beside it.

    >>> unknown_key("optim.lrr", ["optim.lr", "optim.eps"])
    'unknown key optim.lrr, did you mean optim.lr?'
    >>> unknown_key("optim.zzz", ["optim.lr", "optim.eps"])
    'unknown key optim.zzz; optim has eps, lr'
    """
    known = list(known)
    near = nearest(key, known)
    if near is not None:
        return f"unknown key {key}, did you mean {near}?"
    parent = key.rpartition(".")[0]
    while parent and not any(name.startswith(f"{parent}.") for name in known):
        parent = parent.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    beside = sorted({name.removeprefix(prefix).partition(".")[0] for name in known if name.startswith(prefix)})
    return f"unknown key {key}; {parent or 'the configuration'} has {', '.join(beside)}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a mistyped one most likely meant, or None.

    A name whose last part is known elsewhere counts as near: `lr` is near `optim.lr`.
    """
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if close:
        return close[0]
    leaf = name.rpartition(".")[2]
    same_leaf = [key for key in known if key.rpartition(".")[2] == leaf]
    if len(same_leaf) == 1:
        return same_leaf[0]
    siblings = [key for key in known if key.rpartition(".")[0] == name.rpartition(".")[0]]
    close = difflib.get_close_matches(leaf, [key.rpartition(".")[2] for key in siblings], n=1, cutoff=0.6)
    return f"{name.rpartition('.')[0]}.{close[0]}".lstrip(".") if close else None


def field_keys(cfg: DictConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a composed configuration, groups and options alike."""
    for name in cfg:
        key = f"{prefix}{name}"
        yield key
        child = cfg._get_node(name)
        if isinstance(child, DictConfig) and not (child._is_none() or child._is_missing() or child._is_interpolation()):
            yield from field_keys(child, f"{key}.")


def value_error(error: OmegaConfBaseException) -> str:
    """One line for a value that OmegaConf refused: the key, the reason, what is accepted."""
    reason = (error.msg or str(error)).strip().splitlines()[0]
    key = error.full_key
    return f"{key}: {reason}" if key else reason


def _unknown_keys(cfg: DictConfig, prefix: str) -> Iterator[str]:
    """Keys that the dataclass of their node does not declare; dict fields are free-form and not entered."""
    declared = {field.name for field in dataclasses.fields(OmegaConf.get_type(cfg))}
    for name in cfg:
        key = f"{prefix}{name}"
        if name not in declared:
            yield key
            continue
        child = cfg._get_node(name)
        if isinstance(child, DictConfig) and not (child._is_none() or child._is_missing() or child._is_interpolation()):
            if dataclasses.is_dataclass(OmegaConf.get_type(child)):
                yield from _unknown_keys(child, f"{key}.")
        elif isinstance(child, ListConfig):
            continue


def _targets(config: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """`(key, dotted name)` of every `_target_` and of every option that names a function."""
    for field in dataclasses.fields(config):
        key, value = f"{prefix}{field.name}", getattr(config, field.name)
        if field.name == "_target_" or key in _DOTTED_NAMES:
            yield key, value
        elif dataclasses.is_dataclass(value):
            yield from _targets(value, f"{key}.")
