"""Both layouts written plainly, token by token in Python lists: tests and benchmark compare `collate_datums` with it.

It checks nothing: give it Datums that `collate_datums` accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from datum.datum import Datum

__all__ = ["collate_datums_reference"]


def collate_datums_reference(
    datums: Sequence[Datum],
    *,
    packed: bool = False,
    pad_seq_len_divisible: int | None = None,
    ignore_index: int = -100,
) -> dict[str, Any]:
    """What `collate_datums` returns, slowly."""
    rows = [_row(datum, ignore_index) for datum in datums]
    keys = datums[0].loss_fn_inputs.keys() - {"target_tokens"}
    lengths = [len(row["input_ids"]) for row in rows]
    per_token = {key for key in keys if all(len(row[key]) == n for row, n in zip(rows, lengths))}
    pads = {
        "input_ids": 0,
        "labels": ignore_index,
        "position_ids": 0,
        "attention_mask": 0,
        **dict.fromkeys(per_token, 0.0),
    }
    if packed:
        rows = [{key: [value for row in rows for value in row[key]] for key in rows[0]}]
    width = max(len(row["input_ids"]) for row in rows)
    while pad_seq_len_divisible and width % pad_seq_len_divisible:
        width += 1
    pad = width - sum(lengths)
    for row in rows:
        for key in pads:
            row[key] = row[key] + [pads[key]] * (width - len(row[key]))
    names = ["input_ids", *(["position_ids"] if packed else ["attention_mask"])]
    if packed or "target_tokens" in datums[0].loss_fn_inputs:
        names.append("labels")
    batch: dict[str, Any] = {name: torch.tensor([row[name] for row in rows], dtype=torch.int64) for name in names}
    for key in keys:
        values = [row[key] for row in rows]
        flat = [value for row in values for value in row]
        batch[key] = torch.tensor(values if key in per_token else flat, dtype=torch.float32)
    if packed:
        batch["seq_lens"] = torch.tensor([lengths])
        batch["seq_lens_padded"] = torch.tensor([[*lengths[:-1], lengths[-1] + pad]])
        batch["qkv_format"] = "thd"
    else:
        batch["padding_mask"] = batch["attention_mask"] == 0
    return batch


def _row(datum: Datum, ignore_index: int) -> dict[str, list[Any]]:
    row = {key: value.reshape(-1).tolist() for key, value in datum.loss_fn_inputs.items()}
    row["input_ids"] = datum.input_ids.tolist()
    row["position_ids"] = list(range(len(row["input_ids"])))
    row["attention_mask"] = [1] * len(row["input_ids"])
    row["labels"] = row.pop("target_tokens", [ignore_index] * len(row["input_ids"]))
    if "weights" in row:
        as_float32 = torch.tensor(row["weights"], dtype=torch.float32).expand(len(row["labels"])).tolist()
        row["labels"] = [ignore_index if weight == 0 else label for label, weight in zip(row["labels"], as_float32)]
    return row
