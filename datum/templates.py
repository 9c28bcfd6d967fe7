"""What a chat template writes: rendered text, the token that ends a turn, the generation prompt, verified prefixes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datum.drafts import Tokens, tokenize
from datum.errors import DataError
from datum.messages import Chat

__all__ = ["ChatTemplate"]

_PROBE = "datum7probe"
_SHORT = 200  # characters of a text whose tokens are worth remembering
_REMEMBERED = 4096  # such texts
_PROOFS = 16  # prefixes whose shortcut is checked against a full tokenisation


class ChatTemplate:
    """A tokenizer's chat template, or a file in its place.

    Args:
        tokenizer: A Transformers tokenizer, fast or slow.
        file: A Jinja file to use in place of the tokenizer's own template.

    Attributes:
        tokenizer: The tokenizer.
        name: What error texts call the template.
        end_token: Id of the token that ends an assistant turn; None if the template writes none. Known after
            `learn_end_token`.

    Raises:
        DataError: The file cannot be read. That a tokenizer has no template is found at the first conversation.
    """

    def __init__(self, tokenizer: Any, file: str | Path | None = None) -> None:
        self.tokenizer = tokenizer
        self.end_token: int | None = None
        self._model = tokenizer.name_or_path or type(tokenizer).__name__
        self._source: str | None = None
        self.name = f"the chat template of {self._model}"
        if file is not None:
            self.name = f"the chat template {file}"
            try:
                self._source = Path(file).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"data.chat_template={file}: cannot be read: {error}") from error
        added = tokenizer.added_tokens_decoder
        special = {index for index, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        if tokenizer.unk_token_id != tokenizer.eos_token_id:
            special.discard(tokenizer.unk_token_id)  # an unknown word is content
        self._special = frozenset(special)
        self._atoms = frozenset(added)  # texts are cut at these before anything else happens to them
        self._end_token_known = False
        self._blank: dict[int, bool] = {}
        self._remembered: dict[str, list[int]] = {}
        self._proofs_left = _PROOFS

    # ------------------------------------------------------------------------------------------------------- rendering

    def source(self, chat: Chat) -> str:
        """The Jinja text used for a conversation (a tokenizer may have one of its own for conversations with tools)."""
        if self._source is not None:
            return self._source
        try:
            text: str = self.tokenizer.get_chat_template(None, chat.tools)
        except ValueError as error:
            raise DataError(
                f"{chat.where}: the row has messages, but {self._model} has no chat template; "
                "set data.chat_template to a Jinja file"
            ) from error
        return text

    def render(self, chat: Chat, stop: int | None = None, *, prompt: bool = False) -> str:
        """Text of `messages[:stop]`, followed by the generation prompt if asked for."""
        text: str = self.apply(chat, chat.messages[:stop], tokenize=False, add_generation_prompt=prompt)
        return text

    def apply(self, chat: Chat, messages: list[dict[str, Any]], **options: Any) -> Any:
        """The tokenizer's `apply_chat_template` with the conversation's tools.

        Raises:
            DataError: There is no template, or it refuses the messages; names the row.
        """
        template = self.source(chat)
        if not messages:
            raise DataError(f"{chat.where}: messages[0] is an assistant turn; {self.name} needs a message before it")
        try:
            return self.tokenizer.apply_chat_template(messages, tools=chat.tools, chat_template=template, **options)
        except Exception as error:  # whatever the template's own code raises: row and template do not fit
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(f"{chat.where}: {self.name} refuses messages[:{len(messages)}]: {reason}") from error

    def ids(self, text: str) -> list[int]:
        """Tokens of a text, as they are; those of short texts are remembered (do not edit the list)."""
        known = self._remembered.get(text)
        if known is None:
            known = tokenize(self.tokenizer, [text])[0].ids if text else []
            if len(text) <= _SHORT and len(self._remembered) < _REMEMBERED:
                self._remembered[text] = known
        return known

    # ------------------------------------------------------------------------------------------------ starts and ends

    def learn_end_token(self, chat: Chat) -> None:
        """Find the first added token that the template writes after the content of an assistant turn."""
        if self._end_token_known:
            return
        turn = next((i for i, message in enumerate(chat.messages) if message["role"] == "assistant"), None)
        probe = [*chat.messages[:turn], {"role": "assistant", "content": _PROBE}]
        try:
            closing = self.apply(chat, probe, tokenize=False).rpartition(_PROBE)[2]
        except DataError:
            return  # another conversation may suit the template; this one is told so when it is rendered
        self.end_token = next((i for i in self.ids(closing) if i in self._special or i in self._atoms), None)
        self._end_token_known = True

    def end_of_turn(self, ids: list[int], start: int, stop: int) -> int | None:
        """Index of the token that ends the turn ids[start:stop], among its closing special and blank tokens.

        It is the template's end token, or else the last special one: `</tool_call> <|eom|> \\n` ends with <|eom|>.
        """
        end = last_special = None
        for i in range(stop - 1, start - 1, -1):
            if ids[i] == self.end_token:
                end = i
            elif ids[i] in self._special:
                last_special = i if last_special is None else last_special
            elif not self._is_blank(ids[i]):
                break
        return last_special if end is None else end

    def generation_prompt(self, chat: Chat, turn: int) -> list[int]:
        """Tokens that asking for the turn adds to the messages before it."""
        if turn == 0:
            return []
        plain, prompt = self.render(chat, turn), self.render(chat, turn, prompt=True)
        if prompt.startswith(plain):
            return self.ids(prompt[len(plain) :])
        prompt_ids = self.ids(prompt)  # the template closes a conversation by tokens that a prompt has not
        return prompt_ids[_common(self.ids(plain), prompt_ids) :]

    def _is_blank(self, index: int) -> bool:
        known = self._blank.get(index)
        if known is None:
            known = self._blank[index] = not self.tokenizer.decode([index]).strip()
        return known

    # -------------------------------------------------------------------------------------------------------- prefixes

    def turn_prefix_length(self, text: str, whole: str, tokens: Tokens, start: int = 0) -> int | None:
        """`prefix_length` of a text that ends with a turn which starts at token `start`.

        Some templates close a conversation by a token of its own, which is not there when more messages follow. What is
        left over of the text then must be such tokens, and the turn's own end token must come before.
        """
        length = self.prefix_length(text, whole, tokens)
        if length is not None:
            return length
        ids = self.ids(text)
        common = _common(ids, tokens.ids)
        if all(i in self._special or self._is_blank(i) for i in ids[common:]):
            end = self.end_of_turn(ids, start, common)
            if end is not None and ids[end] == self.end_token:
                return common
        return None

    def prefix_length(self, prefix: str, whole: str, tokens: Tokens) -> int | None:
        """Number of tokens of `prefix` if they are the first tokens of `whole`, else None.

        A tokenizer cuts a text at its added tokens before anything else, so from the last one inside the prefix on, a
        short tail decides. The shortcut is checked against the full tokenisation for the first prefixes, and it only
        ever says yes; a no comes from the full one.

        Args:
            prefix: The text that should be a prefix.
            whole: The text of the whole conversation.
            tokens: Its tokens.
        """
        if prefix == whole:
            return len(tokens.ids)
        if tokens.encoding is not None and self._atoms and whole.startswith(prefix):
            length = self._short_prefix_length(prefix, tokens)
            if length is not None and self._proofs_left == 0:
                return length
            if length is not None:
                self._proofs_left -= 1
                if self.ids(prefix) == tokens.ids[:length]:
                    return length
                self._atoms = frozenset()  # this tokenizer looks across its added tokens: no shortcut for it
        ids = self.ids(prefix)
        return len(ids) if tokens.ids[: len(ids)] == ids else None

    def _short_prefix_length(self, prefix: str, tokens: Tokens) -> int | None:
        end = len(prefix)
        near = (tokens.encoding.char_to_token(char) for char in range(end, end + 8))  # blanks may belong to no token
        index = next((token for token in near if token is not None), len(tokens.ids))
        while index > 0:
            index -= 1
            if tokens.ids[index] in self._atoms:
                start, stop = tokens.encoding.token_to_chars(index)
                if stop <= end:
                    tail = self.ids(prefix[start:])
                    return index + len(tail) if tokens.ids[index : index + len(tail)] == tail else None
        return None


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    shorter = min(len(first), len(second))
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)
