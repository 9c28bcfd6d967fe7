"""The collaters that take feature dicts: padded, and packed in two steps (THD: total tokens, no padding).

They write their batches by the same functions as `collate_datums`, so that the same datums give the same batch.
Nothing given is edited, and input order is kept. Every key, shape and dtype: docs/batch.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datum.columns import Columns, as_field, as_ids, join_columns, join_ids, join_side_input, place
from datum.errors import DataError, DataTypeError
from datum.layouts import BATCH_KEYS, as_rows, packed_row, padded_batch

__all__ = ["CROSS_ENTROPY_IGNORE_IDX", "default_collater", "pack_features_for_thd", "packed_sequence_thd_collater"]

CROSS_ENTROPY_IGNORE_IDX = -100
# Unused slots of seq_lens and seq_lens_padded where the packs of a batch hold different numbers of documents.
UNUSED_SLOT = -1000


def default_collater(features: Sequence[Mapping[str, Any]], pad_seq_len_divisible: int | None = None) -> dict[str, Any]:
    """Pad feature dicts into one batch [B, T], T the longest sequence rounded up.

    A feature is what `Datum.to_features` gives: `input_ids`, optionally `labels` and `attention_mask` (all 1: a
    feature is unpadded), as lists, arrays or tensors. Any other key is a side input, per token or per sample; a weight
    of 0 in `weights` masks the label.

    Args:
        features: B feature dicts with the same keys.
        pad_seq_len_divisible: Round T up to a multiple of this; an aligned T stays.

    Returns:
        `input_ids`, `attention_mask` int64 and `padding_mask` bool [B, T]; `labels` int64 [B, T] if given; side inputs
        float32 [B, T] or [B].

    Raises:
        DataError: a feature is malformed; the message names its number and key.
        DataTypeError: a field is of the wrong type (also a TypeError).
        ValueError: `pad_seq_len_divisible` is no positive integer.

    >>> default_collater([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}], 2)["attention_mask"]
    tensor([[1, 1, 1, 0],
            [1, 0, 0, 0]])
    """
    features = list(features)
    if not features:
        raise DataError("default_collater needs at least one feature")
    _refuse_other_keys("feature", features)
    return padded_batch(_columns(features, CROSS_ENTROPY_IGNORE_IDX), pad_seq_len_divisible, CROSS_ENTROPY_IGNORE_IDX)


def pack_features_for_thd(
    features: Sequence[Mapping[str, Any]], ignore_index: int = CROSS_ENTROPY_IGNORE_IDX
) -> dict[str, Any]:
    """Lay feature dicts end to end as one pack.

    Args:
        features: D feature dicts as for `default_collater`; here `labels` may be missing from some of them or from all.
        ignore_index: The label of positions without one.

    Returns:
        One pack: `input_ids`, `labels`, `position_ids` [total], `seq_lens`, `seq_lens_padded` [D], integers; per-token
        side inputs [total] and per-sample ones [D], floats. Plain lists if `input_ids` came as lists, else tensors.

    Raises:
        DataError: a feature is malformed; the message names its number and key.
        DataTypeError: a field is of the wrong type (also a TypeError).
        ValueError: `ignore_index` is no negative integer.

    >>> pack_features_for_thd([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}])["position_ids"]
    [0, 1, 2, 0]
    """
    features = list(features)
    if not features:
        raise DataError("pack_features_for_thd needs at least one feature")
    _refuse_other_keys("feature", features, but="labels")
    if any("labels" in feature for feature in features):
        features = [
            feature if "labels" in feature else {**feature, "labels": _ignored(i, feature, ignore_index)}
            for i, feature in enumerate(features)
        ]
    columns = _columns(features, ignore_index)
    pack = packed_row(columns, sum(columns.lengths), ignore_index)
    if isinstance(features[0]["input_ids"], (list, tuple)):
        return {key: value.tolist() for key, value in pack.items()}
    return {key: torch.from_numpy(value) for key, value in pack.items()}


def packed_sequence_thd_collater(packs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Stack packs into one batch of P packed rows.

    Packs of unequal length are filled up at the row's end: ids and positions 0, labels -100, side inputs 0; the fill is
    counted in the row's last `seq_lens_padded`.

    Args:
        packs: P packs as `pack_features_for_thd` makes them, lists or tensors, with the same keys. A feature dict
            without `seq_lens` is taken as a pack of one document.

    Returns:
        `input_ids`, `labels`, `position_ids` int64 [P, total]; `seq_lens`, `seq_lens_padded` int64 [P, most documents]
        with -1000 in unused slots; `qkv_format` "thd"; side inputs float32, per token [P, total], per sample [D] over
        the documents of all packs in order.

    Raises:
        DataError: a pack is malformed; the message names its number and key.
        DataTypeError: a field is of the wrong type (also a TypeError).

    >>> packs = [pack_features_for_thd([{"input_ids": [5, 6]}, {"input_ids": [7]}]), {"input_ids": [8, 9]}]
    >>> packed_sequence_thd_collater(packs)["seq_lens"]
    tensor([[    2,     1],
            [    2, -1000]])
    """
    packs = list(packs)
    if not packs:
        raise DataError("packed_sequence_thd_collater needs at least one pack")
    _refuse_non_mappings("pack", packs)
    packs = [_whole_pack(i, pack) for i, pack in enumerate(packs)]
    _refuse_other_keys("pack", packs)
    fields = {key: [pack[key] for pack in packs] for key in packs[0]}
    ids, totals = join_ids("pack", "input_ids", fields.pop("input_ids"))
    padded_lens, documents = join_ids("pack", "seq_lens_padded", fields.pop("seq_lens_padded"))
    labels = _aligned("labels", fields.pop("labels"), "input_ids", totals)
    position_ids = _aligned("position_ids", fields.pop("position_ids"), "input_ids", totals)
    seq_lens = _aligned("seq_lens", fields.pop("seq_lens"), "seq_lens_padded", documents)
    _refuse_wrong_lengths(seq_lens, padded_lens, documents, totals)
    for key, column in (("input_ids", ids), ("position_ids", position_ids)):
        _refuse_where(column < 0, "pack", key, column, totals, "it must be 0 or larger")
    side_inputs = {key: _side_input(key, values, totals, documents) for key, values in fields.items()}
    if "weights" in side_inputs:
        np.copyto(labels, CROSS_ENTROPY_IGNORE_IDX, where=(side_inputs["weights"][0] == 0) & (labels >= 0))
    width, slots = max(totals), max(documents)
    if min(totals) < width:
        rule = (
            f"packs of unequal length are filled up with label {CROSS_ENTROPY_IGNORE_IDX}, so their packer must use it"
        )
        _refuse_where((labels < 0) & (labels != CROSS_ENTROPY_IGNORE_IDX), "pack", "labels", labels, totals, rule)
    padded_lens[np.cumsum(documents) - 1] += width - np.array(totals)
    batch: dict[str, Any] = {
        "input_ids": as_rows(ids, totals, width, 0),
        "labels": as_rows(labels, totals, width, CROSS_ENTROPY_IGNORE_IDX),
        "position_ids": as_rows(position_ids, totals, width, 0),
        "seq_lens": as_rows(seq_lens, documents, slots, UNUSED_SLOT),
        "seq_lens_padded": as_rows(padded_lens, documents, slots, UNUSED_SLOT),
        "qkv_format": "thd",
    }
    for key, (column, is_per_token) in side_inputs.items():
        batch[key] = as_rows(column, totals, width, 0) if is_per_token else torch.from_numpy(column)
    return batch


