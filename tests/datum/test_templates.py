"""Masks of conversations: told by markers or verified prefixes, never guessed."""

import copy
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import ByT5Tokenizer

from datum.encode import RowEncoder
from datum.errors import DataError
from datum.rows import Row
from datum.templates import ChatTemplate
from tests.datum.example_tokenizers import (
    CHATML,
    CLOSED,
    DEFAULT_SYSTEM,
    MARKED,
    MARKED_WHOLE,
    NO_END,
    STRIPPING,
    THINKING,
    THINKING_MARKED,
    TOOLS,
    WITH_BOS,
    byte_level,
    chat,
    metaspace,
    trained,
    word_level,
)

WORDS = st.sampled_from(["Hello", "sum", "two", "  four", "numbers?", "the answer ", "é", "\n\nIt is", "It is.\n", ""])
CONTENT = st.lists(WORDS, max_size=4).map("".join)
REPLY = CONTENT.map(lambda text: "It" + text)  # starts with a letter: nothing can join the header before it
TURNS = st.lists(st.tuples(CONTENT, REPLY), min_size=1, max_size=3).map(
    lambda pairs: [t for pair in pairs for t in pair]
)


def encode(tokenizer, data, **options):
    encoder = RowEncoder(tokenizer, **{"max_length": 4096, **options})
    (datum,) = encoder.encode(Row(copy.deepcopy(data), "chats.jsonl:7"))
    encoder.ledger.check()
    return datum


def fields(datum):
    return datum.input_ids.tolist(), {key: value.tolist() for key, value in datum.loss_fn_inputs.items()}


def weights_of(datum):
    return datum.loss_fn_inputs["weights"].tolist()


# ------------------------------------------------------------------------------------------------ what is trained


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM, MARKED, CLOSED, WITH_BOS])
@pytest.mark.parametrize("make", [byte_level, metaspace])
@settings(max_examples=25, deadline=None)
@given(turns=TURNS)
def test_each_assistant_turn_and_its_end_token_are_trained_and_nothing_else(make, template, turns):
    tokenizer = make(template)
    datum = encode(tokenizer, chat(*turns))
    expected = [
        tokenizer.decode(tokenizer(text + "<|im_end|>", add_special_tokens=False).input_ids) for text in turns[1::2]
    ]
    assert [text.strip() for text in trained(tokenizer, datum)] == [text.strip() for text in expected]
    rendered = tokenizer.apply_chat_template(chat(*turns)["messages"], tokenize=True, return_dict=True)["input_ids"]
    assert [*datum.input_ids.tolist(), datum.loss_fn_inputs["target_tokens"][-1].item()] == rendered


@settings(max_examples=40, deadline=None)
@given(turns=TURNS, mask=st.sampled_from(["assistant", "last_assistant", "all"]))
def test_markers_and_verified_prefixes_agree(turns, mask):
    marked, plain = byte_level(MARKED), byte_level(CHATML)
    assert fields(encode(marked, chat(*turns), mask=mask)) == fields(encode(plain, chat(*turns), mask=mask))


def test_worked_example_of_the_documentation():
    tokenizer = byte_level(CHATML)
    datum = encode(tokenizer, chat("2+2", "4"))
    tokens = tokenizer.convert_ids_to_tokens(datum.loss_fn_inputs["target_tokens"].tolist())
    assert tokens[-3:] == ["4", "<|im_end|>", "Ċ"]
    assert weights_of(datum)[-3:] == [1, 1, 0]
    assert sum(weights_of(datum)) == 2


def test_last_assistant_trains_the_last_turn_only():
    tokenizer = byte_level(DEFAULT_SYSTEM)
    assert trained(tokenizer, encode(tokenizer, chat("a", "b", "c", "d"), mask="last_assistant")) == ["d<|im_end|>"]


def test_completion_trains_the_assistant_turns_of_the_completion():
    tokenizer = byte_level(CHATML)
    turns = chat("a", "b", "c", "d")["messages"]
    row = {"prompt": turns[:3], "completion": turns[3:]}
    assert trained(tokenizer, encode(tokenizer, row)) == ["d<|im_end|>"]
    assert trained(tokenizer, encode(tokenizer, row, mask="assistant")) == ["b<|im_end|>", "d<|im_end|>"]


