"""`document_sdpa`: causal attention within each document, without a mask over the whole row.

Importing this module registers the name with Transformers, twice: the function that computes attention, and the
function that decides what the model hands to it as a mask. Which documents a row holds travels in `cu_seq_lens_q`, the
cumulative physical lengths over all rows end to end, in which padding is a segment of its own: rows [a a b 0],
[c c c c] of width 4 are [0, 2, 3, 4, 8]. Every segment costs the square of its own length; segments of equal length
share one call.

    packed rows             segments from `cu_seq_lens_q`
    padding on the right    a segment is a whole row: no token looks to the right, so none sees the padding
    anything else           what Transformers' `sdpa` does (generation, padding on the left, masks of the model's own)

What it cannot compute raises `ModelError`; nothing is computed as if it were something else.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from recipes.models.errors import ModelError

__all__ = ["NAME", "Segments", "document_mask", "document_sdpa"]

NAME = "document_sdpa"

_CHUNK = 256  # fewest queries a call where a window is shorter than a segment


@dataclass(frozen=True)
class Segments:
    """Documents of a batch's rows laid end to end, padding included.

    Attributes:
        lengths: Tokens of each segment, in order; together they cover rows x width positions.
    """

    lengths: tuple[int, ...]

    @classmethod
    def read(cls, cu_seq_lens: Tensor, rows: int, width: int) -> "Segments":
        """Read the segments off cumulative lengths, once for a tensor: later layers find them on it.

        Args:
            cu_seq_lens: [segments + 1] integers from 0 to rows * width.
            rows: Rows of the batch.
            width: Positions of a row.

        Raises:
            ModelError: The lengths do not cover the rows, or a segment crosses from one row into the next.
        """
        known = getattr(cu_seq_lens, "_segments", None)
        if known is None or known[0] != (rows, width):
            bounds = cu_seq_lens.tolist()  # waits for the device, once a batch
            row_ends = range(0, rows * width + 1, width)
            if bounds != sorted(bounds) or (bounds[0], bounds[-1]) != (0, rows * width) or set(row_ends) - set(bounds):
                shown = f"{bounds[:8]}{'…' if len(bounds) > 8 else ''} up to {bounds[-1]}"
                raise ModelError(
                    f"cu_seq_lens_q is {shown} for {rows} rows of {width}: it must rise from 0 to {rows * width} and "
                    f"hold every multiple of {width}, the padding at a row's end being a segment of its own"
                )
            lengths = tuple(end - start for start, end in pairwise(bounds) if end > start)
            known = ((rows, width), cls(lengths))
            cu_seq_lens._segments = known  # type: ignore[attr-defined]
        return known[1]


@dataclass(frozen=True)
class _Pattern:
    """What a stand-in mask stands for.

    Attributes:
        window: Positions that a token sees, itself included; None sees its whole document.
        is_packed: Whether position ids restart within a row, so that attention needs `cu_seq_lens_q`.
    """

    window: int | None
    is_packed: bool


@torch.compiler.disable
def document_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention for one layer, as a function of Transformers' attention interface.

    Args:
        module: The layer's attention module.
        query: [B, heads, S, head_dim].
        key: [B, key/value heads, S, head_dim]; longer than S while generating.
        value: Like `key`.
        attention_mask: What `document_mask` made, or a mask of the model's own.
        dropout: Probability of dropping an attention weight.
        scaling: Factor of the products; None: 1 / sqrt(head_dim).
        is_causal: Overrides the module's own.
        cu_seq_lens_q: int32 [segments + 1], for packed rows; see the module's text.
        **kwargs: Options of other backends, ignored like `sdpa` does, but for those that change the result.

    Returns:
        [B, S, heads, head_dim], and None for the weights.

    Raises:
        ModelError: Soft-capping or sinks; packed rows with a mask of the model's own, with a bias, with a cache, or
            without cumulative lengths.
    """
    for option, what in (("softcap", "soft-capping of attention scores"), ("s_aux", "attention sinks")):
        if kwargs.get(option) is not None:
            raise ModelError(f"attention.backend={NAME} cannot compute {what}; use attention.backend=eager")
    pattern = getattr(attention_mask, "_pattern", None)
    if pattern is None and _is_stand_in(attention_mask):
        raise ModelError(
            f"{type(module).__name__} edits its mask, which attention.backend={NAME} does not have; use sdpa"
        )
    if pattern is None and cu_seq_lens_q is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    rows, _, width, _ = query.shape
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal or key.shape[2] != width:
        problem = "attention that is not causal self-attention, or a cache: pass use_cache=False"
    elif pattern is None and attention_mask is not None:
        problem = "a mask of the model's own, or attention_mask: leave attention_mask out"
    elif kwargs.get("position_bias") is not None:
        problem = "a bias by position"
    elif pattern is not None and pattern.is_packed and cu_seq_lens_q is None:
        problem = "position_ids that restart within a row, but without cu_seq_lens_q, which says where documents end"
    else:
        problem = None
    if problem is not None:
        raise ModelError(
            f"{type(module).__name__} was called with packed rows and {problem} (attention.backend={NAME})"
        )

    lengths = (width,) * rows if cu_seq_lens_q is None else Segments.read(cu_seq_lens_q, rows, width).lengths
    window = None if pattern is None else pattern.window

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend within n segments of L tokens each: [n, heads, L, head_dim] -> [n, L, heads, head_dim]."""
        if window is None or query.shape[2] <= window:
            output = _causal(query, key, value, dropout, scaling)
        else:
            output = torch.cat(list(_windowed(query, key, value, window, dropout, scaling)), dim=2)
        return output.transpose(1, 2)

    return _by_segment(query, key, value, lengths, attend), None


def _by_segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[int, ...],
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Apply `attend` to segments, those of one length together; [B, heads, S, head_dim] -> [B, S, heads, head_dim]."""
    rows, _, width, _ = query.shape
    if all(length == width for length in lengths):
        return attend(query, key, value).contiguous()
    # Rows end to end: [tokens, heads, head_dim], a view of what projections write.
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    first = lengths[0]
    if all(length == first for length in lengths):
        output = attend(*(tensor.unflatten(0, (-1, first)).transpose(1, 2) for tensor in flat)).flatten(0, 1)
        return output.contiguous().unflatten(0, (rows, width))
    pieces = [tensor.split(lengths) for tensor in flat]  # split, not slices: its backward is one concatenation
    by_length = defaultdict(list)
    for index, length in enumerate(lengths):
        by_length[length].append(index)
    outputs: list[Tensor] = [query] * len(lengths)
    for indices in by_length.values():
        stacked = (torch.stack([piece[i] for i in indices]).transpose(1, 2) for piece in pieces)
        for index, output in zip(indices, attend(*stacked).unbind(0)):
            outputs[index] = output
    return torch.cat(outputs).unflatten(0, (rows, width))