# ---------------------------------------------------------------------------------------------------------- features


def _columns(features: Sequence[Mapping[str, Any]], ignore_index: int) -> Columns:
    fields = {key: [feature[key] for feature in features] for key in features[0]}
    if "input_ids" not in fields:
        raise DataError("feature 0 has no input_ids; accepted are the dicts of Datum.to_features")
    if "attention_mask" in fields:
        _refuse_padding("feature", fields.pop("attention_mask"), fields["input_ids"])
    input_ids = fields.pop("input_ids")
    targets = ("labels", fields.pop("labels")) if "labels" in fields else None
    refuse_batch_keys("feature 0", [*fields])
    if "target_tokens" in fields:
        raise DataError(
            "feature 0 has the key 'target_tokens'; a feature carries labels, as Datum.to_features makes them"
        )
    return join_columns("feature", input_ids, targets, fields, ignore_index)


def _ignored(number: int, feature: Mapping[str, Any], ignore_index: int) -> Tensor:
    ids = as_ids(feature.get("input_ids"), f"feature {number}: input_ids")
    return torch.full_like(ids, ignore_index)


def refuse_batch_keys(where: str, keys: Sequence[str]) -> None:
    """Refuse side inputs under a name that the batch uses for something else."""
    for key in keys:
        if key in BATCH_KEYS:
            raise DataError(
                f"{where} has the key {key!r}, which the batch itself uses; side inputs take other names "
                "(targets of a Datum are 'target_tokens')"
            )


def _refuse_non_mappings(unit: str, dicts: Sequence[Any]) -> None:
    for i, item in enumerate(dicts):
        if not isinstance(item, Mapping):
            raise DataTypeError(f"{unit} {i} is {type(item).__name__}; accepted is a mapping of fields")


