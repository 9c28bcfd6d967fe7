"""From a collated batch to the arguments of a model's forward.

Every rule here keeps a default of Transformers from leaking between packed documents (docs/models.md):

- `use_cache=False` always: with a cache, documents are not told apart.
- `attention_mask` is None with packed rows: any mask, all ones too, turns the telling apart off.
- Cumulative lengths go along, over all rows end to end, with padding as a segment of its own.
- Models with multimodal rotary embeddings get four axes: where each token stands in its document, then t, h, w.

The masks of sdpa, eager and flex_attention are left to the model, which makes one for each kind of layer from positions
that restart at 0; a mask made here would be the same for layers with and without a sliding window.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from conf.schema import Backend, PositionAxes, Scope
from datum.errors import DataError
from datum.positions import document_positions, rotary_axes

__all__ = ["is_packed", "model_inputs"]


def is_packed(batch: Mapping[str, Any]) -> bool:
    """Whether a collated batch holds packed rows."""
    return "seq_lens" in batch


def model_inputs(
    batch: Mapping[str, Any],
    *,
    backend: Backend,
    scope: Scope = Scope.per_document,
    axes: PositionAxes = PositionAxes.rope,
) -> dict[str, Any]:
    """Build keyword arguments for a causal language model.

    Args:
        batch: What `datum.collate_datums` made, on the model's device; other keys than the layout's are not read.
        backend: The attention backend in use, not `auto`.
        scope: With xdoc the documents of a packed row become one: positions count on, and they share a segment.
        axes: Rotary axes that the model takes.

    Returns:
        `input_ids` [B, S], `attention_mask` [B, S] or None, `use_cache` False; `position_ids` [B, S] or, for mrope,
        [4, B, S]; packed rows also `cu_seq_lens_q` and `cu_seq_lens_k`, int32 [segments + 1], and for
        flash_attention_2 `max_length_q` and `max_length_k`.

    Raises:
        DataError: The lengths of a packed row do not fit it, or xdoc with padding between documents.
    """
    input_ids = batch["input_ids"]
    if not is_packed(batch):
        inputs = {"input_ids": input_ids, "attention_mask": batch.get("attention_mask"), "use_cache": False}
        if axes == PositionAxes.mrope:
            rows, width = input_ids.shape
            text = torch.arange(width, device=input_ids.device).expand(rows, width)
            inputs["position_ids"] = _four_axes(text, rotary_axes(text, "mrope"))
        return inputs

    lengths = _segment_lengths(batch, scope)
    starts_at_0 = document_positions(torch.tensor(lengths)).view(input_ids.shape).to(input_ids.device)
    rotary = starts_at_0 if scope == Scope.xdoc else batch.get("position_ids", starts_at_0)
    if axes == PositionAxes.mrope:
        rotary = _four_axes(starts_at_0, rotary if rotary.ndim == 3 else rotary_axes(rotary, "mrope"))
    cu_seq_lens = torch.tensor([0, *lengths]).cumsum(0).to(input_ids.device, torch.int32)
    inputs = {
        "input_ids": input_ids,
        "attention_mask": None,
        "position_ids": rotary,
        "use_cache": False,
        "cu_seq_lens_q": cu_seq_lens,
        "cu_seq_lens_k": cu_seq_lens,
    }
    if backend == Backend.flash_attention_2:
        inputs["max_length_q"] = inputs["max_length_k"] = max(lengths)
    return inputs


def _segment_lengths(batch: Mapping[str, Any], scope: Scope) -> list[int]:
    """Physical lengths of all segments, rows end to end, padding as a segment of its own; none is 0.

    seq_lens [[3, 2]] in a row of 8 with seq_lens_padded [[3, 5]] -> [3, 2, 3]; under xdoc [5, 3].
    """
    width = batch["input_ids"].shape[1]
    real_rows = batch["seq_lens"].tolist()
    padded_rows = batch.get("seq_lens_padded", batch["seq_lens"]).tolist()
    segments: list[int] = []
    for index, (real, padded) in enumerate(zip(real_rows, padded_rows)):
        documents = [(length, slot) for length, slot in zip(real, padded) if slot >= 0]  # -1000 is an unused slot
        rest = width - sum(slot for _, slot in documents)
        if rest < 0 or any(not 0 <= length <= slot for length, slot in documents):
            raise DataError(
                f"row {index}: seq_lens {real} and seq_lens_padded {padded} do not fit into {width} positions; "
                "each document needs 0 <= seq_lens <= seq_lens_padded, and their slots at most the row"
            )
        if scope == Scope.xdoc:
            if any(length < slot for length, slot in documents[:-1]):
                raise DataError(
                    f"row {index}: attention=xdoc joins documents, but seq_lens {real} and seq_lens_padded {padded} "
                    "leave padding between them; pad at the row's end only"
                )
            joined = sum(length for length, _ in documents)
            segments += [joined, width - joined]
        else:
            segments += [part for length, slot in documents for part in (length, slot - length)] + [rest]
    return [length for length in segments if length]


def _four_axes(text: Tensor, rotary: Tensor) -> Tensor:
    """Put the text axis [B, S], by which documents are told apart, before the rotary axes [3, B, S]."""
    return torch.cat([text[None].to(rotary.dtype), rotary])
