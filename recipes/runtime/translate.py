"""What Hydra and OmegaConf say, in our words: one line that names the key and what is accepted."""

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import yaml
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException, ValidationError

from conf.closed import ConfigError, describe_error

__all__ = ["translated"]

_NOT_IN_DEFAULTS = re.compile(r"Could not override '([^']+)'")
_NOT_A_FOLDER = re.compile(r"provider=(?P<key>\S+) in .*, path=(?P<path>.*) is not available\.")


def translated(
    call: Callable[[], Any],
    *,
    no_option: Callable[[str, str], str] | None = None,
    groups: Sequence[str] = (),
    overrides: Sequence[Override] = (),
) -> Any:
    """The result of a call to Hydra, its refusals and its warning about a search path as `ConfigError`.

    Args:
        call: Takes no arguments.
        no_option: The message for `(group, option)` where the group has no such option.
        groups: Names of groups, suggested for a misspelt one.
        overrides: What was written on the command line, to name the key that was meant.

    Raises:
        ConfigError: The call failed.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", r"provider=.* is not available", UserWarning)
            return call()
    except ConfigError:
        raise
    except UserWarning as warning:
        raise ConfigError(_explain_search_path(str(warning))) from warning
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise ConfigError(_explain(error, no_option, groups, overrides)) from error


def _explain(
    error: Exception,
    no_option: Callable[[str, str], str] | None,
    groups: Sequence[str],
    overrides: Sequence[Override],
) -> str:
    message = str(error).strip()
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and "'" in message:
        missing = message.rsplit("Could not find '", 1)[-1].partition("'")[0]
        group, _, option = missing.rpartition("/")
        if group and no_option is not None:
            return no_option(group, option)
        return message.splitlines()[0]
    where = message.partition(": ")[0] if message.startswith("In '") else ""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OmegaConfBaseException) and cause.full_key is not None):
        cause = cause.__cause__ or cause.__context__
    if not isinstance(cause, OmegaConfBaseException):
        if (found := _NOT_IN_DEFAULTS.search(message)) is not None:
            name = found[1]
            group, at, _ = name.partition("@")
            if at and group in groups:
                return f"{name}: a group's place in the configuration is fixed; write {group}=<option>"
            if group in groups:
                by = f" (asked for by {where.removeprefix('In ')})" if where else ""
                return f"this recipe has no group {group}{by}; it belongs to another recipe"
            return message.partition("To append")[0].strip()  # Hydra would advise a `+`
        for override in overrides:  # OmegaConf takes the last part for the index of a list
            parent, _, leaf = override.key_or_group.rpartition(".")
            if isinstance(error, ValueError) and parent and message.endswith(f" '{leaf}'"):
                return f"unknown key {parent}.{leaf}: {parent} is a list; give all of it, {parent}=[a,b]"
        return " ".join(line.strip() for line in message.splitlines()[:4])
    key = str(cause.full_key)
    file = where.removeprefix("In '").rstrip("'")
    if key in groups and file.startswith(f"{key}/"):
        return (
            f"{key}={file.removeprefix(f'{key}/')}: the keys of this file would stand under `{key}`, which has none; "
            "its first line must be `# @package _global_`"
        )
    said = describe_error(cause, groups)
    beneath = [o.key_or_group for o in overrides if o.key_or_group.startswith(f"{key}.")]
    if isinstance(cause, ValidationError) and beneath and not where:
        return f"unknown key {beneath[0]}: {key} has no keys, it is one value;{said.partition(':')[2] or ' ' + said}"
    return f"{said} ({where.replace('In ', 'in ', 1)})" if where else said


def _explain_search_path(warning: str) -> str:
    found = _NOT_A_FOLDER.fullmatch(warning)
    if found is None:
        return warning
    return f"{found['key'].removeprefix('provider=')}: {found['path']} is not there; accepted are folders and packages"
