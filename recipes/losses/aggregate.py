"""From per-token terms to the one number of a step, in the same way for every layout and every loss.

    step loss = (sum over ranks, microbatches and trained tokens of coefficient * term) / denominator

A loss (`recipes.losses.loss`) gives the terms. `token_coefficients` gives the coefficients of a microbatch, which need
nothing from outside of it, since a sequence is never cut between microbatches. `denominator` turns the counts of the
whole step, over all its microbatches and ranks, into the divisor.

    tokens, selected, targets = select_tokens(batch)
    coefficients = token_coefficients(tokens, loss.aggregation)
    scores = model(inputs, targets, selected)                            # recipes.losses.logprobs
    total = weighted_sum(coefficients, loss(scores.logprobs, tokens))    # then total / denominator(counts, ...)

A position is trained where its label is not `ignore_index` and its weight is not 0. All others are taken out before a
loss sees them, so whatever they hold (an infinite logprob, say) reaches neither the loss nor the gradient.

Fillers. A rank with fewer microbatches than the others brings batches without a sequence: one token of weight 0 and the
key `filler`. They run through the model like any batch and count nothing. The key is what tells them apart, since a
Datum without a trained token is a sequence all the same, which `constant` divides by.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from conf.schema import Aggregation
from datum import CROSS_ENTROPY_IGNORE_IDX
from datum.errors import DataError

__all__ = [
    "FILLER",
    "StepCounts",
    "Tokens",
    "check_aggregation",
    "count_batch",
    "denominator",
    "select_tokens",
    "token_coefficients",
    "weighted_sum",
]

FILLER = "filler"
"""Batch key that marks a filler, whatever its value."""

_NOT_FIELDS = ("weights", "pixel_values", "pixel_values_videos")  # float tensors that are no side input of a loss


@dataclass
class Tokens:
    """The trained positions of a microbatch, flat, row by row.

    Attributes:
        weights: [N] float32, none of them 0.
        sequence: [N] int64, the sequence of each token: its place among the microbatch's sequences, from 0.
        num_sequences: Sequences of the microbatch, those without a trained token included.
        targets: [N] int64.
        fields: Side inputs of the batch at these tokens, each [N] float32 (`logprobs`, `advantages`, ...). A value per
            sequence is repeated for the sequence's tokens.
    """

    weights: Tensor
    sequence: Tensor
    num_sequences: int
    targets: Tensor
    fields: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.weights.shape[0]

    def get(self, name: str) -> Tensor:
        """Return the side input `name`, [N].

        Raises:
            DataError: The batch does not have it.
        """
        if name not in self.fields:
            raise DataError(
                f"the loss reads {name!r}, which the batch does not have; it has {sorted(self.fields)}. "
                f"Put {name!r} into the loss_fn_inputs of every Datum, or choose another loss"
            )
        return self.fields[name]

    def sum_by_sequence(self, values: Tensor) -> Tensor:
        """Add up [N] values over each sequence's tokens: [num_sequences], 0 for a sequence without any; differentiable.

        The sum runs in float64 (float32 on mps) and has the dtype of `values`.
        """
        sums = torch.zeros(self.num_sequences, dtype=_wide(values), device=values.device)
        return sums.index_add(0, self.sequence, values.to(sums.dtype)).to(values.dtype)

    def to(self, device: torch.device | str) -> "Tokens":
        """Return the same tokens on another device."""
        return replace(
            self,
            weights=self.weights.to(device),
            sequence=self.sequence.to(device),
            targets=self.targets.to(device),
            fields={name: value.to(device) for name, value in self.fields.items()},
        )


@dataclass(frozen=True)
class StepCounts:
    """What a step's loss may be divided by; counts of microbatches add up with `+`, those of ranks as tensors.

    Attributes:
        weight_total: Sum of the absolute weights of all trained tokens.
        trained_sequences: Sequences with a trained token.
        sequences: All sequences, fillers apart.
        tokens: Real input tokens, trained or not; neither padding nor fillers.
    """

    weight_total: float = 0.0
    trained_sequences: int = 0
    sequences: int = 0
    tokens: int = 0

    def __add__(self, other: "StepCounts") -> "StepCounts":
        return StepCounts(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other))))

    def as_tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the four counts as float64 [4], to be summed over ranks."""
        return torch.tensor(astuple(self), dtype=torch.float64, device=device)

    @classmethod
    def from_tensor(cls, counts: Tensor) -> "StepCounts":
        """Inverse of `as_tensor`."""
        weight_total, *whole = counts.tolist()
        return cls(weight_total, *(round(count) for count in whole))


