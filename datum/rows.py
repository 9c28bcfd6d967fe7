"""Files -> rows: JSONL, Parquet, folders, globs, weighted lists of them, and datasets of the Hugging Face hub.

A row is a dict with one of four forms, told by its keys:

    messages            {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
    prompt_completion   {"prompt": "2+2=", "completion": "4"}
    text                {"text": "Two and two make four."}
    tokens              {"tokens": [5, 8, 2], "weights": [0, 1, 1]}        # or "input_ids"

Reading is lazy and in a fixed order; every row knows where it came from, so that later errors can name it.
"""

import glob
import importlib.resources
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datum.errors import DataError

__all__ = ["FORMATS", "Row", "checked_row", "read_hub", "read_records", "read_rows", "row_form"]

_KEYS: dict[str, tuple[tuple[str, ...], ...]] = {  # form -> alternatives of keys that must all be there
    "messages": (("messages",),),
    "prompt_completion": (("prompt", "completion"),),
    "text": (("text",),),
    "tokens": (("tokens",), ("input_ids",)),
}
FORMATS = ("auto", *_KEYS)
"""Accepted values of `format`."""

_ACCEPTED = "messages | prompt and completion | text | tokens (or input_ids)"
_SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True, slots=True)
class Row:
    """One row and its origin.

    Attributes:
        data: Its columns. Columns whose value is null count as absent.
        where: "file:line" for JSONL (lines from 1), "file row n" for Parquet and the hub (rows from 0).
        source: Index of its entry in the list of paths; 0 for a single path.
        weight: Weight of that entry: how many times its rows appear in one epoch.
    """

    data: dict[str, Any]
    where: str
    source: int = 0
    weight: float = 1.0


def read_rows(path: Any, *, format: str = "auto", max_rows: int | None = None) -> Iterator[Row]:
    """Read rows in a fixed order: entries as listed, files of a folder or glob by name, rows as in the file.

    Args:
        path: A file, a folder (every *.jsonl and *.parquet below it) or a glob, as str or Path; `pkg://package/file`
            names a file inside an installed Python package; or a list of these, each plain or as
            `{"path": …, "weight": w}`. Weight w > 0 is how many times the entry's rows appear in one epoch (default 1).
        format: One of FORMATS. `auto` takes each row by its keys, so that one file may mix forms.
        max_rows: Read the first n rows only, over all entries together.

    Raises:
        DataError: A path that leads nowhere, no rows, a malformed line or file, a row that is no object or not of the
            form asked for. The text names file and line or row. Raised while iterating.
    """
    _check_format(format)
    entries = _entries(path)
    left = math.inf if max_rows is None else max_rows
    for source, (location, weight) in enumerate(entries):
        if left == 0 and any(w != 1 for _, w in entries):
            raise DataError(
                f"{location}: max_rows={max_rows} is used up by the entries before it, so this part of the mixture "
                "would be missing; raise max_rows or shorten the list"
            )
        rows = (row for file in _files(location) for row in _read_file(file))
        count = 0
        while count < left and (item := next(rows, None)) is not None:
            count += 1
            yield _row(*item, format, source, weight)
        if count == 0 and left > 0:
            raise DataError(f"{location}: no rows; a data set needs at least one")
        left -= count


def read_records(path: Any) -> Iterator[Row]:
    """Read JSON objects of any columns, as `read_rows` reads rows: nothing is asked of their keys.

    Args:
        path: As for `read_rows`.

    Raises:
        DataError: A path that leads nowhere, an entry without records, a malformed line or file, or a record that is no
            object; names file and line. Raised while iterating.
    """
    for source, (location, weight) in enumerate(_entries(path)):
        count = 0
        for file in _files(location):
            for data, where in _read_file(file):
                if not isinstance(data, dict):
                    raise DataError(f"{where}: a record must be a JSON object, got {type(data).__name__}")
                count += 1
                yield Row(data, where, source, weight)
        if count == 0:
            raise DataError(f"{location}: no records; at least one is needed")


def read_hub(
    id: str,
    subset: str | None = None,
    split: str = "train",
    revision: str | None = None,
    *,
    format: str = "auto",
    max_rows: int | None = None,
) -> Iterator[Row]:
    """Read rows of a dataset of the Hugging Face hub, or of a local folder in its form, by the `datasets` library.

    Args:
        id: Hub id ("HuggingFaceTB/smoltalk") or a local folder.
        subset: Name of the configuration; None for the default one.
        split: Name of the split, slices included ("train[:1000]").
        revision: Branch, tag or commit.
        format: As in `read_rows`.
        max_rows: Read the first n rows only.

    Raises:
        DataError: The dataset cannot be loaded (the library's reason is in the text), or a row is wrong.
    """
    _check_format(format)
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"reading {id} from the hub needs the datasets library: pip install datasets") from error
    try:
        table = datasets.load_dataset(id, name=subset, split=split, revision=revision)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"dataset {id} (subset {subset}, split {split}) cannot be loaded: {_first_line(error)}"
        ) from error
    if len(table) == 0:
        raise DataError(f"dataset {id}, split {split}: no rows; a data set needs at least one")
    for number, data in enumerate(table):
        if max_rows is not None and number >= max_rows:
            return
        yield _row(_without_nulls(data), f"{id}[{split}] row {number}", format, 0, 1.0)


