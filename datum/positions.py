"""Position ids: they restart at every document, and text has the same coordinate on every rotary axis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Int, Int64

__all__ = ["document_positions", "restarting_positions", "rotary_axes"]


def document_positions(lengths: Int[Tensor, " documents"]) -> Int64[Tensor, " total"]:
    """Positions of documents laid end to end.

    Args:
        lengths: [D] tokens of each document, 0 or more; integers.

    Returns:
        int64 [total], counting from 0 in every document.

    Raises:
        ValueError: not 1-D, not integers, or a negative length (take off the unused slots of `seq_lens`, -1000, first).

    >>> document_positions(torch.tensor([3, 2]))
    tensor([0, 1, 2, 0, 1])
    """
    if lengths.dim() != 1:
        raise ValueError(f"lengths has shape {list(lengths.shape)}; accepted is a 1-D integer tensor [D]")
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise ValueError(
            f"lengths has dtype {str(lengths.dtype).removeprefix('torch.')}; accepted is a 1-D integer tensor [D]"
        )
    listed: list[int] = lengths.tolist()
    if min(listed, default=0) < 0:
        i = next(i for i, length in enumerate(listed) if length < 0)
        raise ValueError(f"lengths[{i}] is {listed[i]}; a length is 0 or larger")
    return torch.from_numpy(restarting_positions(listed)).to(lengths.device)


def restarting_positions(lengths: list[int]) -> np.ndarray:
    """`document_positions` of a list of lengths, as an array: [3, 2] -> [0, 1, 2, 0, 1]."""
    longest = np.arange(max(lengths, default=0), dtype=np.int64)
    return np.concatenate([longest[:0], *(longest[:length] for length in lengths)])


def rotary_axes(
    position_ids: Int64[Tensor, "batch seq"], axes: Literal["rope", "mrope"] = "rope"
) -> Int64[Tensor, "batch seq"] | Int64[Tensor, "3 batch seq"]:
    """The rotary coordinates of text: one axis, or three equal ones (t, h, w).

    Args:
        position_ids: int64 [B, S].
        axes: "rope" for models with one rotary axis, "mrope" for those with multimodal rotary embeddings, where a text
            token has the same coordinate on every axis.

    Returns:
        "rope": `position_ids` itself. "mrope": a fresh [3, B, S].

    Raises:
        ValueError: another shape, or unknown axes.

    Source: Qwen2-VL (arXiv:2409.12191) section 2.1: for text, multimodal rotary embeddings equal one-axis ones.
    """
    if position_ids.dim() != 2:
        raise ValueError(f"position_ids has shape {list(position_ids.shape)}; accepted is [B, S]")
    if axes == "rope":
        return position_ids
    if axes == "mrope":
        return position_ids.repeat(3, 1, 1)
    raise ValueError(f"axes is {axes!r}; accepted are 'rope' and 'mrope'")