def test_message_weights_survive_as_fractions_and_negatives():
    tokenizer = byte_level(CHATML)
    row = chat("a", "b", "c", "d", "e", "f")
    for index, weight in [(1, 0.5), (3, 0), (5, -0.25)]:
        row["messages"][index]["weight"] = weight
    assert [w for w in weights_of(encode(tokenizer, row)) if w] == [0.5, 0.5, -0.25, -0.25]
    assert fields(encode(tokenizer, row)) == fields(encode(byte_level(MARKED), row))


def test_mask_all_gives_each_message_its_own_weight():
    tokenizer = byte_level(CHATML)
    row = chat("a", "b", "c")
    row["messages"][0]["weight"] = 0.5
    row["messages"][2]["weight"] = 0.0
    datum = encode(tokenizer, row, mask="all")
    message = len(tokenizer(tokenizer.apply_chat_template(row["messages"][:1], tokenize=False)).input_ids)
    reply = len(tokenizer("<|im_start|>assistant\nb<|im_end|>\n").input_ids)
    assert weights_of(datum) == [0.5] * (message - 1) + [1.0] * reply + [0.0] * (len(datum) - message + 1 - reply)


@pytest.mark.parametrize(
    "template", [TOOLS, TOOLS.replace("tool_calls', []", "tool_calls', [])|list and m.get('tool_calls', []")]
)
def test_tool_calls_are_trained_and_what_tools_answer_is_not(template):
    tokenizer = byte_level(template)
    row = {
        "tools": '[{"type": "function", "function": {"name": "add", "parameters": {}}}]',
        "messages": [
            {"role": "user", "content": "2+3"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2}'}}],
            },
            {"role": "tool", "content": "5", "tool_calls": []},
            {"role": "assistant", "content": [{"type": "text", "text": "It is "}, {"type": "text", "text": "5"}]},
        ],
    }
    datum = encode(tokenizer, row)
    assert trained(tokenizer, datum) == ['<tool_call>add {"a": 2}</tool_call><|im_end|>', "It is 5<|im_end|>"]
    assert '"name": "add"' in tokenizer.decode(datum.input_ids)


# ------------------------------------------------------------------------------------------ generation prompt, ends


