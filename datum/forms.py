"""The four row forms -> token ids and weights, before anything is cut."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from datum.drafts import Draft, Tokens, WeightedTokens, tokenize
from datum.errors import DataError
from datum.masks import draft_chat
from datum.messages import Chat, brief, read_chat, read_messages
from datum.rows import FORMATS, Row, row_form
from datum.templates import ChatTemplate

__all__ = ["MASKS", "SIDE_INPUTS", "RowReader"]

MASKS = ("assistant", "last_assistant", "completion", "all")
"""Accepted values of `mask`; None is each form's own."""

SIDE_INPUTS = ("logprobs", "advantages")
"""Columns of a tokens row that ride along, per token."""

_MASKS_OF_FORM = {  # the first one is the form's own
    "messages": ("assistant", "last_assistant", "all"),
    "prompt_completion": ("completion", "all"),
    "text": ("all",),
    "tokens": ("all",),
}


class RowReader:
    """Reads rows of any form with one tokenizer and one mask. See `datum.encode.RowEncoder` for the arguments."""

    def __init__(self, tokenizer: Any, format: str, mask: str | None, chat_template: str | Path | None) -> None:
        if format not in FORMATS:
            raise ValueError(f"format={format!r}: accepted are {', '.join(FORMATS)}")
        if mask is not None and mask not in MASKS:
            raise ValueError(f"mask={mask!r}: accepted are None, {', '.join(MASKS)}")
        self.tokenizer = tokenizer
        self._format = format
        self._mask = mask
        self._template = None if tokenizer is None else ChatTemplate(tokenizer, chat_template)

    def draft(self, row: Row) -> Draft:
        """Texts of the row, and how their tokens become ids and weights.

        Raises:
            DataError: The row is not of its form, or the mask has no meaning for it; names the row.
        """
        form = row_form(row, self._format)
        if form == "tokens":
            self._mask_for(row, form)
            weighted = _read_tokens(row)
            return Draft([], lambda _: weighted)
        template = self._chat_template(row)
        if form == "messages":
            return draft_chat(template, read_chat(row.data, row.where), self._mask_for(row, form))
        if form == "text":
            self._mask_for(row, form)
            return Draft([_string(row, "text")], lambda tokens: self._finish_text(row, tokens))
        if isinstance(row.data["prompt"], list):
            return draft_chat(template, _completion_chat(row), self._mask or "completion")
        weight_of_prompt = 1.0 if self._mask_for(row, form) == "all" else 0.0
        prompt, completion = _string(row, "prompt"), _string(row, "completion")
        return Draft(
            [prompt, prompt + completion],
            lambda tokens: self._finish_completion(row, tokens, completion, weight_of_prompt),
        )

    def generation_prompt(self, row: Row) -> tuple[list[int], str] | None:
        """See `datum.encode.RowEncoder.generation_prompt`."""
        answer = row.data.get("answer")
        form = row_form(row, self._format)
        if answer is None or form in ("text", "tokens"):
            return None
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise DataError(f"{row.where}: answer must be a string or a number, got {type(answer).__name__}")
        template = self._chat_template(row)
        if form == "messages":
            chat = read_chat(row.data, row.where)
            stop = len(chat.messages) - (chat.messages[-1]["role"] == "assistant")
        elif isinstance(row.data["prompt"], list):
            chat = _completion_chat(row)
            stop = chat.first_trained
        else:
            return self._with_prefix(row, tokenize(self.tokenizer, [_string(row, "prompt")])[0].ids), str(answer)
        return list(template.ids(template.render(chat, stop, prompt=True))), str(answer)

    def _finish_text(self, row: Row, tokens: list[Tokens]) -> WeightedTokens:
        ids = self._with_end(row, self._with_prefix(row, tokens[0].ids))
        return WeightedTokens(ids, np.ones(len(ids), np.float32))

    def _finish_completion(
        self, row: Row, tokens: list[Tokens], completion: str, weight_of_prompt: float
    ) -> WeightedTokens:
        """The tokens of prompt + completion, if the prompt's own tokens come first among them.

        Where tokens would merge across the border ("A: " + "Paris"), the two are tokenised apart, so that the prompt is
        what the model will see, provided that this spells the same text.
        """
        prompt, whole = tokens[0].ids, tokens[1].ids
        if whole[: len(prompt)] != prompt:
            apart = prompt + tokenize(self.tokenizer, [completion])[0].ids
            if self._spell(apart) != self._spell(whole):
                raise DataError(
                    f"{row.where}: prompt and completion cannot be told apart in tokens: this tokenizer joins them at "
                    "their border. Move white space from the end of the prompt to the start of the completion"
                )
            whole = apart
        prompt, whole = self._with_prefix(row, prompt), self._with_end(row, self._with_prefix(row, whole))
        weights = np.ones(len(whole), np.float32)
        weights[: len(prompt)] = weight_of_prompt
        return WeightedTokens(whole, weights)

    def _mask_for(self, row: Row, form: str) -> str:
        accepted = _MASKS_OF_FORM[form]
        if self._mask is None:
            return accepted[0]
        if self._mask not in accepted:
            raise DataError(
                f"{row.where}: data.mask={self._mask} has no meaning for a row of form {form}; "
                f"choose {' or '.join(accepted)}, or null for each form's own"
            )
        return self._mask

    def _chat_template(self, row: Row) -> ChatTemplate:
        if self._template is None:
            raise DataError(f"{row.where}: the row is text, and there is no tokenizer; only tokens rows do without")
        return self._template

    @cached_property
    def _prefix(self) -> list[int]:
        """What the tokenizer itself puts before a text: a BOS token, or nothing."""
        plain = tokenize(self.tokenizer, ["a"])[0].ids
        full = list(self.tokenizer("a", add_special_tokens=True)["input_ids"])
        return full[: next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)]

    def _with_prefix(self, row: Row, ids: list[int]) -> list[int]:
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            token = self.tokenizer.bos_token
            raise DataError(f"{row.where}: two {token} at the start; take one out of the row's text")
        return ids if ids[: len(self._prefix)] == self._prefix else self._prefix + ids

    def _with_end(self, row: Row, ids: list[int]) -> list[int]:
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise DataError(f"{row.where}: the row needs an end token and the tokenizer has no eos_token; set one")
        return ids if ids[-1:] == [eos] else [*ids, eos]

    def _spell(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def _completion_chat(row: Row) -> Chat:
    """A prompt/completion row of two lists of messages, as one conversation."""
    prompt, completion = row.data["prompt"], row.data["completion"]
    if not isinstance(completion, list):
        got = type(completion).__name__
        raise DataError(f"{row.where}: prompt is a list of messages, so completion must be one too, got {got}")
    for key in ("prompt", "completion"):
        read_messages(row.data[key], row.where, key)  # so that an error names the column
    chat = read_chat({**row.data, "messages": prompt + completion}, row.where)
    chat.first_trained = len(prompt)
    return chat


def _read_tokens(row: Row) -> WeightedTokens:
    data = row.data
    if "tokens" in data and "input_ids" in data:
        raise DataError(f"{row.where}: the row has both tokens and input_ids; keep one")
    if "labels" in data and "weights" not in data:
        raise DataError(
            f"{row.where}: `labels` are not read; a tokens row says what is learnt by `weights`, one number a token, "
            "0 = not trained"
        )
    key = "tokens" if "tokens" in data else "input_ids"
    ids = _flat(data[key], "iu")
    if ids is None:
        raise DataError(f"{row.where}: {key} must be a flat list of whole numbers, got {brief(data[key])}")
    weights = _per_token(row, "weights", len(ids)) if "weights" in data else np.ones(len(ids), np.float32)
    return WeightedTokens(ids, weights, {name: _per_token(row, name, len(ids)) for name in SIDE_INPUTS if name in data})


def _per_token(row: Row, key: str, length: int) -> npt.NDArray[np.float32]:
    value = row.data[key]
    if key == "advantages" and isinstance(value, int | float) and not isinstance(value, bool):
        value = [value] * length  # one value for the whole sequence
    numbers = _flat(value, "iufb")
    if numbers is None:
        raise DataError(f"{row.where}: {key} must be a flat list of numbers, got {brief(value)}")
    if len(numbers) != length:
        raise DataError(f"{row.where}: {key} has length {len(numbers)}, the row has {length} tokens; give one each")
    with np.errstate(over="ignore"):  # what float32 cannot hold is reported below
        result = numbers.astype(np.float32)
    if not np.isfinite(result).all():
        index = int(np.flatnonzero(~np.isfinite(result))[0])
        raise DataError(f"{row.where}: {key}[{index}] is {numbers[index]}; accepted are finite float32 numbers")
    return result


def _flat(value: Any, kinds: str) -> npt.NDArray[Any] | None:
    """A list as a 1-D array of one of the dtype kinds, or None."""
    if not isinstance(value, list | tuple | np.ndarray) or any(isinstance(item, list | tuple) for item in value):
        return None
    array = np.asarray(value)
    return array if array.ndim == 1 and (array.size == 0 or array.dtype.kind in kinds) else None


def _string(row: Row, key: str) -> str:
    value = row.data[key]
    if not isinstance(value, str):
        raise DataError(f"{row.where}: {key} must be a string, got {type(value).__name__}")
    return value