def select_tokens(
    batch: Mapping[str, Any], *, ignore_index: int = CROSS_ENTROPY_IGNORE_IDX
) -> tuple[Tokens, Tensor, Tensor]:
    """Take the trained positions out of a collated batch, padded or packed.

    Without `weights` every label that is not `ignore_index` weighs 1.

    Args:
        batch: What `datum.collate_datums` or another collater of its contract made (docs/batch.md).
        ignore_index: Label of a position without a target.

    Returns:
        The tokens; `selected` [B, S] bool, true at the N trained positions, whose order is that of the tokens;
        `targets` [B, S] int64, to be read where `selected` is true.

    Raises:
        DataError: `labels` are missing, or a field has neither a value per position nor one per sequence.
    """
    sequences, position, sequence, weights = _trained(batch, ignore_index)
    labels: Tensor = batch["labels"]
    selected = torch.zeros(labels.numel(), dtype=torch.bool, device=labels.device)
    selected[position] = True
    fields = {
        name: sequences.values(name, position, sequence)
        for name, value in batch.items()
        if name not in _NOT_FIELDS and isinstance(value, Tensor) and value.is_floating_point()
    }
    tokens = Tokens(weights, sequence, sequences.count, labels.flatten()[position], fields)
    return tokens, selected.view_as(labels), labels


def count_batch(batch: Mapping[str, Any], *, ignore_index: int = CROSS_ENTROPY_IGNORE_IDX) -> StepCounts:
    """Count one microbatch; a filler counts nothing.

    Raises:
        DataError: As for `select_tokens`.
    """
    if FILLER in batch:
        return StepCounts()
    sequences, _, sequence, weights = _trained(batch, ignore_index)
    if "seq_lens" in batch:
        real = int(batch["seq_lens"].clamp(min=0).sum())  # unused slots hold -1000
    elif "attention_mask" in batch:
        real = int(batch["attention_mask"].sum())
    else:
        real = batch["labels"].numel()
    return StepCounts(
        weight_total=float(weights.abs().sum(dtype=_wide(weights))),
        trained_sequences=sequence.unique_consecutive().numel(),
        sequences=sequences.count,
        tokens=real,
    )


def check_aggregation(aggregation: Aggregation | str, max_tokens: int | None) -> Aggregation:
    """Return the mode of that name.

    Raises:
        ValueError: No such mode, or `max_tokens` (at least 1) without `constant`, or the other way round.
    """
    mode = _aggregation(aggregation)
    if (mode == Aggregation.constant) != (max_tokens is not None) or (max_tokens is not None and max_tokens < 1):
        raise ValueError(
            f"aggregation is {mode.value!r} with max_tokens={max_tokens}; max_tokens, from 1, is the divisor a "
            "sequence of 'constant': give it there and nowhere else"
        )
    return mode


def token_coefficients(tokens: Tokens, aggregation: Aggregation | str) -> Tensor:
    """Return the factor of each token's term in the step's sum, [N] float64 (float32 on mps).

    The weight w; for `sequence` it is w / sum|w| over the token's own sequence.
    """
    weights = tokens.weights.to(_wide(tokens.weights))
    if _aggregation(aggregation) != Aggregation.sequence:
        return weights
    return weights / tokens.sum_by_sequence(weights.abs())[tokens.sequence]


