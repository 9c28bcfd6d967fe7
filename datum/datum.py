"""Datum: one typed example that carries everything a loss needs, and the batch made of several.

Position i of a sequence reads `input_ids[i]` and predicts `target_tokens[i]`: the shift has been done where the Datum
was made, and nothing after it shifts again. The words (weights, logprobs, advantages, ...): docs/batch.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor

from datum.collate import (
    CROSS_ENTROPY_IGNORE_IDX,
    default_collater,
    pack_features_for_thd,
    packed_sequence_thd_collater,
    refuse_batch_keys,
)
from datum.columns import Columns, as_field, as_ids, join_columns
from datum.errors import DataError, DataTypeError
from datum.layouts import packed_batch, padded_batch

__all__ = [
    "CROSS_ENTROPY_IGNORE_IDX",
    "Datum",
    "collate_datums",
    "default_collater",
    "pack_features_for_thd",
    "packed_sequence_thd_collater",
]


@dataclass(eq=False)
class Datum:
    """One sequence of T positions with what the loss needs.

    Lists, arrays, tensors and numbers are accepted and stored as CPU tensors, without a copy where memory can be
    shared. Sizes and values are checked by the collaters, each time, since fields may be replaced.

    Attributes:
        input_ids: int64 [T], the tokens read.
        loss_fn_inputs: Tensors by key. Per token [T]: `target_tokens` (int64), `weights` (0 = not trained; fractions
            and negatives are legal), `logprobs`, `old_logprobs`, `ref_logprobs`. Per token or one number for the
            sequence: `advantages` and any key of your own.

    Raises:
        DataTypeError: ids are not integers, or a value is no number (also a TypeError).
        DataError: ids are not 1-D.

    >>> example = Datum([10, 11, 12], {"target_tokens": [11, 12, 13], "weights": [1, 1, 0]})
    >>> len(example), example.to_features()["labels"]
    (3, [11, 12, -100])
    """

    input_ids: Tensor
    loss_fn_inputs: dict[str, Tensor] = field(default_factory=dict)

    # The types above are what is stored; the constructor takes more.
    def __init__(self, input_ids: Any, loss_fn_inputs: Mapping[str, Any] | None = None) -> None:
        inputs = {} if loss_fn_inputs is None else loss_fn_inputs
        if not isinstance(inputs, Mapping):
            raise DataTypeError(f"Datum: loss_fn_inputs is {type(inputs).__name__}; accepted is a mapping of fields")
        self.input_ids = as_ids(input_ids, "Datum: input_ids")
        self.loss_fn_inputs = {
            key: as_ids(value, f"Datum: {key}") if key == "target_tokens" else as_field(value, f"Datum: {key}")
            for key, value in inputs.items()
        }

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def seq_len(self) -> int:
        """T, the number of positions."""
        return len(self)

    def to_features(self, *, ignore_index: int = CROSS_ENTROPY_IGNORE_IDX) -> dict[str, list[int]]:
        """Plain lists of ints for collaters outside this package: `input_ids`, `attention_mask` (all 1), `labels`.

        `labels` is there if the Datum has targets: `target_tokens`, with `ignore_index` where the weight is 0. They
        are shifted already: never pass them to a model's `labels=`, which shifts again. Side inputs do not fit into
        lists of ints and stay behind.

        Raises:
            DataError: the Datum is malformed, as `collate_datums` would find.
        """
        columns = _columns([self], ignore_index)
        features = {"input_ids": columns.input_ids.tolist(), "attention_mask": [1] * columns.lengths[0]}
        if columns.labels is not None:
            features["labels"] = columns.labels.tolist()
        return features


def collate_datums(
    datums: Sequence[Datum],
    *,
    packed: bool = False,
    pad_seq_len_divisible: int | None = None,
    ignore_index: int = CROSS_ENTROPY_IGNORE_IDX,
) -> dict[str, Any]:
    """Make one batch of D Datums, in their order.

    Padded: `input_ids`, `attention_mask` (1 = real) int64, `padding_mask` bool (True = padding) [D, T]; `labels`
    int64 [D, T] if there are targets. Packed: `input_ids`, `labels`, `position_ids` int64 [1, total], `seq_lens`,
    `seq_lens_padded` int64 [1, D], `qkv_format` "thd". Both: per-token side inputs float32 shaped like `input_ids`,
    per-sample ones float32 [D]. A key is per token if every entry has its sequence's length, else per sample if every
    entry has one element. `target_tokens` becomes `labels`, with `ignore_index` where the weight is 0, and is not
    repeated. The batch shares no memory with the Datums.

    Args:
        datums: At least one Datum; all carry the same `loss_fn_inputs` keys.
        packed: One row, sequences end to end, instead of one row each.
        pad_seq_len_divisible: Round the row length up to a multiple of this; in a packed row the pad is counted in the
            last `seq_lens_padded`.
        ignore_index: The label of masked and padded positions; negative.

    Raises:
        DataError: a field is empty, mis-sized or not finite, ids are negative, or keys differ; names datum and key.
        DataTypeError: a field is of the wrong type (also a TypeError).
        ValueError: `pad_seq_len_divisible` or `ignore_index` is out of range.

    >>> pair = [Datum([1, 2, 3], {"target_tokens": [2, 3, 4]}), Datum([5, 6], {"target_tokens": [6, 7]})]
    >>> collate_datums(pair)["labels"]
    tensor([[   2,    3,    4],
            [   6,    7, -100]])
    >>> collate_datums(pair, packed=True)["position_ids"]
    tensor([[0, 1, 2, 0, 1]])
    """
    columns = _columns(list(datums), ignore_index)
    write = packed_batch if packed else padded_batch
    return write(columns, pad_seq_len_divisible, ignore_index)


def _columns(datums: list[Datum], ignore_index: int) -> Columns:
    if not datums:
        raise DataError("collate_datums needs at least one Datum")
    try:
        input_ids = [datum.input_ids for datum in datums]
        inputs = [datum.loss_fn_inputs for datum in datums]
        keys = inputs[0].keys()
        same_keys = all(fields.keys() == keys for fields in inputs)
    except AttributeError:
        _refuse_non_datums(datums)
    if not same_keys:
        _refuse_other_keys(inputs)
    refuse_batch_keys("datum 0: loss_fn_inputs", [*keys])
    columns = {key: [fields[key] for fields in inputs] for key in keys}
    targets = ("target_tokens", columns.pop("target_tokens")) if "target_tokens" in columns else None
    return join_columns("datum", input_ids, targets, columns, ignore_index)


def _refuse_non_datums(datums: list[Any]) -> NoReturn:
    for i, datum in enumerate(datums):
        if not isinstance(datum, Datum):
            raise DataTypeError(f"datum {i} is {type(datum).__name__}; collate_datums takes Datums")
        if not isinstance(datum.loss_fn_inputs, Mapping):
            name = type(datum.loss_fn_inputs).__name__
            raise DataTypeError(f"datum {i}: loss_fn_inputs is {name}; accepted is a mapping of fields")
    raise AssertionError("every element is a Datum with a mapping of fields")


def _refuse_other_keys(inputs: list[dict[str, Tensor]]) -> NoReturn:
    first = inputs[0].keys()
    i = next(i for i, fields in enumerate(inputs) if fields.keys() != first)
    lacks, adds = sorted(first - inputs[i].keys()), sorted(inputs[i].keys() - first)
    what = f"lacks {lacks} of datum 0" if lacks else f"adds {adds} to datum 0's"
    raise DataError(
        f"datum {i}: loss_fn_inputs {what}; every Datum of a batch must carry the same loss_fn_inputs keys, "
        "or a field (weights: the loss mask) would be lost without a word"
    )
