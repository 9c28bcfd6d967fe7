"""Rows -> Datums: the shift, the over-length policies, the ledger's equations, and what is refused."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datum.dataset import DatumSet, Piece
from datum.encode import RowEncoder, encode_rows, hold_out
from datum.errors import DataError
from datum.order import epoch_order, shuffled
from datum.rows import Row
from tests.datum.example_tokenizers import CHATML, MARKED, THINKING, byte_level, chat, metaspace, trained, word_level

POLICIES = st.sampled_from(["drop", "truncate", "split"])
WEIGHT = st.sampled_from([0.0, 0.0, 1.0, 0.5, -2.0])
TOKEN_ROWS = st.lists(
    st.lists(st.tuples(st.integers(0, 99), WEIGHT), max_size=14).map(
        lambda pairs: {"tokens": [token for token, _ in pairs], "weights": [weight for _, weight in pairs]}
    ),
    min_size=1,
    max_size=8,
)
WORDS = st.lists(st.sampled_from(["Hello", "sum", " two", "the answer "]), min_size=1, max_size=6).map("".join)
ANY_ROW = st.one_of(
    st.builds(lambda a, b, c, d: chat(a, b, c, d), WORDS, WORDS, WORDS, WORDS),
    st.builds(lambda a, b: {"prompt": a, "completion": b}, WORDS, WORDS),
    st.builds(lambda a: {"text": a}, WORDS),
    st.builds(lambda n: {"input_ids": list(range(n))}, st.integers(0, 30)),
)


def rows_of(*data, source=0, weight=1.0):
    return [Row(item, f"rows.jsonl:{number}", source, weight) for number, item in enumerate(data, 1)]


def encode(data, tokenizer=None, **options):
    """Datums of one row, and the encoder."""
    encoder = RowEncoder(tokenizer, **options)
    datums = encoder.encode(Row(data, "rows.jsonl:1"))
    encoder.ledger.check()
    return datums, encoder


def ids_of(datum):
    """The row tokens of a Datum: what it reads, and its last target."""
    return [*datum.input_ids.tolist(), datum.loss_fn_inputs["target_tokens"][-1].item()]


# ----------------------------------------------------------------------------------------------------------- the shift


def test_the_shift_happens_once_and_everything_shifts_alike():
    """Case A6: roles [p,p,a,a,t,t,a], tool tokens weigh 0, the denominator is 3."""
    row = {
        "tokens": [1, 2, 3, 4, 5, 6, 7],
        "weights": [0, 0, 1, 1, 0, 0, 1],
        "logprobs": [0, -1, -2, -3, -4, -5, -6],
        "advantages": 0.5,
    }
    ((datum,), _) = encode(row)
    inputs = datum.loss_fn_inputs
    assert datum.input_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert inputs["target_tokens"].tolist() == [2, 3, 4, 5, 6, 7]
    assert inputs["weights"].tolist() == [0, 1, 1, 0, 0, 1]
    assert inputs["weights"].abs().sum() == 3
    assert inputs["logprobs"].tolist() == [-1, -2, -3, -4, -5, -6]
    assert inputs["advantages"].tolist() == [0.5] * 6
    assert (datum.input_ids.dtype, inputs["weights"].dtype) == (torch.int64, torch.float32)


@given(rows=TOKEN_ROWS)
def test_a_row_of_n_tokens_has_n_minus_1_positions_and_keeps_its_weights(rows):
    for row in rows:
        datums, encoder = encode(row)
        if len(row["tokens"]) < 2:
            assert (datums, encoder.ledger.rows_dropped) == ([], {"too_short": 1})
        elif not any(row["weights"][1:]):
            assert (datums, encoder.ledger.rows_dropped) == ([], {"no_target": 1})
        else:
            assert ids_of(datums[0]) == row["tokens"]
            assert datums[0].loss_fn_inputs["weights"].tolist() == row["weights"][1:]


# ------------------------------------------------------------------------------------------------------ over-long rows


@pytest.mark.parametrize(
    ("policy", "pieces", "counts"),
    [
        ("truncate", [[1, 2, 3, 4], [6, 7], [8, 9, 10]], {"truncated_tokens": 1, "dropped_tokens": 1}),
        ("split", [[1, 2, 3], [4, 5], [6, 7], [8, 9, 10]], {"truncated_tokens": 0, "dropped_tokens": 1}),
        ("drop", [[6, 7], [8, 9, 10]], {"truncated_tokens": 0, "dropped_tokens": 6}),
    ],
)
def test_policies_on_rows_of_5_2_3_and_1_tokens(policy, pieces, counts):
    """Case C3 in row tokens: 4 tokens are 3 positions; the row of one token is no Datum."""
    encoder = RowEncoder(None, max_length=3, overlong=policy)
    rows = rows_of({"tokens": [1, 2, 3, 4, 5]}, {"tokens": [6, 7]}, {"tokens": [8, 9, 10]}, {"tokens": [11]})
    assert [ids_of(datum) for datum in encode_rows(rows, encoder)] == pieces
    assert {key: getattr(encoder.ledger, key) for key in counts} == counts
    assert encoder.ledger.source_tokens == 11
    assert encoder.ledger.rows_dropped == {"too_short": 1} | ({"overlong": 1} if policy == "drop" else {})


def test_an_over_long_row_is_named_under_error():
    text = (
        "rows.jsonl:1: 5 tokens make 4 positions, above data.max_length=3; raise it, or choose data.overlong=drop, "
        "truncate or split"
    )
    with pytest.raises(DataError, match=re.escape(text)):
        encode({"tokens": [1, 2, 3, 4, 5]}, max_length=3)
    assert encode({"tokens": [1, 2, 3, 4]}, max_length=3)[0]


@given(rows=TOKEN_ROWS, policy=POLICIES, max_length=st.integers(1, 6))
def test_the_ledger_accounts_for_every_row_and_token(rows, policy, max_length):
    encoder = RowEncoder(None, max_length=max_length, overlong=policy)
    kept = [encoder.encode(row) for row in rows_of(*rows)]
    ledger = encoder.ledger
    ledger.check()
    datums = [datum for datums in kept for datum in datums]
    targets = [w for datum in datums for w in datum.loss_fn_inputs["weights"].tolist()]
    assert ledger.rows_in == len(rows)
    assert ledger.rows_kept == sum(1 for datums in kept if datums)
    assert ledger.source_tokens == sum(len(row["tokens"]) for row in rows)
    assert ledger.trained_tokens == sum(1 for w in targets if w)
    assert ledger.masked_tokens == sum(1 for w in targets if not w) + len(datums)
    assert ledger.kept_pieces == len(datums)
    if policy == "split":
        assert ledger.truncated_tokens == 0
        assert "overlong" not in ledger.rows_dropped


@given(rows=TOKEN_ROWS, policy=POLICIES, max_length=st.integers(1, 6))
def test_pieces_are_consecutive_cuts_of_their_row(rows, policy, max_length):
    """Truncation keeps the head; a split loses only pieces that train nothing; no Datum is above max_length."""
    for row in rows:
        weights = [w or 1.0 for w in row["weights"]]  # everything is trained: nothing is lost for want of a target
        datums, _ = encode({**row, "weights": weights}, max_length=max_length, overlong=policy)
        joined = [token for datum in datums for token in ids_of(datum)]
        whole = row["tokens"] if len(row["tokens"]) > 1 else []
        assert all(1 <= len(datum) <= max_length for datum in datums)
        if policy == "truncate":
            assert joined == whole[: max_length + 1]
        elif policy == "split":
            lost = 1 if max_length == 1 and len(whole) % 2 else 0  # pieces of two tokens cannot take a third
            assert joined == whole[: len(whole) - lost]
        else:
            assert joined == (whole if len(whole) - 1 <= max_length else [])


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(ANY_ROW, min_size=1, max_size=5),
    policy=POLICIES,
    max_length=st.integers(1, 40),
    template=st.sampled_from([CHATML, MARKED, THINKING]),
)
def test_the_ledger_adds_up_over_mixed_forms(rows, policy, max_length, template):
    encoder = RowEncoder(byte_level(template), max_length=max_length, overlong=policy)
    datums = [datum for row in rows_of(*rows) for datum in encoder.encode(row)]
    encoder.ledger.check()
    assert encoder.ledger.trained_tokens + encoder.ledger.masked_tokens == sum(len(datum) + 1 for datum in datums)
    again = RowEncoder(byte_level(template), max_length=max_length, overlong=policy)
    if datums:
        assert len(encode_rows(rows_of(*rows), again)) == len(datums)
    else:
        with pytest.raises(DataError, match="nothing is left to train on: all rows were dropped"):
            encode_rows(rows_of(*rows), again)
    assert again.ledger == encoder.ledger


def test_a_row_whose_targets_are_all_cut_away_is_dropped_and_counted():
    """Case A2: a prompt of 10 tokens and an answer of 2, cut after 8."""
    row = {"tokens": list(range(12)), "weights": [0] * 10 + [1, 1]}
    datums, encoder = encode(row, max_length=8, overlong="truncate")
    assert datums == []
    assert encoder.ledger.rows_dropped == {"no_target": 1}
    assert (encoder.ledger.dropped_tokens, encoder.ledger.truncated_tokens) == (12, 0)
    with pytest.raises(DataError, match=re.escape("all rows were dropped (rows dropped: 1 no_target); see data.mask")):
        encode_rows(rows_of(row), RowEncoder(None, max_length=8, overlong="truncate"))


def test_a_piece_of_a_split_row_without_a_target_is_dropped_and_the_row_kept():
    row = {"tokens": list(range(6)), "weights": [0, 0, 0, 0, 1, 1]}
    datums, encoder = encode(row, max_length=2, overlong="split")
    assert [ids_of(datum) for datum in datums] == [[3, 4, 5]]
    assert encoder.ledger.pieces_dropped == {"no_target": 1}
    assert (encoder.ledger.rows_kept, encoder.ledger.dropped_tokens) == (1, 3)


# ---------------------------------------------------------------------------------------- text, prompt and completion


@pytest.mark.parametrize("text", ["Hello there", "Hello there<eos>", "<bos>Hello there"])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_text_starts_as_the_tokenizer_starts_texts_and_ends_with_one_eos(text, adds_bos):
    tokenizer = byte_level(adds_bos=adds_bos)
    ((datum,), _) = encode({"text": text}, tokenizer)
    ids = ids_of(datum)
    assert ids.count(tokenizer.eos_token_id) == 1
    assert ids[-1] == tokenizer.eos_token_id
    assert ids.count(tokenizer.bos_token_id) == int(adds_bos or text.startswith("<bos>"))
    assert datum.loss_fn_inputs["weights"].eq(1).all()


@settings(max_examples=50, deadline=None)
@given(prompt=WORDS, completion=WORDS, adds_bos=st.booleans())
def test_completions_are_trained_after_the_prompt_as_the_model_sees_it(prompt, completion, adds_bos):
    """Also where the tokens of the joined text would merge across the border."""
    tokenizer = byte_level(adds_bos=adds_bos)
    row = {"prompt": prompt, "completion": completion, "answer": 3}
    ((datum,), encoder) = encode(row, tokenizer)
    seen, answer = encoder.generation_prompt(Row(row, "rows.jsonl:1"))
    assert ids_of(datum)[: len(seen)] == seen == tokenizer(prompt).input_ids
    assert answer == "3"
    assert datum.loss_fn_inputs["weights"].tolist() == [0.0] * (len(seen) - 1) + [1.0] * (len(datum) - len(seen) + 1)
    assert trained(tokenizer, datum) == [completion + "<eos>"]
    assert tokenizer.decode(ids_of(datum)).removeprefix("<bos>") == prompt + completion + "<eos>"


def test_mask_all_trains_the_prompt_too():
    tokenizer = byte_level()
    ((datum,), _) = encode({"prompt": "Hello", "completion": " there<eos>"}, tokenizer, mask="all")
    assert datum.loss_fn_inputs["weights"].eq(1).all()
    assert ids_of(datum).count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("adds_bos", [True, False])
def test_two_bos_tokens_at_the_start_of_a_text_or_prompt_are_refused(adds_bos):
    tokenizer = byte_level(adds_bos=adds_bos)
    text = "rows.jsonl:1: two <bos> at the start; take one out of the row's text"
    for row in [{"text": "<bos><bos>Hello"}, {"prompt": "<bos><bos>Hello", "completion": " there", "answer": "a"}]:
        with pytest.raises(DataError, match=re.escape(text)):
            encode(row, tokenizer)
    with pytest.raises(DataError, match=re.escape(text)):
        RowEncoder(tokenizer).generation_prompt(Row(row, "rows.jsonl:1"))


@pytest.mark.parametrize("data", [[1], None, "text"])
def test_a_row_made_by_hand_that_is_no_dict_is_refused(data):
    row = Row(data, "x:1")
    text = f"x:1: a row must be a JSON object, got {type(data).__name__}; accepted are messages | prompt and completion"
    for method in (RowEncoder(None).encode, RowEncoder(None).generation_prompt):
        with pytest.raises(DataError, match=re.escape(text)):
            method(row)


def test_null_keys_of_a_row_made_by_hand_are_absent():
    nulls = {"prompt": None, "completion": None, "tokens": None, "messages": None}
    tokenizer = byte_level()
    (expected, _), (got, _) = encode({"text": "Hello"}, tokenizer), encode({**nulls, "text": "Hello"}, tokenizer)
    assert ids_of(got[0]) == ids_of(expected[0])
    row = {"tokens": [1, 2], "weights": None, "logprobs": None, "answer": None}
    datums = encode_rows(rows_of(row), RowEncoder(None))
    assert (datums.keys, datums.rows) == (("target_tokens", "weights"), [])
    assert row["weights"] is None  # the caller's dict is not edited


def test_a_border_that_tokens_cannot_show_is_refused():
    """SentencePiece writes a space before a text of its own: "Hel" + "lo" apart spells "Hel lo"."""
    tokenizer = metaspace(None)
    whole, start = (tokenizer(text, add_special_tokens=False).input_ids for text in ("Hello", "Hell"))
    assert whole[: len(start)] != start
    with pytest.raises(DataError, match=r"rows.jsonl:1: prompt and completion cannot be told apart in tokens"):
        encode({"prompt": "Hell", "completion": "o"}, tokenizer)
    ((datum,), _) = encode({"prompt": "Hello", "completion": " there"}, tokenizer)
    assert trained(tokenizer, datum) == ["there<eos>"]


def test_generation_prompts_of_chats_stop_before_the_last_assistant_turn():
    tokenizer = byte_level(THINKING)
    encoder = RowEncoder(tokenizer)
    turns = chat("a", "b", "c", "d")["messages"]
    expected = tokenizer.apply_chat_template(turns[:3], tokenize=False, add_generation_prompt=True)
    for data in [
        {"messages": turns, "answer": "d"},
        {"messages": turns[:3], "answer": "d"},
        {"prompt": turns[:3], "completion": turns[3:], "answer": "d"},
    ]:
        ids, answer = encoder.generation_prompt(Row(data, "x:1"))
        assert (tokenizer.decode(ids), answer) == (expected, "d")
    for data in [{"messages": turns}, {"text": "a", "answer": "b"}, {"tokens": [1, 2], "answer": "b"}]:
        assert encoder.generation_prompt(Row(data, "x:1")) is None
    with pytest.raises(DataError, match=r"x:1: answer must be a string or a number, got list"):
        encoder.generation_prompt(Row({"messages": turns, "answer": []}, "x:1"))


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("row", "options", "text"),
    [
        (
            {"text": "a"},
            {"mask": "assistant"},
            "data.mask=assistant has no meaning for a row of form text; choose all, or null",
        ),
        (
            {"prompt": "a", "completion": "b"},
            {"mask": "assistant"},
            "data.mask=assistant has no meaning for a row of form prompt_completion; choose completion or all, or null",
        ),
        (
            {"tokens": [1, 2]},
            {"mask": "completion"},
            "data.mask=completion has no meaning for a row of form tokens; choose all",
        ),
        ({"text": 3}, {}, "text must be a string, got int"),
        ({"prompt": "a", "completion": ["b"]}, {}, "completion must be a string, got list"),
        (
            {"prompt": [{"role": "user", "content": "a"}], "completion": "b"},
            {},
            "prompt is a list of messages, so completion must",
        ),
        ({"prompt": [], "completion": []}, {}, "prompt is an empty conversation"),
        ({"tokens": "abc"}, {}, "tokens must be a flat list of whole numbers, got 'abc'"),
        ({"tokens": [1.0, 2.0]}, {}, "tokens must be a flat list of whole numbers, got [1.0, 2.0]"),
        ({"tokens": [[1, 2]]}, {}, "tokens must be a flat list of whole numbers, got [[1, 2]]"),
        ({"input_ids": [True, False]}, {}, "input_ids must be a flat list of whole numbers"),
        ({"tokens": [1, 2], "input_ids": [1, 2]}, {}, "the row has both tokens and input_ids; keep one"),
        (
            {"tokens": [1, 2], "labels": [1, 2]},
            {},
            "`labels` are not read; a tokens row says what is learnt by `weights`",
        ),
        ({"tokens": [1, 2], "weights": [1]}, {}, "weights has length 1, the row has 2 tokens; give one each"),
        ({"tokens": [1] * 7, "weights": [0] * 8}, {}, "weights has length 8, the row has 7 tokens"),
        (
            {"tokens": [1, 2], "weights": [1, float("nan")]},
            {},
            "weights[1] is nan; accepted are finite float32 numbers",
        ),
        ({"tokens": [1, 2], "weights": [1e300, 1]}, {}, "weights[0] is 1e+300; accepted are finite float32 numbers"),
        ({"tokens": [1, 2], "weights": ["a", "b"]}, {}, "weights must be a flat list of numbers, got ['a', 'b']"),
        ({"tokens": [1, 2], "advantages": "a"}, {}, "advantages must be a flat list of numbers, got 'a'"),
        (
            {"tokens": [1, 300]},
            {"vocab_size": 300},
            "token 1 has the id 300, accepted are 0 to 299, the model's vocabulary",
        ),
        ({"tokens": [-1, 3]}, {}, "token 0 has the id -1, accepted are 0 to"),
        ({"text": "Hello"}, {"vocab_size": 5}, "token 0 has the id"),
        ({"a": 1}, {}, "no known row form, its keys are a"),
        ({"text": "a"}, {"format": "tokens"}, "format=tokens needs the keys tokens or input_ids, this row has text"),
    ],
)
def test_a_wrong_row_is_refused_by_name(row, options, text):
    with pytest.raises(DataError, match=re.escape(f"rows.jsonl:1: {text}")):
        encode(row, byte_level(), **options)


def test_text_without_a_tokenizer_or_an_end_token_is_refused():
    with pytest.raises(DataError, match=r"rows.jsonl:1: the row is text, and there is no tokenizer"):
        encode({"text": "a"})
    tokenizer = byte_level()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match=r"rows.jsonl:1: the row needs an end token and the tokenizer has no eos_token"):
        encode({"text": "a"}, tokenizer)


def test_options_are_checked():
    for options, text in [
        ({"overlong": "cut"}, "overlong='cut': accepted are error, drop, truncate, split"),
        ({"mask": "user"}, "mask='user': accepted are None, assistant, last_assistant, completion, all"),
        ({"format": "chat"}, "format='chat': accepted are auto"),
        ({"max_length": 0}, "max_length=0: accepted are whole numbers from 1"),
    ]:
        with pytest.raises(ValueError, match=re.escape(text)):
            RowEncoder(None, **options)


# ------------------------------------------------------------------------------------------------------------ the set


@given(rows=TOKEN_ROWS, policy=POLICIES)
def test_a_set_holds_what_the_encoder_makes(rows, policy):
    rows = rows_of(*rows, {"tokens": [1, 2, 3], "weights": [0, 1, 0.5]})
    one_by_one = RowEncoder(None, max_length=5, overlong=policy)
    expected = [datum for row in rows for datum in one_by_one.encode(row)]
    encoder = RowEncoder(None, max_length=5, overlong=policy)
    datums = encode_rows(rows, encoder)
    assert encoder.ledger == one_by_one.ledger
    assert datums.lengths.tolist() == [len(datum) for datum in expected] == [len(datum) for datum in datums]
    for got, datum in zip(datums, expected, strict=True):
        assert torch.equal(got.input_ids, datum.input_ids)
        assert all(torch.equal(got.loss_fn_inputs[key], value) for key, value in datum.loss_fn_inputs.items())
    assert ids_of(datums[-1]) == ids_of(expected[-1])
    assert [ids_of(datum) for datum in datums[1:]] == [ids_of(datum) for datum in expected[1:]]
    with pytest.raises(IndexError, match=f"index {len(datums)} of a data set of {len(datums)} Datums"):
        datums[len(datums)]


def test_rows_are_encoded_alike_in_any_batch(monkeypatch):
    tokenizer = byte_level()
    rows = rows_of(*[chat(f"{i}", f"{i + 1}") if i % 3 else {"prompt": f"{i} ", "completion": "a"} for i in range(20)])
    whole = encode_rows(rows, RowEncoder(tokenizer))
    monkeypatch.setattr("datum.encode._BATCH", 3)
    assert encode_rows(rows, RowEncoder(tokenizer)).fingerprint == whole.fingerprint


def test_a_datum_of_a_set_is_a_copy():
    datums = encode_rows(rows_of({"tokens": [1, 2, 3]}), RowEncoder(None))
    datums[0].loss_fn_inputs["weights"].zero_()
    datums[0].input_ids.zero_()
    assert datums[0].loss_fn_inputs["weights"].tolist() == [1, 1]
    assert datums[0].input_ids.tolist() == [1, 2]


def test_the_fingerprint_changes_with_ids_weights_cuts_and_sources():
    def fingerprint(*rows, **options):
        return encode_rows(rows_of(*rows, **options), RowEncoder(None)).fingerprint

    base = {"tokens": [1, 2, 3], "weights": [0, 1, 1]}
    assert fingerprint(base, base) == fingerprint(base, base)
    others = [
        fingerprint(base),
        fingerprint(base, {**base, "tokens": [1, 2, 4]}),
        fingerprint(base, {**base, "weights": [0, 1, 0.5]}),
        fingerprint({"tokens": [1, 2], "weights": [0, 1]}, {"tokens": [3, 1, 2, 3], "weights": [1, 0, 1, 1]}),
        fingerprint(base, base, weight=2.0),
    ]
    assert len({fingerprint(base, base), *others}) == 6


def test_rows_with_answers_are_kept_for_generation():
    rows = rows_of({"tokens": [1, 2], "answer": "a"}, {"tokens": [1, 2]}, {"tokens": [1], "answer": "b"})
    assert encode_rows(rows, RowEncoder(None)).rows == rows[:1]


def test_rows_of_one_set_have_the_same_side_inputs():
    rows = rows_of({"tokens": [1, 2], "logprobs": [0, -1]}, {"tokens": [1, 2]})
    text = "rows.jsonl:2: its side inputs are none, those of rows.jsonl:1 are logprobs; all rows of a set need the same"
    with pytest.raises(DataError, match=re.escape(text)):
        encode_rows(rows, RowEncoder(None))
    assert encode_rows(rows[:1], RowEncoder(None)).keys == ("target_tokens", "weights", "logprobs")


def test_sets_without_rows_or_with_a_lost_source_are_refused():
    with pytest.raises(DataError, match=r"the data set is empty: there are no rows"):
        encode_rows([], RowEncoder(None))
    with pytest.raises(DataError, match=r"a data set needs at least one Datum, got none"):
        DatumSet([])
    kept, lost = rows_of({"tokens": [1, 2]}), rows_of({"tokens": [1]}, source=1)
    with pytest.raises(
        DataError, match=re.escape("all rows of path 1 of the list were dropped (rows dropped: 1 too_short)")
    ):
        encode_rows(kept + lost, RowEncoder(None))
    with pytest.raises(ValueError, match="a row of source 0 after rows of a later one"):
        encode_rows(rows_of({"tokens": [1, 2]}, source=1) + kept, RowEncoder(None))


def test_sources_are_counted_in_pieces_with_their_weights():
    rows = rows_of({"tokens": [1, 2, 3, 4]}, weight=2.0) + rows_of({"tokens": [1, 2]}, source=1, weight=0.5)
    assert encode_rows(rows, RowEncoder(None, max_length=1, overlong="split")).sources == [(2, 2.0), (1, 0.5)]


def test_a_set_is_stored_flat():
    pieces = [Piece(np.arange(5, dtype=np.int32), np.ones(5, np.float32))] * 3
    assert sum(array.nbytes for array in (DatumSet(pieces)._ids, DatumSet(pieces)._weights)) == 3 * 5 * 8


# ------------------------------------------------------------------------------------------------------------ hold out


@given(st.lists(st.integers(0, 30), min_size=4), st.floats(0.05, 0.7), st.integers(0, 5))
def test_held_out_rows_are_disjoint_complete_and_repeatable(numbers, fraction, seed):
    rows = rows_of(*[{"text": str(number)} for number in numbers])
    distinct = len(set(numbers))
    if max(1, round(fraction * distinct)) >= distinct:
        with pytest.raises(DataError, match=f"of {distinct} distinct rows leaves nothing to train on"):
            hold_out(rows, fraction, seed)
        return
    train, held = hold_out(rows, fraction, seed)
    assert hold_out(rows, fraction, seed) == (train, held)
    assert sorted(train + held, key=rows.index) == rows
    assert [row for row in rows if row in train] == train  # reading order
    texts_of = [{row.data["text"] for row in part} for part in (train, held)]
    assert not texts_of[0] & texts_of[1]
    assert len(texts_of[1]) == max(1, round(fraction * distinct))


def test_the_seed_chooses_what_is_held_out():
    rows = rows_of(*[{"text": str(i)} for i in range(40)])
    assert len({tuple(row.where for row in hold_out(rows, 0.2, seed)[1]) for seed in range(5)}) == 5
    with pytest.raises(ValueError, match=r"fraction=1.0: accepted are numbers between 0 and 1"):
        hold_out(rows, 1.0, 0)


def test_seeds_of_any_sign_and_size_give_orders_of_their_own():
    seeds = [-1, -2, 0, 1, 2**63, 2**63 + 1, 2**64 - 3]
    assert len({tuple(shuffled(40, seed).tolist()) for seed in seeds}) == len(seeds)
    assert len({tuple(epoch_order([(40, 0.5)], seed, 1).tolist()) for seed in seeds}) == len(seeds)
    assert sorted(shuffled(40, 10**30).tolist()) == list(range(40))
    words = np.random.Philox(key=[7, 3], counter=[0, 0, 0, 0]).random_raw(40)
    assert shuffled(40, 7, epoch=3).tolist() == np.argsort(words, kind="stable").tolist()


def test_word_level_tokenizers_work_too():
    ((datum,), _) = encode({"prompt": "q", "completion": " x"}, word_level(None, ["q", "x"]))
    assert datum.loss_fn_inputs["weights"].tolist() == [1, 1]
