"""Write docs/config.md: every group, option and key, from the dataclasses and yaml files of conf/.

    python -m scripts.make_config_docs

A test compares the file with what this module makes, so the page cannot drift from the code.
"""

import ast
import dataclasses
import inspect
import io
import tokenize
import types
import typing
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from conf import environments, policy, schema

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "config.md"

_INTRO = """\
# Configuration

<!-- Made by `python -m scripts.make_config_docs`; edit the dataclasses and yaml files of conf/ instead. -->

`python -m recipes.sft group=option key=value …` composes the yaml files of `conf/` with the overrides, and so does
`python -m recipes.grpo`. Nothing is accepted that this page does not list: an unknown key, a wrong type or an illegal
combination ends with exit code 2 and a line that names the key and the nearest valid one, before any file is written.
`--cfg job` shows the result and runs nothing. Where the offline demo, which is what runs without overrides, has another
value than the default, both stand in the table. First come the groups of `recipes.sft`, most of which `recipes.grpo`
has too; then those that only `recipes.grpo` has.

- `group=option` chooses a file of `conf/<group>/`; `key=value` sets one option; `+key` and `~key` are refused.
- `extras.anything=1` is saved with the run and affects nothing: the place for notes.
- `--config-dir=mine` adds a folder of your own files, for example `mine/experiment/first.yaml` for `experiment=first`.
- `loss._target_=mine.Loss allow_targets=[mine]` uses a class of your own; it is called with the group's other options.
- `-m key=a,b` runs one job a value, each in its own process and folder.
- `hydra.run.dir` is the run folder. Several ranks share the one that the environment variable `RUN_ID` names.
- Paths are absolute or relative to the working directory.

"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(render())


def render() -> str:
    """The page as a string."""
    parts = [_INTRO]
    shared = typing.get_type_hints(schema.SFTConfig)
    for field in dataclasses.fields(schema.SFTConfig):
        parts.append(_section(field, schema.SFTConfig, _demo_values("sft")))
    for field in dataclasses.fields(policy.GRPOConfig):
        if typing.get_type_hints(policy.GRPOConfig)[field.name] is not shared.get(field.name):
            parts.append(_section(field, policy.GRPOConfig, _demo_values("grpo"), " (recipes.grpo)"))
    for group in ("experiment", "debug"):
        parts.append(f"## {group}\n\n{_options(group)}\n")
    return "\n".join(parts)


def _section(field: dataclasses.Field[Any], root: type, demo: dict[str, Any], of: str = "") -> str:
    owner = typing.get_type_hints(root)[field.name]
    if not dataclasses.is_dataclass(owner):
        declares = next(cls for cls in root.__mro__ if field.name in inspect.get_annotations(cls))
        return f"## {field.name}{of}\n\n{_table([(field.name, declares, field, '')], demo)}"
    parts = [f"## {field.name}{of}\n"]
    if (ROOT / "conf" / field.name).is_dir():
        parts.append(_options(field.name))
    classes = _with_subclasses(owner)
    rows = [row for cls in classes for row in _rows(cls, f"{field.name}.", _only(field.name, cls, classes))]
    parts.append(_table(rows, demo))
    return "\n".join(parts)


def _options(group: str) -> str:
    """The options of a group, each with the comment on top of its file."""
    lines = []
    for file in sorted((ROOT / "conf" / group).glob("*.yaml")):
        comment = []
        for line in file.read_text().splitlines():
            if not line.startswith("#"):
                break
            if not line.startswith("# @package"):
                comment.append(line.lstrip("# "))
        command, *what = comment
        lines.append(" ".join([f"- `{group}={file.stem}`", *what, f"`{command}`"]))
    return "\n".join(lines) + "\n"


def _rows(cls: type, prefix: str, only: str) -> list[tuple[str, type, dataclasses.Field[Any], str]]:
    """`(key, class that declares it, field, note)` of the options a class adds to its base."""
    own = inspect.get_annotations(cls)
    hints = typing.get_type_hints(cls)
    rows = []
    for field in dataclasses.fields(cls):
        if field.name not in own:
            continue
        if dataclasses.is_dataclass(hints[field.name]):
            rows += _rows(hints[field.name], f"{prefix}{field.name}.", only)
        elif not (only and field.name in ("_target_", "name")):
            rows.append((f"{prefix}{field.name}", cls, field, only))
    return rows


def _table(rows: list[tuple[str, type, dataclasses.Field[Any], str]], demo: dict[str, Any]) -> str:
    lines = ["| key | type | default | |", "| --- | --- | --- | --- |"]
    for key, cls, field, only in rows:
        default = _default(field)
        shown = [f"`{_yaml(default)}`"] if default != MISSING else []
        if key in demo and _yaml(demo[key]) != _yaml(default):
            shown.append(f"demo: `{_yaml(demo[key])}`")
        note = (f"{only}: " if only else "") + help_of(cls, field.name)
        cells = [f"`{key}`", _kind(typing.get_type_hints(cls)[field.name]), "; ".join(shown) or "required", note]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def help_of(cls: type, name: str) -> str:
    """The comment that stands behind a field of an option dataclass; empty where there is none."""
    return _comments().get((cls.__name__, name), "")


@cache
def _comments() -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    for module in (schema, policy, environments):
        found |= _comments_of(Path(module.__file__).read_text())
    return found


def _comments_of(source: str) -> dict[tuple[str, str], str]:
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    return {
        (node.name, item.target.id): comments[item.end_lineno or 0]
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and (item.end_lineno or 0) in comments
    }


@cache
def _demo_values(recipe: str) -> dict[str, Any]:
    """Every key of a recipe's configuration without overrides."""
    with initialize_config_module("conf", version_base="1.3", job_name=recipe):
        cfg = compose(recipe)
    flat: dict[str, Any] = {}

    def walk(node: Any, prefix: str) -> None:
        for name, value in node.items():
            if isinstance(value, dict) and value:
                walk(value, f"{prefix}{name}.")
            else:
                flat[f"{prefix}{name}"] = value

    walk(OmegaConf.to_container(cfg), "")
    return flat


def _with_subclasses(cls: type) -> list[type]:
    return [cls, *(sub for child in cls.__subclasses__() for sub in _with_subclasses(child))]


def _only(group: str, cls: type, classes: list[type]) -> str:
    """The options of a group that have the fields of a subclass, in words."""
    if cls is classes[0]:
        return ""
    names = []
    for file in sorted((ROOT / "conf" / group).glob("*.yaml")):
        extends = OmegaConf.load(file).defaults[0]
        if issubclass(OmegaConf.get_type(ConfigStore.instance().load(f"{group}/{extends}.yaml").node), cls):
            names.append(file.stem)
    return f"{group}={'|'.join(names)}"


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]


def _yaml(value: Any) -> str:
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _kind(hint: Any) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join("null" if part is type(None) else _kind(part) for part in typing.get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(hint.__members__)
    if typing.get_origin(hint) in (list, dict):
        return {list: "list", dict: "mapping"}[typing.get_origin(hint)]  # type: ignore[index]
    return {int: "whole number", float: "number", bool: "true or false", str: "text"}.get(hint, "see right")


if __name__ == "__main__":
    main()
