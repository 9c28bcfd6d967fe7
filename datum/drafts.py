"""A row between its text and its tokens, so that the texts of many rows are tokenised in one call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

__all__ = ["Draft", "Tokens", "WeightedTokens", "tokenize"]

Numbers = Sequence[float] | npt.NDArray[Any]


@dataclass(slots=True)
class Tokens:
    """Tokens of one text; `encoding` (of a fast tokenizer) maps characters to tokens."""

    ids: list[int]
    encoding: Any = None


@dataclass(slots=True)
class WeightedTokens:
    """Tokens of one row, the loss weight of each as a target, side inputs, and remarks to be counted in the ledger."""

    ids: Sequence[int] | npt.NDArray[Any]
    weights: Numbers
    fields: dict[str, Numbers] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Draft:
    """Texts to be tokenised, and what to make of their tokens."""

    texts: list[str]
    finish: Callable[[list[Tokens]], WeightedTokens]


def tokenize(tokenizer: Any, texts: list[str]) -> list[Tokens]:
    """Tokenise texts as they are: no special token is added, none is taken away, nothing is cut."""
    if not texts:
        return []
    extras = {"return_attention_mask": False, "return_token_type_ids": False}
    batch = tokenizer(texts, add_special_tokens=False, padding=False, truncation=False, verbose=False, **extras)
    encodings = batch.encodings or [None] * len(texts)
    return [Tokens(ids, encoding) for ids, encoding in zip(batch["input_ids"], encodings, strict=True)]