def _refuse_other_keys(unit: str, dicts: Sequence[Mapping[str, Any]], but: str | None = None) -> None:
    _refuse_non_mappings(unit, dicts)
    first = dicts[0].keys() - {but}
    for i, item in enumerate(dicts):
        keys = item.keys() - {but}
        if keys != first:
            lacks, adds = sorted(first - keys), sorted(keys - first)
            what = f"lacks {lacks} of {unit} 0" if lacks else f"adds {adds} to {unit} 0's"
            raise DataError(f"{unit} {i} {what}; every {unit} of a batch carries the same keys")


def _refuse_padding(unit: str, masks: Sequence[Any], input_ids: Sequence[Any]) -> None:
    lengths = [len(as_ids(ids, f"{unit} {i}: input_ids")) for i, ids in enumerate(input_ids)]
    masks = [as_field(mask, f"{unit} {i}: attention_mask").long() for i, mask in enumerate(masks)]
    column = _aligned("attention_mask", masks, "input_ids", lengths, unit)
    rule = f"a {unit} is unpadded, one attention_mask entry of 1 per token; the collater does the padding"
    _refuse_where(column != 1, unit, "attention_mask", column, lengths, rule)


# -------------------------------------------------------------------------------------------------------------- packs


def _whole_pack(number: int, pack: Mapping[str, Any]) -> dict[str, Any]:
    """The pack with labels and, if it was a feature dict, with the lengths and positions of its one document."""
    if "input_ids" not in pack:
        raise DataError(f"pack {number} has no input_ids; accepted are the packs of pack_features_for_thd")
    whole = dict(pack)
    if "attention_mask" in whole:
        _refuse_padding("pack", [whole.pop("attention_mask")], [whole["input_ids"]])
    length = len(as_ids(whole["input_ids"], f"pack {number}: input_ids"))
    if "seq_lens" not in whole:
        whole |= {"position_ids": range(length), "seq_lens": [length], "seq_lens_padded": [length]}
    whole.setdefault("labels", [CROSS_ENTROPY_IGNORE_IDX] * length)
    for key in ("position_ids", "seq_lens_padded"):
        if key not in whole:
            raise DataError(f"pack {number} has no {key}; accepted are the packs of pack_features_for_thd")
    for key in ("padding_mask", "qkv_format"):
        if key in whole:
            refuse_batch_keys(f"pack {number}", [key])
    return whole


def _aligned(key: str, values: Sequence[Any], other: str, lengths: list[int], unit: str = "pack") -> np.ndarray:
    """Integers with as many entries as `other` has."""
    column, sizes = join_ids(unit, key, values)
    for i, (size, length) in enumerate(zip(sizes, lengths)):
        if size != length:
            raise DataError(f"{unit} {i}: {key} has length {size}, {other} has {length}; they need as many entries")
    return column


def _side_input(key: str, values: Sequence[Any], totals: list[int], documents: list[int]) -> tuple[np.ndarray, bool]:
    tensors = [as_field(value, f"pack {i}: {key}").reshape(-1) for i, value in enumerate(values)]
    sizes = [tensor.numel() for tensor in tensors]
    is_per_token = sizes == totals
    if sizes not in (totals, documents):
        wrong = [i for i, size in enumerate(sizes) if size not in (totals[i], documents[i])]
        i = wrong[0] if wrong else next(i for i, size in enumerate(sizes) if size != documents[i])
        raise DataError(
            f"pack {i}: {key} has length {sizes[i]}; accepted are {totals[i]} entries, one per token, or "
            f"{documents[i]}, one per document, in every pack alike"
        )
    return join_side_input("pack", key, tensors, sizes)[0], is_per_token


def _refuse_wrong_lengths(lens: np.ndarray, padded: np.ndarray, documents: list[int], totals: list[int]) -> None:
    wrong = (lens < 1) | (lens > padded)
    if wrong.any():
        index = int(np.argmax(wrong))
        i, j = place(index, documents)
        raise DataError(
            f"pack {i}: seq_lens[{j}] is {lens[index]}, seq_lens_padded[{j}] is {padded[index]}; a document is 1 to "
            "its padded length tokens long"
        )
    ends = np.cumsum(documents)
    for i, (stop, count, total) in enumerate(zip(ends, documents, totals)):
        covered = int(padded[stop - count : stop].sum())
        if covered != total:
            raise DataError(
                f"pack {i}: seq_lens_padded sums to {covered}, input_ids has {total}; "
                "the padded lengths cover the whole row"
            )


def _refuse_where(wrong: np.ndarray, unit: str, key: str, column: np.ndarray, lengths: list[int], rule: str) -> None:
    if wrong.any():
        index = int(np.argmax(wrong))
        i, j = place(index, lengths)
        raise DataError(f"{unit} {i}: {key}[{j}] is {column[index]}; {rule}")