def denominator(counts: StepCounts, aggregation: Aggregation | str, max_tokens: int | None = None) -> float:
    """Return what the step's sum is divided by.

    `token`: sum|w|. `sequence`: sequences with a trained token. `constant`: all sequences times `max_tokens`. `sum`: 1.
    A step without a trained token has a sum of 0; its denominator is 1, and its loss therefore 0.

    Args:
        counts: Of the whole step, all microbatches and ranks.
        aggregation: Name of the mode.
        max_tokens: Divisor a sequence of `constant`.

    Raises:
        ValueError: As for `check_aggregation`.
    """
    mode = check_aggregation(aggregation, max_tokens)
    if mode == Aggregation.sum or counts.weight_total == 0:
        return 1.0
    if mode == Aggregation.token:
        return counts.weight_total
    if max_tokens is not None:
        return float(counts.sequences * max_tokens)
    return float(counts.trained_sequences)


def weighted_sum(coefficients: Tensor, terms: Tensor) -> Tensor:
    """Return sum(coefficients * terms) as a scalar with gradient, accumulated in float64 (float32 on mps)."""
    wide = _wide(terms)
    return (coefficients.to(wide) * terms.to(wide)).sum()


class _Sequences:
    """Where the sequences of a batch lie among its flattened positions."""

    def __init__(self, batch: Mapping[str, Any]) -> None:
        self.batch = batch
        self.shape: torch.Size = batch["labels"].shape
        self.count, self._length = self.shape
        self._ends: Tensor | None = None  # flat position after each sequence of packed rows, rising
        if "seq_lens" in batch:
            lengths: Tensor = batch["seq_lens"]
            is_used = lengths > 0  # unused slots hold -1000
            extents = batch.get("seq_lens_padded", lengths).where(is_used, 0)
            row_starts = torch.arange(len(lengths), device=lengths.device)[:, None] * self._length
            self._ends = (extents.cumsum(1) + row_starts)[is_used]
            self.count = len(self._ends)

    def of(self, position: Tensor) -> Tensor:
        """Return the sequence of each flat position, [N].

        Raises:
            DataError: A position of a packed row lies behind its last sequence.
        """
        if self._ends is None:
            return position.div(self._length, rounding_mode="floor")
        sequence: Tensor = torch.searchsorted(self._ends, position, right=True)
        end = torch.cat((self._ends, self._ends.new_full((1,), -1)))[sequence]  # -1: behind the last of all rows
        is_outside = (end - 1) // self._length != position // self._length
        if is_outside.any():
            row, column = divmod(int(position[is_outside][0]), self._length)
            raise DataError(
                f"labels[{row}, {column}] is a target, but seq_lens {self.batch['seq_lens'].tolist()} give the "
                "position no sequence; padding behind the last sequence must have the label ignore_index"
            )
        return sequence

    def values(self, name: str, position: Tensor, sequence: Tensor) -> Tensor:
        """Read the batch's `name` at [N] positions of [N] sequences, as float32.

        Raises:
            DataError: It has neither a value per position nor one per sequence.
        """
        value: Tensor = self.batch[name]
        if value.shape == self.shape:
            return value.flatten()[position].to(torch.float32)
        if value.shape == (self.count,):
            return value[sequence].to(torch.float32)
        raise DataError(
            f"batch key {name!r} has shape {list(value.shape)}; accepted are {list(self.shape)} (a value per position) "
            f"and [{self.count}] (a value per sequence)"
        )


def _trained(batch: Mapping[str, Any], ignore_index: int) -> tuple[_Sequences, Tensor, Tensor, Tensor]:
    """Return the batch's sequences, and the trained positions: flat position, sequence, weight, each [N]."""
    labels = batch.get("labels")
    if labels is None:
        raise DataError(f"the batch has no labels, so there is nothing to train; its keys are {sorted(batch)}")
    sequences = _Sequences(batch)
    position = (labels != ignore_index).flatten().nonzero().squeeze(1)
    sequence = sequences.of(position)
    if "weights" not in batch:
        return sequences, position, sequence, torch.ones(len(position), device=labels.device)
    weights = sequences.values("weights", position, sequence)
    is_trained = weights != 0
    return sequences, position[is_trained], sequence[is_trained], weights[is_trained]


def _aggregation(name: Aggregation | str) -> Aggregation:
    try:
        return Aggregation(name)
    except ValueError:
        accepted = ", ".join(mode.value for mode in Aggregation)
        raise ValueError(f"aggregation is {name!r}; accepted are {accepted}") from None


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64
