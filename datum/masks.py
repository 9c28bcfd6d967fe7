"""Conversations -> token ids and weights: which tokens of a chat are trained.

Which tokens an assistant turn consists of is never guessed. There are two ways to know, tried in this order:

- the template marks them: `{% generation %} … {% endgeneration %}`; what it does not mark is not trained, whatever a
  message weighs;
- verified prefixes: with P the tokens of the messages before the turn plus the generation prompt, and F the tokens up
  to and including the turn, both must be prefixes of the tokens of the whole conversation. The turn lies between.

A conversation for which neither holds is refused. Either way
- tokens that the generation prompt forces (a header, an opening think tag) weigh 0: the model never has to emit them;
- the token that ends the turn is trained, once, and what the template writes after it weighs 0;
- where a template ends turns with no end token, the eos token is put once after a last assistant turn.

    ids      <|im_start|> user \\n 2 + 2 <|im_end|> \\n <|im_start|> assistant \\n 4 <|im_end|> \\n
    weights            0    0  0 0 0 0          0  0            0         0  0 1          1  0
"""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from datum.drafts import Draft, Tokens, WeightedTokens, tokenize
from datum.errors import DataError
from datum.messages import Chat
from datum.templates import ChatTemplate

__all__ = ["draft_chat"]

_GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_NOTE_MARKERS = "end token outside of the template's generation markers: trained all the same"
_NOTE_LEFT_OUT = "the template's generation markers leave assistant turns out: these are not trained"
_NOTE_EOS = "eos appended: the chat template ends assistant turns with no end token"


def draft_chat(template: ChatTemplate, chat: Chat, mask: str) -> Draft:
    """Render a conversation; its weights follow when its text is tokenised.

    Args:
        template: The chat template.
        chat: The conversation. An end token that a content carries already is taken off it.
        mask: assistant (every assistant turn), last_assistant, completion (every assistant turn from
            `chat.first_trained` on) or all (every token). A message's own weight multiplies it.

    Raises:
        DataError: No template; the template refuses the conversation, or leaves a content or a tool call out; no
            assistant turn under a mask that needs one; or (from `finish`) the tokens of a turn can be told neither by
            markers nor by verified prefixes.
    """
    template.learn_end_token(chat)
    if template.end_token is not None:
        _strip_end_token(chat, template.tokenizer.convert_ids_to_tokens(template.end_token))
    if mask == "all":
        return _draft_all(template, chat)
    turns = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    first = chat.first_trained if mask == "completion" else 0
    chosen = turns[-1:] if mask == "last_assistant" else [i for i in turns if i >= first]
    if not chosen:
        raise DataError(
            f"{chat.where}: the conversation has no assistant turn to train under mask={mask}; "
            "remove the row or choose data.mask=all"
        )
    weights = {i: chat.weights[i] for i in chosen if chat.weights[i] != 0}
    if weights and template.tokenizer.is_fast and _GENERATION_BLOCK.search(template.source(chat)):
        marked = _weigh_by_markers(template, chat, turns, weights)
        if marked is not None:
            return Draft([], lambda _: marked)
    return _draft_by_prefixes(template, chat, weights, mask)


