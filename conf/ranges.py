"""Checks of option values; each raises a `ConfigError` that says what is accepted."""

from math import inf
from typing import Any

from omegaconf import MISSING

from conf.closed import ConfigError

__all__ = ["above_zero", "at_least", "check_paths", "fraction", "from_zero", "one_of"]


def at_least(key: str, value: int, low: int) -> None:
    """Refuse a whole number below `low`."""
    if value < low:
        raise ConfigError(f"{key}={value}: accepted are whole numbers from {low}")


def above_zero(key: str, value: float) -> None:
    """Refuse a number that is not finite and above 0."""
    if not 0 < value < inf:
        raise ConfigError(f"{key}={value}: accepted are finite numbers above 0")


def from_zero(key: str, value: float) -> None:
    """Refuse a number that is not finite and from 0."""
    if not 0 <= value < inf:
        raise ConfigError(f"{key}={value}: accepted are finite numbers from 0")


def fraction(key: str, value: float, *, closed: bool = False) -> None:
    """Refuse a number outside of [0, 1), or of [0, 1] if `closed`."""
    if not (0 <= value < 1 or (closed and value == 1)):
        raise ConfigError(f"{key}={value}: accepted are numbers from 0 to 1{'' if closed else ' (1 excluded)'}")


def one_of(key: str, value: str, options: tuple[str, ...], otherwise: str | None = None) -> None:
    """Refuse a name that is not among `options`; `otherwise` says what to give instead."""
    if value != MISSING and value not in options:
        accepted = f"accepted {'is' if len(options) == 1 else 'are'} {', '.join(options)}"
        raise ConfigError(f"{key}={value}: {accepted}{f' ({otherwise})' if otherwise else ''}")


def check_paths(key: str, value: Any) -> None:
    """A path is a string, or a non-empty list of strings and of mappings {path, weight} with a positive weight."""
    for entry in value if isinstance(value, list) and value else [value]:
        if isinstance(entry, str) and entry:
            continue
        weight = entry.get("weight", 1) if isinstance(entry, dict) and isinstance(value, list) else None
        is_positive = isinstance(weight, int | float) and not isinstance(weight, bool) and 0 < weight < inf
        if not is_positive or not isinstance(entry.get("path"), str) or not entry.keys() <= {"path", "weight"}:
            raise ConfigError(
                f"{key}={value!r}: accepted are a path, or a list like [a.jsonl,{{path: b.jsonl, weight: 0.5}}] with "
                "weights above 0"
            )
