"""The ledger's equations, its storage and its table."""

import json
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datum.encode import RowEncoder, encode_rows
from datum.ledger import Ledger
from datum.loader import DatumLoader
from datum.rows import Row

COUNT = st.integers(0, 50)
REASONS = st.dictionaries(st.sampled_from(["no_target", "too_short", "overlong"]), st.integers(1, 9)).map(Counter)


@st.composite
def ledgers(draw):
    dropped, kept = draw(REASONS), draw(COUNT)
    parts = [draw(COUNT) for _ in range(4)]
    ledger = Ledger(
        rows_in=kept + dropped.total(),
        rows_kept=kept,
        rows_dropped=dropped,
        source_tokens=sum(parts),
        trained_tokens=parts[0],
        masked_tokens=parts[1],
        truncated_tokens=parts[2],
        dropped_tokens=parts[3],
        kept_pieces=kept,
        pieces_dropped=draw(REASONS),
    )
    if draw(st.booleans()):
        ledger.padding_positions, ledger.resampled_positions = draw(COUNT), draw(st.integers(-20, 20))
        ledger.computed_positions = parts[0] + parts[1] - kept + ledger.padding_positions + ledger.resampled_positions
    return ledger


def test_worked_example():
    """[1,2,3],[4,5] in one row of 4: 5 = 3 + 2; 4 = 3 + 2 - 2 + 1."""
    encoder = RowEncoder(None)
    datums = encode_rows([Row({"tokens": [1, 2, 3]}, "a:1"), Row({"tokens": [4, 5]}, "a:2")], encoder)
    loader = DatumLoader(datums, seed=0, global_batch_size=2, packed=True, max_tokens=4, pad_seq_len_divisible=4)
    loader.count_positions(encoder.ledger)
    assert encoder.ledger.render().splitlines() == [
        "rows in                          2 = 2 kept + 0 dropped",
        "source tokens                    5 = 3 trained + 2 masked + 0 truncated + 0 dropped",
        "computed positions               4 = 3 trained + 2 masked - 2 kept pieces + 1 padding",
    ]


@given(ledgers())
def test_ledgers_that_add_up_pass_and_survive_json(ledger):
    ledger.check()
    assert Ledger.from_dict(json.loads(json.dumps(ledger.as_dict()))) == ledger


@given(ledgers(), ledgers())
def test_two_passes_add_up_together(first, second):
    both = first.merge(second)
    both.check()
    assert both.rows_in == first.rows_in + second.rows_in
    assert both.rows_dropped == first.rows_dropped + second.rows_dropped
    assert (both.computed_positions is None) == (None in (first.computed_positions, second.computed_positions))


@given(ledgers(), st.sampled_from(["rows_in", "rows_kept", "trained_tokens", "masked_tokens", "truncated_tokens"]))
def test_a_lost_row_or_token_is_found(ledger, name):
    setattr(ledger, name, getattr(ledger, name) + 1)
    with pytest.raises(RuntimeError, match=r"the data ledger does not add up: (rows in|source tokens) "):
        ledger.check()


def test_a_lost_position_is_found_with_both_numbers():
    ledger = Ledger(1, 1, Counter(), 3, 2, 1, 0, 0, 1, computed_positions=3, padding_positions=0)
    text = "computed positions 3 is not trained + masked - kept pieces + resampled + padding 2"
    with pytest.raises(RuntimeError, match=re.escape(text)):
        ledger.check()


def test_the_table_names_reasons_and_notes():
    table = Ledger(
        rows_in=1_234_567,
        rows_dropped=Counter(no_target=2),
        pieces_dropped=Counter(too_short=3),
        computed_positions=1,
        padding_positions=0,
        resampled_positions=-4,
        notes=Counter({"eos appended": 5}),
    ).render()
    assert "rows in                  1,234,567 = 0 kept + 2 dropped" in table
    assert "0 trained + 0 masked + 0 kept pieces - 4 resampled + 0 padding" in table
    assert "rows dropped                     2   no_target" in table
    assert "pieces dropped                   3   too_short" in table
    assert "rows noted                       5   eos appended" in table