def _causal(query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None) -> Tensor:
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        dropout_p=dropout,
        is_causal=True,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _windowed(
    query: Tensor, key: Tensor, value: Tensor, window: int, dropout: float, scaling: float | None
) -> Iterator[Tensor]:
    """Yield the outputs of consecutive queries, each call over the keys that they see; work grows with L * window."""
    length = query.shape[2]
    key, value = (repeat_kv(tensor, query.shape[1] // tensor.shape[1]) for tensor in (key, value))
    # The first `window` queries see all before them.
    yield _causal(query[:, :, :window], key[:, :, :window], value[:, :, :window], dropout, scaling)
    step = max(_CHUNK, min(window, 4 * _CHUNK))
    for start in range(window, length, step):
        end, low = min(start + step, length), start - window + 1
        rows = torch.arange(start, end, device=query.device)[:, None]
        columns = torch.arange(low, end, device=query.device)
        # window 3, queries 3 and 4, keys 1 to 4 -> [[1, 1, 1, 0], [0, 1, 1, 1]]
        mask = (columns <= rows) & (columns > rows - window)
        yield F.scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, low:end],
            value[:, :, low:end],
            attn_mask=mask,
            dropout_p=dropout,
            scale=scaling,
        )


def document_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Decide what layers of one kind get as their mask, as a function of Transformers' mask interface.

    Rows as wide as the keys, causal, perhaps with a sliding window, with nothing but padding on the right or packed
    documents to hide, need no mask. They get None, or a stand-in of one element's memory which says what
    `document_sdpa` has to do. It is all False, so that a model that uses it as a mask sees nothing at all rather than
    too much. Everything else gets what `sdpa` gets.

    Args:
        batch_size: B.
        q_length: Queries a row.
        kv_length: Keys a row.
        q_offset: Position of the first query.
        kv_offset: Position of the first key.
        mask_function: The pattern, made of Transformers' building blocks.
        attention_mask: bool [B, keys], True = real.
        local_size: Sliding window or chunk.
        allow_is_causal_skip: Whether the model can do without a mask.
        device: Of the model's hidden states.
        **kwargs: Options of other mask functions.
    """
    blocks = set(_building_blocks(mask_function))
    is_packed = "packed_sequence_mask_function" in blocks
    is_plain = (
        blocks <= _PLAIN_BLOCKS
        and isinstance(q_offset, int)
        and q_offset == kv_offset == 0
        and q_length == kv_length
        and (allow_is_causal_skip or is_packed)
        and not torch.compiler.is_compiling()
        and (attention_mask is None or _is_right_padded(attention_mask, kv_length))
    )
    if not is_plain:
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip,
            device=device,
            **kwargs,
        )
    window = local_size if "sliding_window_overlay" in blocks else None
    if window is not None and window >= kv_length:
        window = None
    if window is None and not is_packed:
        return None
    stand_in = torch.zeros((), dtype=torch.bool, device=device).expand(batch_size, 1, q_length, kv_length)
    stand_in._pattern = _Pattern(window, is_packed)  # type: ignore[attr-defined]
    return stand_in


_PLAIN_BLOCKS = {
    "and_masks",
    "causal_mask_function",
    "sliding_window_overlay",
    "remap_positions_for_packed_sequence",
    "packed_sequence_mask_function",
}


def _building_blocks(mask_function: Callable[..., Any]) -> Iterator[str]:
    """Names of the functions of `transformers.masking_utils` that a mask pattern is made of."""
    yield getattr(mask_function, "__qualname__", repr(mask_function)).split(".")[0]
    for cell in getattr(mask_function, "__closure__", None) or ():
        held = cell.cell_contents
        for inner in held if isinstance(held, tuple) else (held,):
            if callable(inner) and not isinstance(inner, Tensor):
                yield from _building_blocks(inner)


def _is_right_padded(attention_mask: Tensor, kv_length: int) -> bool:
    if attention_mask.ndim != 2 or attention_mask.shape[1] != kv_length:
        return False
    mask = attention_mask.bool()
    return not bool((mask[:, 1:] & ~mask[:, :-1]).any())


def _is_stand_in(attention_mask: Tensor | None) -> bool:
    return (
        attention_mask is not None
        and attention_mask.dtype == torch.bool
        and attention_mask.ndim == 4
        and attention_mask.shape[2] > 1
        and attention_mask.stride()[2:] == (0, 0)
    )


AttentionInterface.register(NAME, document_sdpa)
AttentionMaskInterface.register(NAME, document_mask)
