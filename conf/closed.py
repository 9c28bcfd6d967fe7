"""The configuration is closed: what is not declared in `conf.schema` is refused, at any level.

`to_config` turns what Hydra composed into plain dataclasses. It is the only way in: a misspelt key, a wrong type, a
value that is missing, an interpolation that leads nowhere, an illegal combination or a `_target_` outside the allowed
modules ends in a `ConfigError` that names the key. This module imports no torch.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Any

from omegaconf import BooleanNode, DictConfig, EnumNode, FloatNode, IntegerNode, ListConfig, OmegaConf, StringNode
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    InterpolationValidationError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

__all__ = [
    "ALLOWED_TARGETS",
    "ConfigError",
    "check_target",
    "describe_error",
    "field_keys",
    "nearest",
    "to_config",
    "unknown_key",
]

ALLOWED_TARGETS = ("transformers", "torch", "peft", "datum", "recipes")
"""Modules that a `_target_` may name without `allow_targets`."""

_FUNCTION_NAMES = ("eval.score", "model.rows")  # options that name a function, held to the same rule as a `_target_`


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
            "the primary configuration is not typed: its defaults list must begin with a schema, for example "
            "`- sft_schema` (to repeat a saved run, give the lines of its .hydra/overrides.yaml as overrides)"
        )
    unknown = list(_undeclared_keys(cfg))
    if unknown:
        known = [key for key in field_keys(cfg) if key not in unknown]
        raise ConfigError("; ".join(unknown_key(key, known) for key in unknown))
    try:
        missing = sorted(OmegaConf.missing_keys(cfg))
        if missing:
            raise ConfigError("; ".join(f"{key} is required: give {key}=<value>" for key in missing))
        config = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(describe_error(error)) from error
    for key, target in _targets(config):
        check_target(key, target, getattr(config, "allow_targets", ()))
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
        raise ConfigError(
            f"{key}={target}: a target must lie in one of the modules {', '.join(allowed)}; to trust another one give "
            f"allow_targets=[{target.partition('.')[0]}]"
        )


def unknown_key(key: str, known: Iterable[str], groups: Iterable[str] = ()) -> str:
    """One line that says a key is unknown, and which one is nearest or what stands beside it.

    Args:
        key: Dotted key.
        known: Every dotted key there is.
        groups: Names that are no keys but can be chosen, such as `experiment`; suggested, not listed.

    >>> unknown_key("optim.lrr", ["optim.lr", "optim.eps"])
    'unknown key optim.lrr, did you mean optim.lr?'
    >>> unknown_key("optim.zzz", ["optim.lr", "optim.eps"])
    'unknown key optim.zzz; optim has eps, lr'
    >>> unknown_key("optim.lr.x", ["optim", "optim.lr"])
    'unknown key optim.lr.x: further keys in optim.lr are not supported'
    """
    known = list(known)
    near = nearest(key, {*known, *groups} - {key})
    if near is not None:
        return f"unknown key {key}, did you mean {near}?"
    parent = key.rpartition(".")[0]
    if parent in known and not any(name.startswith(f"{parent}.") for name in known):
        return f"unknown key {key}: further keys in {parent} are not supported"
    while parent and not any(name.startswith(f"{parent}.") for name in known):
        parent = parent.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    beside = {name.removeprefix(prefix).partition(".")[0] for name in known if name.startswith(prefix)}
    return f"unknown key {key}; {parent or 'the configuration'} has {', '.join(sorted(beside))}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a mistyped one most likely meant, or None.

    The same parent comes first, then the whole name where the parent is unknown too, then a last part that is known in
    one other place. A group that the name lies in is not what was meant.

    >>> nearest("optim.l", ["optim.lr", "optim.eps"]), nearest("lr", ["optim.lr", "optim.eps"]), nearest("x", ["optim"])
    ('optim.lr', 'optim.lr', None)
    """
    known = sorted(key for key in known if not name.startswith(f"{key}."))
    parent, dot, leaf = name.rpartition(".")
    siblings = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == parent]
    if close := difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.6):
        return f"{parent}{dot}{close[0]}"
    if not siblings and (close := difflib.get_close_matches(name, known, n=1, cutoff=0.8)):
        return close[0]
    same_leaf = [key for key in known if key.rpartition(".")[2] == leaf]
    return same_leaf[0] if len(same_leaf) == 1 else None


