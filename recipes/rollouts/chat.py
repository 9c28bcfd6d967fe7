"""Conversations as ids: the prompt of a problem, and what follows a completion when the environment replies.

Sampled ids are never decoded and encoded again. What the environment adds is rendered behind a stand-in for the
completion, and the text behind the stand-in becomes the observation's ids.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from datum.drafts import tokenize
from datum.errors import DataError

__all__ = ["ChatEncoder"]

_STAND_IN = "completion-of-the-policy"


class ChatEncoder:
    """Renders messages with a tokenizer's chat template; without one, prompts are the messages' texts.

    Args:
        tokenizer: The model's tokenizer.
        stop_ids: Ids that end a completion.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: set[int]):
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]], where: str = "prompt") -> tuple[int, ...]:
        """Ids up to and including the generation prompt.

        Raises:
            DataError: The template refuses the messages, or nothing is left of them; names `where`.
        """
        if self.tokenizer.chat_template is None:
            ids = self._plain_ids("\n\n".join(str(message["content"]) for message in messages))
        else:
            ids = self._ids(self._render(messages, where))
        if not ids:
            raise DataError(f"{where}: the prompt has no tokens")
        return tuple(ids)

    def reply_ids(
        self, messages: Sequence[Mapping[str, Any]], reply: Sequence[Mapping[str, Any]], last_id: int | None
    ) -> tuple[int, ...]:
        """Ids that follow a completion: the close of its turn, the reply, and the next generation prompt.

        Args:
            messages: The conversation before the completion.
            reply: Messages that follow it.
            last_id: Last sampled id; a stop id that the template writes too is not repeated.

        Raises:
            DataError: There is no template, or it does not write the completion.
        """
        if self.tokenizer.chat_template is None:
            raise DataError("an environment with several turns needs a tokenizer with a chat template")
        stand_in = {"role": "assistant", "content": _STAND_IN}
        _, found, text = self._render([*messages, stand_in, *reply], "reply").rpartition(_STAND_IN)
        if not found:
            raise DataError("the chat template does not write the content of an assistant turn before a reply")
        ids = self._ids(text)
        if ids and last_id in self.stop_ids and ids[0] == last_id:
            ids = ids[1:]
        return tuple(ids)

    def text(self, ids: Sequence[int]) -> str:
        """What a reward or a tool reads: the completion without its stop id."""
        kept = list(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)
        return str(self.tokenizer.decode(kept))

    def _render(self, messages: Sequence[Mapping[str, Any]], where: str) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
                )
            )
        except Exception as error:  # whatever the template's own code raises
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(f"{where}: the chat template refuses the messages: {reason}") from error

    def _ids(self, text: str) -> list[int]:
        return list(tokenize(self.tokenizer, [text])[0].ids) if text else []

    def _plain_ids(self, text: str) -> list[int]:
        """A text as a model without a template reads it: with the tokenizer's first special tokens, not its last."""
        ids = list(self.tokenizer(text)["input_ids"])
        while ids and ids[-1] in self.stop_ids:
            ids.pop()
        return ids
