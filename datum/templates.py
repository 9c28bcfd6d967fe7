"""What a chat template writes: rendered text, the token that ends a turn, the generation prompt, verified prefixes."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
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

_REASONING = ("reasoning_content", "reasoning", "thinking")  # keys of a message for thinking outside of its content
_THINKING_END = re.compile(r"[<\[]/[\w:]*(?:think|THINK|thought|reason)[\w:]*[>\]]")
_THINKING_START = re.compile(r"\s*[<\[][\w:]+[>\]]")

_Place = tuple[int, int | None]  # index of a message, and of one of its tool calls or None for its content


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
        self._probed: dict[Any, tuple[_Place | None, tuple[str, ...]]] = {}

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
        if not messages:
            raise DataError(f"{chat.where}: messages[0] is an assistant turn; {self.name} needs a message before it")
        options = {"tools": chat.tools, "chat_template": self.source(chat), **options}
        try:
            return self.tokenizer.apply_chat_template(messages, **options)
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

    # ------------------------------------------------------------------------------------------------ what is written

    def check_written(self, chat: Chat, text: str) -> tuple[str, ...]:
        """Refuse a conversation of which the template leaves something out; remarks on what it may leave out.

        The content of every message and the name of every function called must be in the text. White space at the ends
        of a content is the template's own affair, and so is thinking that a content carries before a `</think>`. As a
        short content or name may be in the text by accident, the first conversation of each shape is rendered once more
        with words in their place that nobody else writes.

        Args:
            chat: The conversation.
            text: What the template makes of it.

        Raises:
            DataError: A content or a call is not in the text; names row, message and template.
        """
        notes = []
        for index, message in enumerate(chat.messages):
            content = message["content"].strip()
            if content not in text:
                thinking, rest = _split_thinking(content)
                if not _is_written(rest or thinking, text) and (rest or not message.get("tool_calls")):
                    raise self._lost(chat, f"messages[{index}]: its content")
                if thinking and not _is_written(thinking, text):
                    notes.append("thinking inside content: not rendered by the template")
            for call in message.get("tool_calls", ()):
                if (name := _function(call)["name"]) not in text:
                    raise self._lost(chat, f"messages[{index}]: its tool call {name!r}")
        shape = (self.source(chat), chat.tools is None, tuple(map(_shape, chat.messages)))
        if (found := self._probed.get(shape)) is None:
            found = self._probe(chat)
            if len(self._probed) < _REMEMBERED:
                self._probed[shape] = found
        lost, remarks = found
        if lost is not None:
            index, number = lost
            what = "its content"
            if number is not None:
                what = f"its tool call {_function(chat.messages[index]['tool_calls'][number])['name']!r}"
            raise self._lost(chat, f"messages[{index}]: {what}")
        return (*notes, *remarks)

    def _lost(self, chat: Chat, what: str) -> DataError:
        return DataError(
            f"{chat.where}: {what} is not in what {self.name} writes, so it would be lost; give data.chat_template a "
            "Jinja file that writes it, or take it out of the row"
        )

    def _probe(self, chat: Chat) -> tuple[_Place | None, tuple[str, ...]]:
        """The first content or call that the template leaves out of such a conversation, and remarks."""
        needed: dict[str, _Place] = {}
        reasoning: dict[str, list[str]] = {}
        messages = []
        for index, message in enumerate(chat.messages):
            probe = dict(message)
            _, rest = _split_thinking(message["content"])
            if rest:
                needed[word := f"probe{index}content"] = (index, None)
                probe["content"] = message["content"].rstrip().removesuffix(rest) + word
            if calls := message.get("tool_calls"):
                words = [f"probe{index}call{number}name" for number in range(len(calls))]
                needed |= {word: (index, number) for number, word in enumerate(words)}
                probe["tool_calls"] = [_renamed(call, word) for call, word in zip(calls, words, strict=True)]
            for key in _REASONING:
                if isinstance(message.get(key), str) and message[key].strip():
                    probe[key] = f"probe{index}{key}"
                    reasoning.setdefault(key, []).append(probe[key])
            messages.append(probe)
        try:
            text = self.apply(chat, messages, tokenize=False)
        except DataError:
            return None, ()  # a template that looks into contents: what the text itself shows has to do
        notes = []
        for key, words in reasoning.items():
            written = sum(word in text for word in words)
            if written < len(words):
                how = "rendered by the template in some turns only" if written else "not rendered by the template"
                notes.append(f"{key}: {how}")
        if chat.tools is not None and self._leaves_no_trace(chat, messages, text):
            notes.append("tools column: not rendered by the template")
        return next((place for word, place in needed.items() if word not in text), None), tuple(notes)

    def _leaves_no_trace(self, chat: Chat, messages: list[dict[str, Any]], text: str) -> bool:
        """Whether the text is the same without the tools column."""
        bare = replace(chat, tools=None)
        try:
            return bool(self.apply(bare, messages, tokenize=False, chat_template=self.source(chat)) == text)
        except DataError:
            return False  # it cannot do without

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


def _shape(message: dict[str, Any]) -> tuple[Any, ...]:
    """What of a message, but for its words, decides what a template writes of it."""
    thinking, rest = _split_thinking(message["content"])
    keys = tuple(key for key in _REASONING if message.get(key)) if len(message) > 2 else ()
    return message["role"], bool(thinking), bool(rest), len(message.get("tool_calls", ())), keys


def _split_thinking(content: str) -> tuple[str, str]:
    """Thinking at the start of a content, without its tags, and the rest: "<think>hm</think> b" -> "hm", "b"."""
    ends = list(_THINKING_END.finditer(content))
    if not ends:
        return "", content.strip()
    end = ends[-1]
    thinking = content[: end.start()]
    start = _THINKING_START.match(thinking)
    return thinking[start.end() if start else 0 :].strip(), content[end.end() :].strip()


def _is_written(part: str, text: str) -> bool:
    return part in text or json.dumps(part, ensure_ascii=False)[1:-1] in text  # some write tool results as JSON


def _function(call: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = call.get("function", call)
    return function


def _renamed(call: dict[str, Any], name: str) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": {**call["function"], "name": name}}
    return {**call, "name": name}
