"""The fields of D sequences, checked and joined end to end: what both layouts are written from.

The checks run on the joined column; which sequence is to blame is searched only when one fails, so that a good batch
costs little more than the joining. Nothing given is edited or kept: the columns are fresh memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from datum.errors import DataError, DataTypeError

__all__ = ["Columns", "as_field", "as_ids", "check_ignore_index", "join_columns", "join_ids", "join_side_input"]

# With this many elements torch.cat starts its threads once for each tensor it joins; below, it runs serially.
_SERIAL_CAT = 32_768

_dtype_of = attrgetter("dtype")


@dataclass(frozen=True)
class Columns:
    """D sequences end to end.

    Attributes:
        lengths: D numbers of tokens, each at least 1; their sum is `total`.
        input_ids: int64 [total].
        labels: int64 [total], `ignore_index` where the weight is 0; None without targets.
        per_token: float32 [total] by key.
        per_sample: float32 [D] by key.
    """

    lengths: list[int]
    input_ids: np.ndarray
    labels: np.ndarray | None
    per_token: dict[str, np.ndarray]
    per_sample: dict[str, np.ndarray]


def as_field(value: Any, where: str) -> Tensor:
    """A number, list, array or tensor as a real-valued CPU tensor without gradient; it shares memory where it can.

    Raises:
        DataTypeError: not numbers, or complex ones. `where` opens the message, as in "datum 3: weights".
    """
    if not isinstance(value, Tensor):
        if isinstance(value, np.ndarray) and not (value.flags.writeable and min(value.strides, default=0) >= 0):
            value = value.copy()  # torch neither shares read-only memory quietly nor takes negative strides
        try:
            value = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise DataTypeError(
                f"{where} is {type(value).__name__}; accepted are numbers: a scalar, list, array or tensor ({error})"
            ) from error
    if value.is_complex():
        raise DataTypeError(f"{where} has dtype {_name(value.dtype)}; accepted are real numbers")
    tensor: Tensor = value.detach().cpu()
    return tensor


def as_ids(value: Any, where: str) -> Tensor:
    """Token ids (or other integers, one a token) as an int64 tensor [T] on the CPU.

    Raises:
        DataTypeError: not integers; an empty list is fine, an empty float tensor is not.
        DataError: not one-dimensional.
    """
    if type(value) is Tensor and value.dtype == torch.int64 and value.dim() == 1 and value.is_cpu:
        return value
    tensor = as_field(value, where)
    if isinstance(value, (list, tuple)) and not value:
        tensor = tensor.long()
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise DataTypeError(
            f"{where} has dtype {_name(tensor.dtype)}; token ids are integers, and so are labels, positions and lengths"
        )
    if tensor.dim() != 1:
        raise DataError(
            f"{where} has shape {list(tensor.shape)}; it must be 1-D [T]: one sequence, one entry per token"
        )
    return tensor.long()


def check_ignore_index(value: int) -> None:
    """Refuse an ignore index that could be a token id."""
    if isinstance(value, bool) or not isinstance(value, int) or value >= 0:
        raise ValueError(f"ignore_index is {value!r}; accepted is a negative integer, which no token id can be")


def join_columns(
    unit: str,
    input_ids: Sequence[Any],
    targets: tuple[str, Sequence[Any]] | None,
    side_inputs: Mapping[str, Sequence[Any]],
    ignore_index: int,
) -> Columns:
    """Check the fields of D sequences and join them.

    Args:
        unit: What one sequence is called in messages: "datum" or "feature".
        input_ids: D entries of token ids.
        targets: The key and its D entries. "target_tokens" holds token ids; "labels" may hold `ignore_index` too, and
            None for a sequence without labels. None: no sequence has targets.
        side_inputs: D entries by key; `weights` of 0 mask the label.
        ignore_index: The masked label.

    Raises:
        DataError: a field is empty, mis-sized, not finite, or holds negative ids; names unit, number and key.
        DataTypeError: a field is not made of numbers, or ids are not integers.
    """
    check_ignore_index(ignore_index)
    ids, lengths = join_ids(unit, "input_ids", input_ids)
    if 0 in lengths:
        raise DataError(
            f"{unit} {lengths.index(0)}: input_ids is empty; a sequence needs at least one token "
            "(a row of one token leaves no position: drop and count it where Datums are made)"
        )
    _refuse_negative(unit, "input_ids", ids, lengths)
    per_token: dict[str, np.ndarray] = {}
    per_sample: dict[str, np.ndarray] = {}
    for key, values in side_inputs.items():
        column, is_per_token = join_side_input(unit, key, values, lengths)
        (per_token if is_per_token else per_sample)[key] = column
    labels = None
    if targets is not None:
        labels = _join_targets(unit, *targets, lengths, ignore_index)
        if "weights" in side_inputs:
            is_trained = (
                per_token["weights"] != 0 if "weights" in per_token else (per_sample["weights"] != 0).repeat(lengths)
            )
            # ignore_index where the weight is 0; without branches, which a random mask makes five times as slow
            labels -= ignore_index
            labels *= is_trained
            labels += ignore_index
    return Columns(lengths, ids, labels, per_token, per_sample)


def join_ids(unit: str, key: str, values: Sequence[Any]) -> tuple[np.ndarray, list[int]]:
    """D entries of integers as one int64 array, and their lengths; raises as `as_ids`."""
    plain = set(map(type, values)) == {Tensor} and set(map(_dtype_of, values)) == {torch.int64}
    if not (plain and set(map(Tensor.dim, values)) == {1}):
        values = [as_ids(value, f"{unit} {i}: {key}") for i, value in enumerate(values)]
    lengths = list(map(Tensor.numel, values))
    return _join(values, lengths), lengths


def join_side_input(unit: str, key: str, values: Sequence[Any], lengths: list[int]) -> tuple[np.ndarray, bool]:
    """D entries of a side input as one float32 array: ([total], True) if per token, ([D], False) if per sample.

    One shape for the whole batch: per token if every entry has its sequence's length, else per sample if every entry
    has one element, else refused.
    """
    if set(map(type, values)) != {Tensor} or set(map(_dtype_of, values)) != {torch.float32}:
        values = [as_field(value, f"{unit} {i}: {key}").float() for i, value in enumerate(values)]
    sizes = list(map(Tensor.numel, values))
    is_per_token = sizes == lengths
    if not is_per_token and set(sizes) != {1}:
        _refuse_lengths(unit, key, values, sizes, lengths)
    if set(map(Tensor.dim, values)) != {1}:
        for i, value in enumerate(values):
            if value.dim() > 1 and value.numel() != 1:
                raise DataError(
                    f"{unit} {i}: {key} has shape {list(value.shape)}; a per-token field is 1-D with one entry "
                    f"per token (input_ids has {lengths[i]}), a per-sample value must be a scalar"
                )
        values = [value.reshape(-1) for value in values]
    column = _join(values, sizes)
    if not np.isfinite(column).all():
        index = int(np.argmin(np.isfinite(column)))
        i, j = place(index, sizes)
        raise DataError(f"{unit} {i}: {key}[{j}] is {column[index]} in float32; every entry must be a finite number")
    return column, is_per_token


def _join_targets(unit: str, key: str, values: Sequence[Any], lengths: list[int], ignore_index: int) -> np.ndarray:
    values = [np.full(n, ignore_index) if value is None else value for n, value in zip(lengths, values)]
    labels, sizes = join_ids(unit, key, values)
    if sizes != lengths:
        i = next(i for i, size in enumerate(sizes) if size != lengths[i])
        raise DataError(
            f"{unit} {i}: {key} has length {sizes[i]}, input_ids has {lengths[i]}; {key} needs one entry per token"
        )
    _refuse_negative(unit, key, labels, lengths, ignore_index if key == "labels" else None)
    return labels


def _join(tensors: Sequence[Tensor], lengths: list[int]) -> np.ndarray:
    """1-D tensors of one dtype end to end, as an array of its own."""
    try:
        return _cat(list(tensors), lengths).numpy()
    except (RuntimeError, TypeError):  # some carry a gradient or live on another device
        return torch.cat([tensor.detach().cpu() for tensor in tensors]).numpy()


def _cat(tensors: list[Tensor], lengths: list[int]) -> Tensor:
    """torch.cat, in pieces that it joins serially: with more, it would start its threads once for each tensor."""
    total = sum(lengths)
    if total < _SERIAL_CAT or torch.get_num_threads() == 1:
        return torch.cat(tensors)
    joined = torch.empty(total, dtype=tensors[0].dtype)
    first = start = stop = 0
    for i, length in enumerate([*lengths, _SERIAL_CAT]):
        if stop + length - start >= _SERIAL_CAT and i > first:
            torch.cat(tensors[first:i], out=joined[start:stop])
            first, start = i, stop
        stop += length
    return joined


def place(index: int, lengths: list[int]) -> tuple[int, int]:
    """The sequence of a position of a joined column, and the position in it: 4 in lengths [3, 2] -> (1, 1)."""
    ends = np.cumsum(lengths)
    i = int(np.searchsorted(ends, index, side="right"))
    return i, index - int(ends[i]) + lengths[i]


def _refuse_negative(unit: str, key: str, ids: np.ndarray, lengths: list[int], but: int | None = None) -> None:
    if ids.size == 0 or ids.min() >= 0:
        return
    wrong = (ids < 0) & (ids != but) if but is not None else ids < 0
    if not wrong.any():
        return
    index = int(np.argmax(wrong))
    i, j = place(index, lengths)
    rule = {
        "labels": f"a label is a token id (0 or larger) or the ignore index {but}",
        "target_tokens": "a token id is 0 or larger (mask a target by weight 0)",
    }.get(key, "a token id is 0 or larger")
    raise DataError(f"{unit} {i}: {key}[{j}] is {ids[index]}; {rule}")


def _refuse_lengths(unit: str, key: str, values: Sequence[Tensor], sizes: list[int], lengths: list[int]) -> NoReturn:
    rule = "a per-token field needs one entry per token, a per-sample value must be a scalar"
    for i, (size, length) in enumerate(zip(sizes, lengths)):
        if size not in (1, length):
            raise DataError(f"{unit} {i}: {key} has length {size}, input_ids has {length}; {rule}")
    # What is left has entries of both kinds; the first sequence of more than one token says which kind was meant.
    first = next(i for i, length in enumerate(lengths) if length > 1)
    i = next(i for i, length in enumerate(lengths) if length > 1 and (sizes[i] == 1) != (sizes[first] == 1))
    kind = "one value for its sample" if sizes[first] == 1 else "one entry per token"
    raise DataError(
        f"{unit} {i}: {key} has length {sizes[i]}, input_ids has {lengths[i]}, while {unit} {first} gives {kind}; "
        f"a key has one shape in the whole batch: {rule}"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
