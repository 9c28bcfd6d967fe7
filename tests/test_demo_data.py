"""The shipped rows and tokenizer: made by the scripts, held-out problems untrained, any text encoded losslessly."""

import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from datum.encode import RowEncoder
from datum.rows import read_rows
from scripts.make_demo_data import DEMO, HELD_OUT, NUMBERS, as_jsonl, demo_rows
from scripts.make_smollm2_data import question_rows
from scripts.make_tokenizer import CHAT_TEMPLATE, END, PAD, START, VOCABULARY, build_tokenizer

SMOLLM2 = DEMO / "smollm2"
TOKENIZER = AutoTokenizer.from_pretrained(DEMO / "tokenizer")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def question(row: dict[str, Any]) -> str:
    return row["messages"][-2]["content"]


def addends(row: dict[str, Any]) -> tuple[int, int]:
    matched = re.fullmatch(r"What is (\d\d) \+ (\d\d)\?", question(row))
    assert matched, row
    return int(matched[1]), int(matched[2])


# ----------------------------------------------------------------------------------------------------------------- sums


def test_shipped_sums_are_what_the_script_makes():
    for name, rows in zip(("train", "eval"), demo_rows(), strict=True):
        assert (DEMO / f"{name}.jsonl").read_bytes() == as_jsonl(rows).encode(), name


def test_no_held_out_pair_is_trained_in_either_order():
    train = [addends(row) for row in rows_of(DEMO / "train.jsonl")]
    held_out = [addends(row) for row in rows_of(DEMO / "eval.jsonl")]
    trained_pairs, held_out_pairs = ({tuple(sorted(pair)) for pair in pairs} for pairs in (train, held_out))
    assert not trained_pairs & held_out_pairs
    assert len(held_out_pairs) == len(held_out) == HELD_OUT
    assert trained_pairs | held_out_pairs == {(a, b) for a in NUMBERS for b in NUMBERS if a <= b}
    assert set(train) == {ordered for a, b in trained_pairs for ordered in ((a, b), (b, a))}
    assert len(train) == len(set(train))


@pytest.mark.parametrize("name", ["train", "eval"])
def test_every_sum_is_right(name):
    for row in rows_of(DEMO / f"{name}.jsonl"):
        assert row["answer"] == str(sum(addends(row))) == row["messages"][-1]["content"]


def test_the_trained_tokens_of_a_shipped_row_are_its_answer_and_the_end_token():
    encoder = RowEncoder(TOKENIZER, format="auto", mask=None, max_length=128, overlong="error")
    for row in read_rows(str(DEMO / "eval.jsonl")):
        (datum,) = encoder.encode(row)
        targets, weights = datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs["weights"]
        assert TOKENIZER.decode(targets[weights != 0].tolist()) == row.data["answer"] + END


# ------------------------------------------------------------------------------------------------------------ tokenizer


def test_shipped_tokenizer_is_what_the_script_makes(tmp_path):
    build_tokenizer().save_pretrained(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        assert (DEMO / "tokenizer" / path.name).read_bytes() == path.read_bytes(), path.name


def test_saving_and_loading_leaves_the_tokenizer_as_it_is(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    assert reloaded.get_vocab() == TOKENIZER.get_vocab()
    assert reloaded.chat_template == TOKENIZER.chat_template == CHAT_TEMPLATE
    assert reloaded.special_tokens_map == TOKENIZER.special_tokens_map
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (DEMO / "tokenizer" / name).read_bytes() == (tmp_path / name).read_bytes(), name


def test_special_tokens_are_distinct():
    assert len(TOKENIZER) == VOCABULARY
    assert TOKENIZER.convert_tokens_to_ids([PAD, START, END]) == [0, 1, 2]
    assert (TOKENIZER.pad_token, TOKENIZER.eos_token, TOKENIZER.bos_token) == (PAD, END, None)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_is_encoded_and_decoded_again(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.integers(min_value=0), st.sampled_from(["", " ", "x", "+", "\n"]))
def test_each_digit_is_a_token(number, before):
    tokens = TOKENIZER.tokenize(f"{before}{number}")
    assert [token for token in tokens if any(char.isdigit() for char in token)] == list(str(number))


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@settings(max_examples=30)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3), st.booleans())
def test_generation_markers_cover_each_assistant_turn_and_its_end_token(turns, has_system):
    messages = [{"role": "system", "content": "Be brief."}] if has_system else []
    for asked, answered in turns:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    out = TOKENIZER.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    marked = [index for index, mark in zip(out["input_ids"], out["assistant_masks"], strict=True) if mark]
    assert TOKENIZER.decode(marked) == "".join(answered + END for _, answered in turns)
    prompt = TOKENIZER.apply_chat_template(messages[:-1], return_dict=False, add_generation_prompt=True)
    assert out["input_ids"][: len(prompt)] == prompt
    assert out["assistant_masks"][: len(prompt)][-1] == 0