def _weigh_by_markers(
    template: ChatTemplate, chat: Chat, turns: list[int], weights: dict[int, float]
) -> WeightedTokens | None:
    """Weights by the template's markers; None where these do not tell turns of different weight apart."""
    output = template.apply(chat, chat.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    turn = _Turns(template, list(output["input_ids"]))
    try:
        text = template.tokenizer.decode(turn.ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        turn.notes += template.check_written(chat, text)
    except DataError:  # not every tokenizer gives a text back as it was
        turn.notes += template.check_written(chat, template.render(chat))
    marks = output["assistant_masks"]
    edges = [0, *(i for i in range(1, len(marks)) if marks[i] != marks[i - 1]), len(marks)]
    spans = [(start, stop) for start, stop in pairwise(edges) if start < stop and marks[start]]
    if not spans:
        return turn.result(chat)
    ends_open = chat.messages[-1]["role"] == "assistant"
    if len(spans) != len(turns) and (bounds := _marked_bounds(template, chat, weights, turn.ids)) is not None:
        for i, (start, stop) in bounds.items():
            inside = [j for j in range(start, stop) if marks[j]]
            if inside:
                turn.weigh_marked(inside, stop, weights[i], closes=ends_open and i == turns[-1])
            else:
                turn.notes.append(_NOTE_LEFT_OUT)
        return turn.result(chat)
    forced = template.generation_prompt(chat, turns[0])
    of_span = [weights.get(i, 0.0) for i in turns]
    if len(spans) != len(turns):
        spans = [part for span in spans for part in _cut_at_headers(turn.ids, *span, forced)]
    if len(spans) != len(turns):
        if len(set(of_span)) > 1:
            return None
        if len(spans) < len(turns):
            turn.notes.append(_NOTE_LEFT_OUT)
        of_span = of_span[:1] * len(spans)
    for number, ((start, stop), weight) in enumerate(zip(spans, of_span, strict=True)):
        if weight != 0:
            first = start + _overlap(turn.ids, start, stop, forced)
            turn.weigh_marked(range(first, stop), stop, weight, closes=ends_open and number == len(spans) - 1)
    return turn.result(chat)


def _marked_bounds(
    template: ChatTemplate, chat: Chat, weights: dict[int, float], ids: list[int]
) -> dict[int, tuple[int, int]] | None:
    """Where the turns lie, by verified prefixes; None where these do not tell."""
    try:
        prefixes = _Prefixes(template, chat, weights)
    except DataError:
        return None  # a template may refuse a conversation that stops early
    (tokens,) = tokenize(template.tokenizer, [prefixes.whole])
    found = {i: prefixes.bounds(i, tokens) for i in weights} if tokens.ids == ids else {}
    bounds = {i: bound for i, bound in found.items() if not isinstance(bound, str)}
    return bounds if len(bounds) == len(weights) else None


def _draft_by_prefixes(template: ChatTemplate, chat: Chat, weights: dict[int, float], mask: str) -> Draft:
    """Weights by verified token prefixes."""
    last = len(chat.messages) - 1
    prefixes = _Prefixes(template, chat, weights)
    notes = template.check_written(chat, prefixes.whole)

    def finish(tokens: list[Tokens]) -> WeightedTokens:
        turn = _Turns(template, list(tokens[0].ids), notes)
        for i, weight in weights.items():
            bounds = prefixes.bounds(i, tokens[0])
            if isinstance(bounds, str):
                raise _refusal(template, chat, i, bounds, mask, tokens[0])
            turn.weigh(*bounds, weight, closes=i == last)
        return turn.result(chat)

    return Draft([prefixes.whole], finish)


class _Prefixes:
    """Texts of a conversation up to where each of some turns starts, and through it."""

    def __init__(self, template: ChatTemplate, chat: Chat, turns: Iterable[int]) -> None:
        last = len(chat.messages) - 1
        self.whole = template.render(chat)
        self._before = {i: template.render(chat, i, prompt=True) for i in turns}
        self._through = {i: template.render(chat, i + 1) if i < last else self.whole for i in turns}
        self._template = template

    def bounds(self, turn: int, tokens: Tokens) -> tuple[int, int] | str:
        """First token of a turn and the one after its last, verified; or why they cannot be told."""
        before = self._before[turn]
        start = self._template.prefix_length(before, self.whole, tokens)
        if start is None and self.whole.startswith(before):
            return (
                "white space where the generation prompt ends and the turn starts makes other tokens together than "
                "apart; take it off the content's start or the prompt's end"
            )
        if start is None:
            return "the turn does not start with the generation prompt, or earlier turns are rewritten"
        stop = self._template.turn_prefix_length(self._through[turn], self.whole, tokens, start)
        if stop is None or stop < start:
            return "earlier turns are rewritten, as templates do that strip earlier thinking"
        return start, stop


def _draft_all(template: ChatTemplate, chat: Chat) -> Draft:
    """Every token, each message with its own weight; prefixes are verified only where the weight changes."""
    whole = template.render(chat)
    notes = template.check_written(chat, whole)
    cuts = [i for i in range(1, len(chat.weights)) if chat.weights[i] != chat.weights[i - 1]]
    before = {i: template.render(chat, i) for i in cuts}

    def finish(tokens: list[Tokens]) -> WeightedTokens:
        turn = _Turns(template, list(tokens[0].ids), notes)
        length = len(turn.ids)
        turn.weights = [chat.weights[0]] * length
        for i in cuts:
            start = template.turn_prefix_length(before[i], whole, tokens[0])
            if start is None:
                raise _refusal(template, chat, i, "earlier turns are rewritten", "all", tokens[0])
            turn.weights[start:] = [chat.weights[i]] * (length - start)
        ends_open = chat.messages[-1]["role"] == "assistant"
        if ends_open and chat.weights[-1] != 0 and template.end_of_turn(turn.ids, 0, length) is None:
            turn.insert_end(length, chat.weights[-1])
        return turn.result(chat)

    return Draft([whole], finish)


class _Turns:
    """Tokens of a conversation while its turns are weighed."""

    def __init__(self, template: ChatTemplate, ids: list[int], notes: Iterable[str] = ()) -> None:
        self.ids = ids
        self.weights = [0.0] * len(ids)
        self.notes = list(notes)
        self._template = template

    def weigh(self, start: int, stop: int, weight: float, *, closes: bool) -> None:
        """Weigh ids[start:stop] up to its end token; a turn that closes the conversation gets one if it has none."""
        end = self._template.end_of_turn(self.ids, start, stop)
        trained = slice(start, stop if end is None else end + 1)
        self.weights[trained] = [weight] * len(self.ids[trained])
        if end is None and closes:
            self.insert_end(stop, weight)

    def weigh_marked(self, marked: Sequence[int], stop: int, weight: float, *, closes: bool) -> None:
        """Weigh the marked tokens of a turn that ends before `stop`, and an end token that comes right after them."""
        first, after = (marked[0], marked[-1] + 1) if marked else (stop, stop)
        end = self._template.end_of_turn(self.ids, first, after)
        for i in marked:
            if end is None or i <= end:
                self.weights[i] = weight
        if end is None and self.ids[after : after + 1] == [self._template.end_token]:
            self.weights[after] = weight
            self.notes.append(_NOTE_MARKERS)
        elif end is None and closes:
            self.insert_end(stop, weight)

    def insert_end(self, at: int, weight: float) -> None:
        eos = self._template.tokenizer.eos_token_id
        if eos is None:
            raise DataError(
                f"{self._template.name} ends assistant turns with no end token and the tokenizer has no eos_token, so "
                "a trained model would never stop; set the eos_token, or give data.chat_template a file that writes one"
            )
        self.ids.insert(at, eos)
        self.weights.insert(at, weight)
        self.notes.append(_NOTE_EOS)

    def result(self, chat: Chat) -> WeightedTokens:
        bos = self._template.tokenizer.bos_token_id
        if bos is not None and self.ids[:2] == [bos, bos]:
            raise DataError(
                f"{chat.where}: {self._template.name} gives two {self._template.tokenizer.bos_token} at the start; "
                "take one out of the row's text or the template"
            )
        return WeightedTokens(self.ids, self.weights, notes=tuple(dict.fromkeys(self.notes)))


def _strip_end_token(chat: Chat, text: str) -> None:
    for message in chat.messages:
        while message["role"] == "assistant" and message["content"].endswith(text):
            message["content"] = message["content"].removesuffix(text)


def _overlap(ids: list[int], start: int, stop: int, forced: list[int]) -> int:
    """How many tokens at the start of the span ids[start:stop] the generation prompt has written already.

    The prompt [A, THINK, NL] and a span that starts at THINK, after A: 2.
    """
    for outside in range(min(len(forced), start), -1, -1):
        inside = len(forced) - outside
        if inside <= stop - start and ids[start - outside : start + inside] == forced:
            return inside
    return 0


def _cut_at_headers(ids: list[int], start: int, stop: int, header: list[int]) -> list[tuple[int, int]]:
    """Parts of the span ids[start:stop], each starting where the generation prompt is written."""
    size = len(header)
    inner = [i for i in range(start + 1, stop - size + 1) if size and ids[i : i + size] == header]
    return list(pairwise([start, *inner, stop]))


def _refusal(template: ChatTemplate, chat: Chat, index: int, cause: str, mask: str, tokens: Tokens) -> DataError:
    helps = mask != "last_assistant" and _last_turn_is_told(template, chat, tokens)
    advice = "Choose data.mask=last_assistant, or give" if helps else "Give"
    return DataError(
        f"{chat.where}: which tokens are messages[{index}] cannot be told from {template.name}: the conversation up to "
        f"there is no token prefix of the whole ({cause}). {advice} data.chat_template a "
        "file that marks assistant turns with {% generation %} … {% endgeneration %}"
    )


def _last_turn_is_told(template: ChatTemplate, chat: Chat, tokens: Tokens) -> bool:
    turns = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if not turns or chat.weights[turns[-1]] == 0:
        return False
    try:
        return not isinstance(_Prefixes(template, chat, turns[-1:]).bounds(turns[-1], tokens), str)
    except DataError:
        return False