def field_keys(cfg: DictConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a composed configuration, groups and options alike."""
    for name, child in _children(cfg):
        yield f"{prefix}{name}"
        if isinstance(child, DictConfig):
            yield from field_keys(child, f"{prefix}{name}.")


def describe_error(error: OmegaConfBaseException, groups: Iterable[str] = ()) -> str:
    """One line for what OmegaConf refused: the key, the value, what is accepted (`groups` as for `unknown_key`)."""
    key = error.full_key or ""
    reason = (error.msg or str(error)).strip().splitlines()[0]
    if isinstance(error, ConfigKeyError | ConfigAttributeError) and isinstance(error.parent_node, DictConfig):
        root: Any = error.parent_node._get_root()
        is_hydra = key.startswith("hydra.")
        return unknown_key(key, [k for k in field_keys(root) if (k.partition(".")[0] == "hydra") == is_hydra], groups)
    if isinstance(error, MissingMandatoryValue):
        return f"{key} is required: give {key}=<value>"
    if isinstance(error, InterpolationResolutionError) and not isinstance(error, InterpolationValidationError):
        return f"{key}: {reason}"
    if isinstance(error, ValidationError) and key:
        accepted = _accepted(error)
        if accepted:
            return f"{key}={_shown(error.value)}: accepted {accepted}"
    return f"{key}: {reason}" if key else reason


def _accepted(error: OmegaConfBaseException) -> str | None:
    """What the option of a failed assignment takes, from its type and the range its dataclass checks."""
    node, owner = error.child_node, error.object_type
    if isinstance(node, EnumNode):
        accepted = f"are {', '.join(node.enum_type.__members__)}"
    elif isinstance(node, FloatNode | IntegerNode):
        kind = "are numbers" if isinstance(node, FloatNode) else "are whole numbers"
        accepted = _checked_range(owner, error.key, float("nan") if isinstance(node, FloatNode) else -1) or kind
    elif isinstance(node, BooleanNode):
        accepted = "are true, false"
    elif isinstance(node, StringNode):
        accepted = "is a text"
    elif isinstance(node, ListConfig):
        accepted = "is a list, for example [a,b]"
    elif isinstance(node, DictConfig):
        names = list(node) if OmegaConf.get_type(node) is not dict else []
        accepted = f"is a mapping of {', '.join(map(str, names))}" if names else "is a mapping, for example {a: 1}"
    else:
        return None
    return f"{accepted}, or null" if node._metadata.optional else accepted


def _checked_range(owner: Any, name: Any, outside: float) -> str | None:
    """The range of a number in words, from the message of the dataclass that checks it."""
    try:
        owner(**{name: outside})
    except ConfigError as error:
        option, _, accepted = str(error).partition(": accepted ")
        return accepted or None if option.partition("=")[0].endswith(f".{name}") else None
    return None


def _shown(value: Any) -> str:
    if isinstance(value, Enum):
        return value.name
    return "null" if value is None else str(value)


def _children(cfg: DictConfig) -> Iterator[tuple[str, Any]]:
    """`(name, node)` of every key; a mapping that is null, missing or an interpolation counts as a leaf (None)."""
    for name in cfg:
        child = cfg._get_node(name)
        is_open = isinstance(child, DictConfig) and not (
            child._is_none() or child._is_missing() or child._is_interpolation()
        )
        yield str(name), child if is_open else None


def _undeclared_keys(cfg: DictConfig, prefix: str = "") -> Iterator[str]:
    """Keys that the dataclass of their node does not declare; a dict field is free-form and not entered."""
    owner: Any = OmegaConf.get_type(cfg)
    declared = {field.name for field in dataclasses.fields(owner)}
    for name, child in _children(cfg):
        if name not in declared:
            yield f"{prefix}{name}"
        elif child is not None and dataclasses.is_dataclass(OmegaConf.get_type(child)):
            yield from _undeclared_keys(child, f"{prefix}{name}.")


def _targets(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """`(key, dotted name)` of every `_target_` and of every option that names a function."""
    for field in dataclasses.fields(config):
        key, value = f"{prefix}{field.name}", getattr(config, field.name)
        if field.name == "_target_" or key in _FUNCTION_NAMES:
            if value is not None:
                yield key, value
        elif dataclasses.is_dataclass(value):
            yield from _targets(value, f"{key}.")
