"""The two layouts of a batch, written from checked columns. Every key, shape and dtype: docs/batch.md."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from datum.columns import Columns
from datum.positions import restarting_positions

__all__ = ["BATCH_KEYS", "as_rows", "packed_batch", "packed_row", "padded_batch"]

# Keys that a layout writes itself, so that no side input may carry them.
BATCH_KEYS = frozenset(
    (
        "input_ids",
        "labels",
        "attention_mask",
        "padding_mask",
        "position_ids",
        "seq_lens",
        "seq_lens_padded",
        "qkv_format",
    )
)


def padded_batch(columns: Columns, pad_seq_len_divisible: int | None, ignore_index: int) -> dict[str, Any]:
    """One sequence a row, filled up at the right to the longest, rounded up to `pad_seq_len_divisible`."""
    lengths = columns.lengths
    width = _round_up(max(lengths), pad_seq_len_divisible)
    batch: dict[str, Any] = {"input_ids": as_rows(columns.input_ids, lengths, width, 0)}
    if columns.labels is not None:
        batch["labels"] = as_rows(columns.labels, lengths, width, ignore_index)
    # The masks come from the lengths: a token that happens to equal the pad id is a token.
    real = np.zeros((len(lengths), width), np.int64)
    padding = np.ones((len(lengths), width), np.bool_)
    for real_row, padding_row, length in zip(real, padding, lengths):
        real_row[:length] = 1
        padding_row[:length] = False
    batch["attention_mask"] = torch.from_numpy(real)
    batch["padding_mask"] = torch.from_numpy(padding)
    for key, column in columns.per_token.items():
        batch[key] = as_rows(column, lengths, width, 0)
    for key, column in columns.per_sample.items():
        batch[key] = torch.from_numpy(column)
    return batch


def packed_batch(columns: Columns, pad_seq_len_divisible: int | None, ignore_index: int) -> dict[str, Any]:
    """All sequences end to end in one row [1, total]; per-sample fields stay [D]."""
    width = _round_up(sum(columns.lengths), pad_seq_len_divisible)
    row = {key: torch.from_numpy(value) for key, value in packed_row(columns, width, ignore_index).items()}
    batch: dict[str, Any] = {key: row[key] if key in columns.per_sample else row[key].unsqueeze(0) for key in row}
    batch["qkv_format"] = "thd"
    return batch


def packed_row(columns: Columns, width: int, ignore_index: int) -> dict[str, np.ndarray]:
    """One packed row of `width` positions as 1-D arrays, beside the per-sample fields [D]."""
    lengths = columns.lengths
    padded = lengths.copy()
    padded[-1] += width - sum(lengths)  # [3, 2] in a row of 8 -> [3, 5]
    labels = np.full(width, ignore_index) if columns.labels is None else _extend(columns.labels, width, ignore_index)
    return {
        "input_ids": _extend(columns.input_ids, width, 0),
        "labels": labels,
        "position_ids": _extend(restarting_positions(lengths), width, 0),
        "seq_lens": np.array(lengths),
        "seq_lens_padded": np.array(padded),
        **{key: _extend(column, width, 0) for key, column in columns.per_token.items()},
        **columns.per_sample,
    }


def as_rows(column: np.ndarray, lengths: list[int], width: int, fill: int) -> Tensor:
    """Pieces of `column` as the rows of [D, width], filled up at the right: [1,2,3] by [2,1] -> [[1,2],[3,0]]."""
    shape = (len(lengths), width)
    if len(column) == len(lengths) * width:
        return torch.from_numpy(column.reshape(shape))
    # Zeros are pages that the system clears when they are first touched; other fills are written once, with the row.
    rows = np.zeros(shape, column.dtype) if fill == 0 else np.empty(shape, column.dtype)
    start = 0
    for row, length in zip(rows, lengths):
        row[:length] = column[start : start + length]
        if fill != 0:
            row[length:] = fill
        start += length
    return torch.from_numpy(rows)


def _extend(column: np.ndarray, width: int, fill: int) -> np.ndarray:
    if len(column) == width:
        return column
    return np.concatenate([column, np.full(width - len(column), fill, column.dtype)])


def _round_up(length: int, multiple: int | None) -> int:
    if multiple is None:
        return length
    if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
        raise ValueError(
            f"pad_seq_len_divisible is {multiple!r}; accepted is a positive integer, or None for no rounding up"
        )
    return -(-length // multiple) * multiple