def test_tokens_forced_by_the_generation_prompt_weigh_0():
    """Case A4: turn ids [A, THINK, NL, x, EOS], generation prompt [A, THINK, NL]."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ 'U ' + m.content + ' ' }}{% else %}"
        "{% generation %}{{ 'A THINK\n' + m.content + ' <eos>' }}{% endgeneration %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'A THINK\n' }}{% endif %}"
    )
    unmarked = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    for tokenizer in [word_level(t, ["U", "A", "THINK", "NL", "q", "x"]) for t in (template, unmarked)]:
        datum = encode(tokenizer, chat("q", "x"))
        assert tokenizer.convert_ids_to_tokens(datum.loss_fn_inputs["target_tokens"]) == [
            "q",
            "A",
            "THINK",
            "NL",
            "x",
            "<eos>",
        ]
        assert weights_of(datum)[1:] == [0, 0, 0, 1, 1]


@settings(max_examples=25, deadline=None)
@given(turns=TURNS)
def test_forced_think_tags_weigh_0_with_and_without_markers(turns):
    tokenizers = [byte_level(THINKING), byte_level(THINKING_MARKED)]
    plain, marked = (encode(tokenizer, chat(*turns)) for tokenizer in tokenizers)
    assert fields(plain) == fields(marked)
    assert trained(tokenizers[0], plain) == [text + "<|im_end|>" for text in turns[1::2]]


def test_forced_tokens_are_known_where_the_template_closes_conversations():
    template = THINKING_MARKED.replace(
        "{% endif %}{% endfor %}", "{% endif %}{% endfor %}{% if not add_generation_prompt %}"
    )
    template = template.replace("{% if add_generation_prompt %}", "{{ eos_token }}{% else %}")
    tokenizer = byte_level(template)
    assert tokenizer.apply_chat_template(chat("a", "b")["messages"], tokenize=False).endswith("b<|im_end|>\n<eos>")
    assert trained(tokenizer, encode(tokenizer, chat("a", "b"))) == ["b<|im_end|>"]


def test_a_turn_that_does_not_start_with_the_generation_prompt_is_refused():
    tokenizer = byte_level(THINKING.replace("{{ '<think>\n' }}", ""))
    with pytest.raises(DataError, match=r"chats.jsonl:7: .*the turn does not start with the generation prompt"):
        encode(tokenizer, chat("a", "b"))


def test_a_template_that_strips_thinking_is_refused_and_last_assistant_works():
    tokenizer = byte_level(STRIPPING, name_or_path="my-model")
    row = chat("a", "<think>hm</think>b", "c", "<think>so</think>d")
    text = (
        "chats.jsonl:7: which tokens are messages[1] cannot be told from the chat template of my-model: the "
        "conversation up to there is no token prefix of the whole (earlier turns are rewritten, as templates do that "
        "strip earlier thinking). "
        "Choose data.mask=last_assistant, or give data.chat_template a file that marks assistant turns with "
        "{% generation %} … {% endgeneration %}"
    )
    with pytest.raises(DataError, match=re.escape(text)):
        encode(tokenizer, row)
    last = encode(tokenizer, row, mask="last_assistant")
    assert trained(tokenizer, last) == ["<think>so</think>d<|im_end|>"]
    assert "hm" not in tokenizer.decode(last.input_ids)


def test_markers_serve_where_prefixes_fail(tmp_path):
    content = "{{ m['content'] }}{% else %}{{ m['content'].split('</think>')[-1] }}{% endif %}{{ '<|im_end|>\n' }}"
    marked = STRIPPING.replace(
        "{% if loop.last %}" + content,
        "{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}"
        "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
        "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}",
    )
    assert marked != STRIPPING
    file = tmp_path / "marked.jinja"
    file.write_text(marked)
    tokenizer = byte_level(STRIPPING)
    row = chat("a", "<think>hm</think>b", "c", "<think>so</think>d")
    datum = encode(tokenizer, row, chat_template=file)
    assert trained(tokenizer, datum) == ["b<|im_end|>", "<think>so</think>d<|im_end|>"]
    row["messages"][1]["weight"] = 0.5
    assert [w for w in weights_of(encode(tokenizer, row, chat_template=file)) if w][:3] == [0.5, 0.5, 1]


LAST_ONLY = MARKED.replace("{% if m['role'] == 'assistant' %}", "{% if m['role'] == 'assistant' and loop.last %}")
LEFT_OUT = "the template's generation markers leave assistant turns out: these are not trained"


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_markers_that_leave_a_turn_out_are_believed_whatever_it_weighs(weight):
    tokenizer = byte_level(LAST_ONLY)
    row = chat("a", "b", "c", "d")
    row["messages"][1]["weight"] = weight
    encoder = RowEncoder(tokenizer)
    (datum,) = encoder.encode(Row(row, "x:1"))
    assert trained(tokenizer, datum) == ["d<|im_end|>"]
    assert [w for w in weights_of(datum) if w] == [1, 1]
    assert encoder.ledger.notes == {LEFT_OUT: 1}
    row["messages"][3]["weight"] = 0.25  # a weight multiplies what the markers chose
    assert [w for w in weights_of(encode(tokenizer, row)) if w] == [0.25, 0.25]
    last = RowEncoder(tokenizer, mask="last_assistant")
    assert trained(tokenizer, *last.encode(Row(row, "x:1"))) == ["d<|im_end|>"]
    assert last.ledger.notes == {}  # no turn that the mask asks for is left out


def test_a_row_in_which_nothing_is_marked_has_no_target():
    encoder = RowEncoder(byte_level(LAST_ONLY))
    assert encoder.encode(Row(chat("a", "b", "c"), "x:1")) == []
    assert encoder.ledger.rows_dropped == {"no_target": 1}


@pytest.mark.parametrize("strips", [False, True])
def test_marked_turns_in_a_row_are_told_apart_inside_their_common_span(strips):
    """By verified prefixes, or, where a template rewrites earlier turns, by the header that each turn starts with."""
    template = MARKED_WHOLE
    if strips:
        template = template.replace(
            "m['content']", "(m['content'] if loop.last else m['content'].split('</think>')[-1])"
        )
    tokenizer = byte_level(template)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>x</think>b" if strips else "b"},
        {"role": "assistant", "content": "c"},
    ]
    encoder = RowEncoder(tokenizer)
    (datum,) = encoder.encode(Row({"messages": messages}, "x:1"))
    assert trained(tokenizer, datum) == ["b<|im_end|>", "c<|im_end|>"]
    assert LEFT_OUT not in encoder.ledger.notes
    messages[1]["weight"] = 0.5
    assert [w for w in weights_of(encode(tokenizer, {"messages": messages})) if w] == [0.5, 0.5, 1, 1]


@settings(max_examples=30, deadline=None)
@given(
    roles=st.lists(st.sampled_from(["user", "assistant"]), max_size=5),
    weights=st.lists(st.sampled_from([1.0, 0.5, 0.0]), min_size=7, max_size=7),
    mask=st.sampled_from(["assistant", "last_assistant"]),
)
def test_markers_round_whole_turns_agree_with_prefixes(roles, weights, mask):
    roles = ["user", *roles, "assistant"]
    messages = [{"role": r, "content": f"It {i}", "weight": w} for i, (r, w) in enumerate(zip(roles, weights))]
    messages[-1]["weight"] = 1.0
    row = {"messages": messages}
    assert fields(encode(byte_level(MARKED_WHOLE), row, mask=mask)) == fields(
        encode(byte_level(CHATML), row, mask=mask)
    )


def test_content_that_joins_a_token_of_the_header_is_refused():
    tokenizer = byte_level(CHATML)
    joined = tokenizer("assistant\n\n\n", add_special_tokens=False).input_ids
    assert (
        joined[: len(tokenizer("assistant\n", add_special_tokens=False).input_ids)]
        != tokenizer("assistant\n").input_ids
    )
    with pytest.raises(DataError, match="white space where the generation prompt ends and the turn starts makes other"):
        encode(tokenizer, chat("a", "\n\n\nb"))


def test_another_mask_is_advised_only_where_it_helps():
    tokenizer = byte_level(CHATML)

    def refusal(row, **options):
        with pytest.raises(DataError, match="cannot be told") as caught:
            encode(tokenizer, row, **options)
        return str(caught.value)

    advice = "Choose data.mask=last_assistant, or give data.chat_template"
    joined = "\n\n\nb"
    assert advice in refusal(chat("a", joined, "c", "d"))
    encode(tokenizer, chat("a", joined, "c", "d"), mask="last_assistant")
    for row, options in [
        (chat("a", joined), {}),
        (chat("a", joined, "c", joined), {}),
        (chat("a", joined), {"mask": "last_assistant"}),
    ]:
        assert "Give data.chat_template" in refusal(row, **options)
        assert "last_assistant" not in refusal(row, **options)


def test_two_bos_tokens_are_refused_and_one_is_kept():
    tokenizer = byte_level(WITH_BOS, adds_bos=True)
    datum = encode(tokenizer, chat("hi", "b"))
    assert datum.input_ids.tolist().count(tokenizer.bos_token_id) == 1
    with pytest.raises(DataError, match="gives two <bos> at the start; take one out of the row's text or the template"):
        encode(byte_level("{{ bos_token }}" + WITH_BOS), chat("hi", "b"))


def test_an_end_token_in_the_content_is_not_doubled():
    tokenizer = byte_level(CHATML)
    assert fields(encode(tokenizer, chat("a", "b<|im_end|>"))) == fields(encode(tokenizer, chat("a", "b")))


@pytest.mark.parametrize("mask", ["assistant", "all"])
def test_eos_is_added_once_where_the_template_has_no_end_token(mask):
    tokenizer = byte_level(NO_END)
    encoder = RowEncoder(tokenizer, mask=mask)
    (datum,) = encoder.encode(Row(chat("a", "b", "c", "d"), "x:1"))
    targets = datum.loss_fn_inputs["target_tokens"].tolist()
    assert targets.count(tokenizer.eos_token_id) == 1
    assert targets[-1] == tokenizer.eos_token_id
    assert weights_of(datum)[-1] == 1
    assert encoder.ledger.notes == {"eos appended: the chat template ends assistant turns with no end token": 1}
    if mask == "assistant":
        assert trained(tokenizer, datum) == ["b\n", "d\n<eos>"]
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="ends assistant turns with no end token and the tokenizer has no eos_token"):
        encode(tokenizer, chat("a", "b"))


def test_an_end_token_outside_of_the_markers_is_trained_and_noted():
    template = MARKED.replace(
        "m['content'] + '<|im_end|>' }}{% endgeneration %}", "m['content'] }}{% endgeneration %}{{ '<|im_end|>' }}"
    )
    assert template != MARKED
    tokenizer = byte_level(template)
    encoder = RowEncoder(tokenizer)
    (datum,) = encoder.encode(Row(chat("a", "b", "c", "d"), "x:1"))
    assert fields(datum) == fields(encode(byte_level(MARKED), chat("a", "b", "c", "d")))
    assert encoder.ledger.notes == {"end token outside of the template's generation markers: trained all the same": 1}


def test_an_empty_turn_of_marked_header_and_unmarked_end_trains_its_end():
    template = MARKED_WHOLE.replace(
        "+ '<|im_end|>\n' }}{% endgeneration %}", "}}{% endgeneration %}{{ '<|im_end|>\n' }}"
    )
    assert template != MARKED_WHOLE
    tokenizer = byte_level(template)
    assert trained(tokenizer, encode(tokenizer, chat("a", "b", "c", ""))) == ["b<|im_end|>", "<|im_end|>"]


def test_of_two_closing_tokens_the_template_s_own_end_token_is_the_trained_one():
    """`<|im_end|>` ends the turn; the token that closes the conversation weighs 0, and the other way round never."""
    tokenizer = byte_level(CLOSED)
    datum = encode(tokenizer, chat("a", "b"))
    assert tokenizer.decode(datum.loss_fn_inputs["target_tokens"][-3:]) == "<|im_end|>\n<eos>"
    assert weights_of(datum)[-4:] == [1, 1, 0, 0]
    tokenizer.eos_token = "<|im_end|>"  # the same token twice: the first one ends the turn
    assert weights_of(encode(tokenizer, chat("a", "b")))[-4:] == [1, 1, 0, 0]
    closes_only = CLOSED.replace("m['content'] + '<|im_end|>\n'", "m['content'] + '\n'")
    with pytest.raises(DataError, match="earlier turns are rewritten"):
        encode(byte_level(closes_only), chat("a", "b", "c", "d"))


# ------------------------------------------------------------------------------------------- nothing is lost silently

CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]}
DROPS_TOOLS = CHATML.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'tool' %}")
CALL_ONLY = TOOLS.replace("m['content'] }}", "('' if m.get('tool_calls') else m['content']) }}")


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("mask", ["assistant", "last_assistant", "all"])
@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        # "f" is in the default system message ("helpful") all the same
        (DEFAULT_SYSTEM, [CALL, {"role": "tool", "content": "3"}], "messages[1]: its tool call 'f' is"),
        ("{{ 'fixed' }}", [], "messages[0]: its content is"),
        ("{{ 'fixed a ok' }}", [], "messages[0]: its content is"),
        (DROPS_TOOLS, [{"role": "tool", "content": "a"}], "messages[1]: its content is"),
        (DROPS_TOOLS, [{"role": "tool", "content": "3"}], "messages[1]: its content is"),
        (CALL_ONLY, [{**CALL, "content": "I look it up."}], "messages[1]: its content is"),
    ],
)
def test_content_and_calls_that_the_template_does_not_write_are_refused(template, messages, text, mask, marks):
    row = {
        "messages": [{"role": "user", "content": "a"}, *messages, {"role": "assistant", "content": "ok"}],
    }
    if marks:
        template = "{% generation %}" + template + "{% endgeneration %}"
    match = re.escape(f"chats.jsonl:7: {text} not in what the chat template of m writes")
    with pytest.raises(DataError, match=match):
        encode(byte_level(template, name_or_path="m"), row, mask=mask)


@pytest.mark.parametrize("content", ['say "hi"\n\t', "  four  ", "é\n", "it's"])
def test_content_that_a_template_strips_or_writes_as_json_is_written(content):
    messages = [{"role": "user", "content": "a"}, CALL, {"role": "tool", "content": content}]
    messages.append({"role": "assistant", "content": "ok"})
    for writes in ["m['content'] | trim", "m['content'] | tojson"]:
        tokenizer = byte_level(TOOLS.replace("m['content']", f"({writes})"))
        assert trained(tokenizer, encode(tokenizer, {"messages": messages}, mask="last_assistant"))


def test_thinking_that_a_template_drops_is_noted_and_the_rest_of_the_turn_must_be_written():
    always = STRIPPING.replace("{% if loop.last %}", "{% if false %}").replace("[-1] }}", "[-1] | trim }}")
    note = "thinking inside content: not rendered by the template"
    for template, notes in [(CHATML, {}), (STRIPPING, {}), (always, {note: 1})]:
        encoder = RowEncoder(byte_level(template))
        encoder.encode(Row(chat("a", "<think>\nhm\n</think>\n\nb"), "x:1"))
        assert encoder.ledger.notes == notes
    with pytest.raises(DataError, match=re.escape("messages[1]: its content is not in what")):
        encode(byte_level(always), chat("a", "<think>hm</think>"))  # the turn would be empty


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_keys_that_leave_no_trace_are_noted(key):
    rows = [chat("a", "b", "c", "d") for _ in range(3)]
    for row in rows[:2]:
        row["messages"][1][key] = row["messages"][3][key] = "a"
    writes = CHATML.replace("m['content']", f"m.get('{key}', '') + m['content']")
    last = CHATML.replace("m['content']", f"(m.get('{key}', '') if loop.last else '') + m['content']")
    for template, notes in [
        (CHATML, {f"{key}: not rendered by the template": 2}),
        (writes, {}),
        (last, {f"{key}: rendered by the template in some turns only": 2}),
    ]:
        encoder = RowEncoder(byte_level(template), mask="last_assistant")
        for number, row in enumerate(rows):
            encoder.encode(Row(row, f"x:{number}"))
        assert encoder.ledger.notes == notes


def test_a_tools_column_that_leaves_no_trace_is_noted():
    tools = [{"type": "function", "function": {"name": "f"}}]
    for template, notes in [(CHATML, {"tools column: not rendered by the template": 2}), (TOOLS, {})]:
        encoder = RowEncoder(byte_level(template))
        for row in [chat("a", "b", tools=tools), chat("a", "b"), chat("c", "d", tools=tools)]:
            encoder.encode(Row(row, "x:1"))
        assert encoder.ledger.notes == notes


def test_what_a_template_writes_is_probed_once_for_conversations_of_one_shape(monkeypatch):
    calls = []
    render = ChatTemplate.apply
    monkeypatch.setattr(ChatTemplate, "apply", lambda *args, **options: calls.append(1) or render(*args, **options))
    encoder = RowEncoder(byte_level(CHATML))
    for number in range(4):
        encoder.encode(Row(chat(f"a{number}", "b"), "x:1"))
        if number == 0:
            first = len(calls)
    assert len(calls) == first + 3 * 2  # the conversation, and its prompt


# ------------------------------------------------------------------------------------------------- exactness, speed


@pytest.mark.parametrize("template", [CHATML, WITH_BOS, NO_END, CLOSED, THINKING])
@pytest.mark.parametrize(
    "make", [byte_level, lambda t: byte_level(t, trim_offsets=False), metaspace, lambda t: metaspace(t, "normalizer")]
)
@settings(max_examples=25, deadline=None)
@given(turns=st.lists(CONTENT, min_size=2, max_size=5))
def test_the_prefix_shortcut_gives_what_full_tokenisation_gives(make, template, turns):
    tokenizer = make(template)

    def outcome(**attributes):
        encoder = RowEncoder(tokenizer, max_length=4096)
        for name, value in attributes.items():
            setattr(encoder._reader._template, name, value)
        try:
            return [fields(datum) for datum in encoder.encode(Row(chat(*turns), "x:1"))]
        except DataError as error:
            return str(error)

    assert outcome(_proofs_left=0) == outcome(_atoms=frozenset())


def test_the_shortcut_is_given_up_where_the_tokenizer_looks_across_added_tokens(monkeypatch):
    tokenizer = byte_level(CHATML)
    monkeypatch.setattr(ChatTemplate, "_short_prefix_length", lambda self, prefix, tokens: 3)
    assert trained(tokenizer, encode(tokenizer, chat("a", "b", "c", "d"))) == ["b<|im_end|>", "d<|im_end|>"]


def test_unknown_words_are_content_and_no_end_token():
    template = (
        "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}{% if add_generation_prompt %}{{ '' }}{% endif %}"
    )
    datum = encode(word_level(template, ["q"]), chat("q", "x"))
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [0, 2]  # <unk> <eos>
    assert weights_of(datum) == [1, 1]


def test_a_tokenizer_without_offsets_works_by_prefixes():
    tokenizer = ByT5Tokenizer(extra_ids=0, additional_special_tokens=["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert trained(tokenizer, encode(tokenizer, chat("a", "b", "c", "d"))) == ["b<|im_end|>", "d<|im_end|>"]
    tokenizer.chat_template = MARKED
    assert trained(tokenizer, encode(tokenizer, chat("a", "b", "c", "d"))) == ["b<|im_end|>", "d<|im_end|>"]


# ------------------------------------------------------------------------------------------------------- refusals


def test_template_file_takes_the_place_of_the_tokenizer_s(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text(CHATML)
    tokenizer = byte_level(NO_END)
    assert trained(tokenizer, encode(tokenizer, chat("a", "b"), chat_template=file)) == ["b<|im_end|>"]
    with pytest.raises(DataError, match=r"data.chat_template=\S*nowhere.jinja: cannot be read"):
        encode(tokenizer, chat("a", "b"), chat_template=tmp_path / "nowhere.jinja")


def test_a_template_for_tools_is_used_for_rows_with_tools():
    tokenizer = byte_level(None)
    tokenizer.chat_template = {"default": CHATML, "tool_use": "{{ 'tools ' + tools[0].name }}" + CHATML}
    with_tools = encode(tokenizer, chat("a", "b", tools=[{"name": "add"}]))
    assert tokenizer.decode(with_tools.input_ids).startswith("tools add")
    assert fields(encode(tokenizer, chat("a", "b", tools=[]))) == fields(encode(byte_level(CHATML), chat("a", "b")))


@pytest.mark.parametrize(
    ("template", "row", "options", "text"),
    [
        (
            None,
            chat("a", "b"),
            {},
            "the row has messages, but m has no chat template; set data.chat_template to a Jinja file",
        ),
        (
            CHATML,
            chat("a"),
            {},
            "the conversation has no assistant turn to train under mask=assistant; remove the row or",
        ),
        (
            CHATML,
            {"messages": chat("a", "b")["messages"][1:]},
            {},
            "messages[0] is an assistant turn; the chat template of m needs",
        ),
        (
            "{{ raise_exception('roles must alternate') }}",
            chat("a", "b"),
            {},
            "the chat template of m refuses messages[:2]: roles must alternate",
        ),
        (
            CHATML,
            chat("a", "b"),
            {"mask": "completion"},
            "data.mask=completion has no meaning for a row of form messages; choose assistant or last_assistant or all",
        ),
    ],
)
def test_refusals_name_the_row_and_the_way_out(template, row, options, text):
    with pytest.raises(DataError, match=re.escape(f"chats.jsonl:7: {text}")):
        encode(byte_level(template, name_or_path="m"), row, **options)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "messages is an empty conversation; remove the row or give it messages"),
        ("hi", "messages must be a list of messages, got str"),
        (["hi"], "messages[0] must be an object with role and content, got str"),
        (
            [{"role": "human", "content": "a"}],
            "messages[0] has the unknown role 'human'; accepted are system, developer, user,",
        ),
        ([{"content": "a"}], "messages[0] has the unknown role None; accepted are"),
        ([{"role": "user"}], "messages[0] has no content; accepted are a string or a list of text parts"),
        ([{"role": "user", "content": 3}], "messages[0]: content must be a string or a list of text parts, got int"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            "messages[0]: content has a part of type 'image'; a Datum is text",
        ),
        ([{"role": "user", "content": "a", "weight": "1"}], "messages[0]: weight must be a number, got '1'"),
        ([{"role": "user", "content": "a", "weight": float("nan")}], "messages[0]: weight must be finite, got nan"),
        (
            [{"role": "user", "content": "a", "tool_calls": [{}]}],
            "messages[0]: tool_calls belong to assistant messages",
        ),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0]: tool_calls[0] has no function name; accepted is"),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}],
            "messages[0]: arguments of tool_calls[0] is text but no JSON",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "3"}]}],
            "messages[0]: arguments of tool_calls[0] must be an object, got 3",
        ),
    ],
)
def test_malformed_messages_are_refused(messages, text):
    with pytest.raises(DataError, match=re.escape(f"chats.jsonl:7: {text}")):
        encode(byte_level(CHATML), {"messages": messages})


def test_malformed_tools_are_refused():
    for tools, text in [("{", "tools is text but no JSON"), ([1], "tools must be a list of function schemas")]:
        with pytest.raises(DataError, match=f"chats.jsonl:7: {text}"):
            encode(byte_level(CHATML), chat("a", "b", tools=tools))