def checked_row(row: Row) -> Row:
    """The row without columns whose value is null; the row itself if it has none.

    Raises:
        DataError: Its data are no dict.
    """
    if not isinstance(row.data, dict):
        raise DataError(
            f"{row.where}: a row must be a JSON object, got {type(row.data).__name__}; accepted are {_ACCEPTED}"
        )
    if all(value is not None for value in row.data.values()):
        return row
    return replace(row, data={key: value for key, value in row.data.items() if value is not None})


def row_form(row: Row, format: str = "auto") -> str:
    """Tell the form of a row: messages, prompt_completion, text or tokens.

    Raises:
        DataError: The row has not the keys of `format`; or, under `auto`, those of no form or of several.
    """
    keys = row.data.keys()
    present = [form for form, choices in _KEYS.items() if any(keys >= set(choice) for choice in choices)]
    if format != "auto":
        if format not in present:
            raise DataError(
                f"{row.where}: format={format} needs the keys {_wanted(format)}, this row has {_listed(keys)}"
                + (f"; it looks like format={present[0]}" if present else "")
            )
        return format
    if len(present) == 1:
        return present[0]
    if present:
        raise DataError(
            f"{row.where}: the row has the keys of several forms ({', '.join(present)}); say which is meant: "
            f"data.format={present[0]}"
        )
    raise DataError(f"{row.where}: no known row form, its keys are {_listed(keys)}; accepted are {_ACCEPTED}")


def _entries(path: Any) -> list[tuple[str, float]]:
    """Bring every accepted form of `path` to a list of (location, weight)."""
    items = path if isinstance(path, Sequence) and not isinstance(path, str) else [path]
    if not items:
        raise DataError("the list of paths is empty; name at least one file, folder or glob")
    entries = []
    for item in items:
        weight: Any = 1.0
        if isinstance(item, Mapping):
            if unknown := [key for key in item if key not in ("path", "weight")]:
                raise DataError(f"a path entry has the keys path and weight, got {unknown[0]!r} in {dict(item)}")
            weight = item.get("weight", 1.0)
            item = item.get("path")
        if not isinstance(item, str | Path) or not str(item):
            raise DataError(f"a path must be a string or {{path: …, weight: …}}, got {item!r}")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise DataError(f"{item}: weight must be a finite number above 0, got {weight!r}")
        entries.append((str(item), float(weight)))
    return entries


def _files(location: str) -> list[Path]:
    if location.startswith("pkg://"):
        package, _, inside = location.removeprefix("pkg://").partition("/")
        try:
            path = Path(str(importlib.resources.files(package))) / inside
        except (ImportError, TypeError, ValueError) as error:
            raise DataError(f"{location}: there is no installed package {package!r}") from error
    else:
        path = Path(location).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
        if not files:
            raise DataError(f"{location}: the folder has no *.jsonl or *.parquet file in it or below it")
    elif path.exists():
        files = [path]
    elif any(mark in location for mark in "*?["):
        files = sorted(file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file())  # noqa: PTH207
        if not files:
            raise DataError(f"{location}: no file matches the glob (working folder {Path.cwd()})")
    else:
        raise DataError(f"{location}: no such file or folder (working folder {Path.cwd()})")
    for file in files:
        if file.suffix not in _SUFFIXES:
            raise DataError(f"{file}: unknown kind of file {file.suffix!r}; accepted are .jsonl and .parquet")
    return files


def _read_file(file: Path) -> Iterator[tuple[Any, str]]:
    return _read_jsonl(file) if file.suffix == ".jsonl" else _read_parquet(file)


def _read_jsonl(file: Path) -> Iterator[tuple[Any, str]]:
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{file}:{number}"
                if not line.strip():
                    continue  # an empty line holds no row
                try:
                    yield json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip()), where
                except UnicodeDecodeError as error:
                    raise DataError(f"{where}: the line is not UTF-8 ({error.reason} at byte {error.start})") from error
                except json.JSONDecodeError as error:
                    raise DataError(
                        f"{where}: malformed JSON ({error.msg} at column {error.colno}); "
                        "a JSONL file has one complete JSON object on each line"
                    ) from error
                except RecursionError as error:
                    raise DataError(f"{where}: malformed JSON (nested too deeply)") from error
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error


def _read_parquet(file: Path) -> Iterator[tuple[Any, str]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{file}: reading Parquet needs pyarrow: pip install pyarrow") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                for data in batch.to_pylist():
                    yield _without_nulls(data), f"{file} row {number}"
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a readable Parquet file, at row {number}: {_first_line(error)}") from error


def _without_nulls(value: Any) -> Any:
    """Drop null fields of structs, at any depth: in a columnar file each struct carries the keys of all the others."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _row(data: Any, where: str, format: str, source: int, weight: float) -> Row:
    row = checked_row(Row(data, where, source, weight))
    row_form(row, format)
    return row


def _check_format(format: str) -> None:
    if format not in FORMATS:
        raise ValueError(f"format={format!r}: accepted are {', '.join(FORMATS)}")


def _wanted(form: str) -> str:
    return " or ".join(" and ".join(choice) for choice in _KEYS[form])


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, keys))) or "none"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