def test_template_shows_tools_and_calls():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    as_text = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    messages = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [call, as_text]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    written = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    assert TOKENIZER.apply_chat_template(messages, tools=[{"name": "add"}], tokenize=False) == (
        f'{START}tools\n[{{"name": "add"}}]{END}\n{START}user\n1 + 2?{END}\n'
        f"{START}assistant\n{written}{written}{END}\n{START}tool\n3{END}\n{START}assistant\nIt is 3.{END}\n"
    )


def test_template_refuses_an_unknown_role():
    with pytest.raises(Exception, match="role critic: accepted are system, user, assistant, tool"):
        TOKENIZER.apply_chat_template([{"role": "critic", "content": "no"}], tokenize=False)


# -------------------------------------------------------------------------------------------------------- reasoning-gym


def test_no_question_is_asked_twice_in_the_shipped_reasoning_rows():
    rows = rows_of(SMOLLM2 / "train.jsonl") + rows_of(SMOLLM2 / "eval.jsonl")
    assert len({question(row) for row in rows}) == len(rows)
    assert all(row["answer"] == row["messages"][-1]["content"] for row in rows)


def test_shipped_reasoning_rows_are_what_the_script_makes():
    pytest.importorskip("reasoning_gym")
    if metadata.version("reasoning_gym") != "0.1.25":
        pytest.skip("the shipped files are those of reasoning-gym 0.1.25")
    for name, rows in zip(("train", "eval"), question_rows(), strict=True):
        assert (SMOLLM2 / f"{name}.jsonl").read_bytes() == as_jsonl(rows).encode(), name


def test_reasoning_gym_scores_the_shipped_answers_as_right():
    factory = pytest.importorskip("reasoning_gym.factory")
    for row in rows_of(SMOLLM2 / "eval.jsonl"):
        entry = {"question": question(row), "answer": row["answer"], "metadata": json.loads(row["metadata"])}
        score = factory.get_score_answer_fn(row["task"])
        assert score(row["answer"], entry) == 1.0
        assert score(row["answer"] + "0", entry) < 1.0


def test_another_task_and_seed_give_distinct_rows():
    pytest.importorskip("reasoning_gym")
    train, held_out = question_rows(
        "spell_backward", {"max_word_len": 4}, size=30, eval_size=20, seed=1, system="Spell."
    )
    assert (len(train), len(held_out)) == (30, 20)
    assert len({question(row) for row in train + held_out}) == 50
    assert train[0]["messages"][0] == {"role": "system", "content": "Spell."}
    again = question_rows("spell_backward", {"max_word_len": 4}, size=30, eval_size=20, seed=2, system="Spell.")
    assert again != (train, held_out)


def test_too_few_questions_and_a_missing_package_are_said(monkeypatch):
    pytest.importorskip("reasoning_gym")
    one_digit = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(ValueError, match=r"chain_sum with .* has too few different questions: \d+ new ones of 400"):
        question_rows("chain_sum", one_digit, size=400, eval_size=1)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(SystemExit, match="pip install reasoning-gym"):
        question_rows(size=1, eval_size=1)
