"""The data contract: one sequence in (`Datum`), one batch out (`collate_datums`). Keys and shapes: docs/batch.md.

Importing this package imports no torch; the names below load it when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datum.datum import (
        CROSS_ENTROPY_IGNORE_IDX,
        Datum,
        collate_datums,
        default_collater,
        pack_features_for_thd,
        packed_sequence_thd_collater,
    )
    from datum.errors import DataError, DataTypeError

__all__ = [
    "CROSS_ENTROPY_IGNORE_IDX",
    "DataError",
    "DataTypeError",
    "Datum",
    "collate_datums",
    "default_collater",
    "pack_features_for_thd",
    "packed_sequence_thd_collater",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'datum' has no attribute {name!r}")
    home = "datum.errors" if name.endswith("Error") else "datum.datum"
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
