"""Bin packing and the microbatch plan: everything once, inside the budget, the same number for every rank."""

import bisect
import math
import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datum import CROSS_ENTROPY_IGNORE_IDX, Datum, collate_datums
from datum.errors import DataError
from datum.packing import make_filler, pack_best_fit, pack_sequential, plan_microbatches

BUDGET = 12
LENGTHS = st.lists(st.integers(1, BUDGET), max_size=30)
PACKERS = [pack_sequential, pack_best_fit]
WORLDS = st.integers(1, 5)


def flat(nested):
    return [item for part in nested for item in part]


def tokens(rows, lengths):
    return [sum(lengths[i] for i in row) for row in rows]


def best_fit_row_count(lengths, budget):
    """Best-fit-decreasing by searching a sorted list of the space left in every row."""
    spaces = []
    for length in sorted(lengths, reverse=True):
        place = bisect.bisect_left(spaces, length)
        space = spaces.pop(place) if place < len(spaces) else budget
        bisect.insort(spaces, space - length)
    return len(spaces)


# ---------------------------------------------------------------------------------------------------------- bin packing


@pytest.mark.parametrize("pack", PACKERS)
@given(LENGTHS)
def test_every_sequence_is_in_one_row_and_every_row_in_the_budget(pack, lengths):
    rows = pack(lengths, BUDGET)
    assert sorted(flat(rows)) == list(range(len(lengths)))
    assert all(0 < total <= BUDGET for total in tokens(rows, lengths))
    assert rows == pack(list(lengths), BUDGET)
    assert rows == sorted(sorted(row) for row in rows)  # the order of the input, in and between rows


@given(LENGTHS)
def test_sequential_rows_keep_the_order_and_close_only_when_full(lengths):
    rows = pack_sequential(lengths, BUDGET)
    assert flat(rows) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) + lengths[after[0]] > BUDGET for row, after in pairwise(rows))


@given(LENGTHS)
def test_best_fit_opens_a_row_only_when_no_row_has_the_space(lengths):
    rows = pack_best_fit(lengths, BUDGET)
    assert len(rows) == best_fit_row_count(lengths, BUDGET)
    assert len(rows) <= 1.25 * -(-sum(lengths) // BUDGET) + 1


def test_best_fit_of_many_sequences_is_tight():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 700, (2000,), generator=generator).tolist()
    rows = pack_best_fit(torch.tensor(lengths).numpy(), 1000)
    assert len(rows) == best_fit_row_count(lengths, 1000) < len(pack_sequential(lengths, 1000))
    assert sum(lengths) / (1000 * len(rows)) > 0.995


def test_best_fit_fills_rows_that_sequential_leaves_half_empty():
    assert pack_sequential([3, 3, 2, 2], 5) == [[0], [1, 2], [3]]
    assert pack_best_fit([3, 3, 2, 2], 5) == [[0, 3], [1, 2]]


@pytest.mark.parametrize("pack", PACKERS)
def test_packing_refuses_what_cannot_fit(pack):
    text = "lengths[1] is 5, but a packed row holds max_tokens=4; raise the budget, or shorten or split the sequence"
    with pytest.raises(DataError, match=re.escape(text)):
        pack([4, 5], 4)
    with pytest.raises(DataError, match=re.escape("lengths[0] is 0; a sequence has at least one token")):
        pack([0], 4)
    with pytest.raises(ValueError, match="max_tokens is 0; accepted is a positive integer"):
        pack([1], 0)
    assert pack([], 4) == []


# ------------------------------------------------------------------------------------------------------------- the plan


def assert_plan_is_whole(plan, lengths, world_size):
    assert len(plan) == world_size
    assert len({len(rank) for rank in plan}) == 1  # every rank runs the same number of microbatches
    assert sorted(flat(flat(plan))) == list(range(len(lengths)))
    for rank in plan:  # fillers come last, and no rank is made of more of them than needed
        assert [bool(microbatch) for microbatch in rank] == sorted((bool(m) for m in rank), reverse=True)


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), WORLDS, st.none() | st.integers(1, 7))
def test_a_padded_plan_is_whole_and_bounded(lengths, world_size, size):
    plan = plan_microbatches(lengths, world_size=world_size, microbatch_size=size)
    assert_plan_is_whole(plan, lengths, world_size)
    count = len(plan[0])
    if size is None:
        assert count == 1
    else:
        assert max(map(len, flat(plan))) <= size
        assert count == math.ceil(math.ceil(len(lengths) / size) / world_size)  # as few as the size allows
    if len(lengths) >= world_size:
        assert all(rank[0] for rank in plan)  # nobody idles through the whole step
    # microbatches are neighbours in length order: none holds a length strictly between two of another
    spans = sorted((min(lengths[i] for i in m), max(lengths[i] for i in m)) for m in flat(plan) if m)
    assert all(left[1] <= right[0] for left, right in pairwise(spans))
    assert plan == plan_microbatches(lengths, world_size=world_size, microbatch_size=size)


@settings(deadline=None)
@given(LENGTHS.filter(bool), WORLDS, st.sampled_from(["best_fit", "sequential"]))
def test_a_packed_plan_is_whole_bounded_and_busy(lengths, world_size, packing):
    plan = plan_microbatches(lengths, world_size=world_size, max_tokens=BUDGET, packing=packing)
    assert_plan_is_whole(plan, lengths, world_size)
    rows = [row for row in flat(plan) if row]
    assert all(total <= BUDGET for total in tokens(rows, lengths))
    pack = {"best_fit": pack_best_fit, "sequential": pack_sequential}[packing]
    fewest = len(pack(lengths, BUDGET))
    assert len(plan[0]) == -(-fewest // world_size)  # balancing never adds a forward
    assert len(rows) == min(len(lengths), len(plan[0]) * world_size)  # a row is split rather than a rank left idle
    if packing == "sequential":
        assert all(row == list(range(row[0], row[-1] + 1)) for row in rows)


@settings(deadline=None)
@given(LENGTHS.filter(bool), st.sampled_from(["best_fit", "sequential"]))
def test_fixed_rows_do_not_depend_on_the_number_of_ranks(lengths, packing):
    plans = {
        world: plan_microbatches(lengths, world_size=world, max_tokens=BUDGET, packing=packing, fixed_rows=True)
        for world in (1, 2, 3, 8)
    }
    for world, plan in plans.items():
        assert_plan_is_whole(plan, lengths, world)
        assert sorted(row for row in flat(plan) if row) == sorted(plans[1][0])


def test_ranks_get_equal_work():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 1000, (64,), generator=generator).tolist()
    for options in ({"max_tokens": 4096}, {"microbatch_size": 4}, {"microbatch_size": None}):
        plan = plan_microbatches(lengths, world_size=4, **options)
        if "max_tokens" in options:
            work = [sum(tokens(rank, lengths)) for rank in plan]
        else:
            work = [sum(len(m) * max(lengths[i] for i in m) for m in rank if m) for rank in plan]
        assert max(work) <= 1.1 * sum(work) / len(work), (options, work)


def test_two_ranks_share_what_one_row_could_hold():
    # one row of 4096 would leave rank 1 idle; the budget bounds a row, it does not ask to fill it
    plan = plan_microbatches([1000, 1000, 600, 400], world_size=2, max_tokens=4096)
    assert [sum(tokens(rank, [1000, 1000, 600, 400])) for rank in plan] in ([1600, 1400], [1400, 1600])


def test_rows_that_only_best_fit_can_fill_are_kept():
    # spread evenly, 6+4+4 would overflow a row of 12
    plan = plan_microbatches([6, 6, 4, 4, 4], world_size=2, max_tokens=12)
    assert sorted(flat(plan)) == [[0, 1], [2, 3, 4]]


def test_a_rank_without_sequences_gets_fillers():
    assert plan_microbatches([5], world_size=3, max_tokens=8) == [[[0]], [[]], [[]]]
    assert plan_microbatches([5], world_size=3, microbatch_size=2) == [[[0]], [[]], [[]]]


def test_accumulation_splits_of_case_d2():
    counts = {size: plan_microbatches([3] * 8, microbatch_size=size) for size in (8, 4, 1)}
    assert {size: list(map(len, plan[0])) for size, plan in counts.items()} == {8: [8], 4: [4, 4], 1: [1] * 8}


def test_a_plan_refuses_what_it_cannot_do():
    for options, text in (
        (
            {"microbatch_size": 2, "max_tokens": 8},
            "microbatch_size=2 with max_tokens=8: a padded microbatch is sized by",
        ),
        ({"microbatch_size": 0}, "microbatch_size is 0; accepted is a positive integer"),
        ({"world_size": 0}, "world_size is 0; accepted is a positive integer"),
        ({"max_tokens": 8, "packing": "first_fit"}, "packing is 'first_fit'; accepted are 'best_fit' and 'sequential'"),
        ({"fixed_rows": True}, "fixed_rows=True without max_tokens: only packed rows can be fixed"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            plan_microbatches([1, 2], **options)
    with pytest.raises(DataError, match="a step needs at least one sequence"):
        plan_microbatches([], microbatch_size=1)
    with pytest.raises(DataError, match=re.escape("lengths[1] is 9, but a packed row holds max_tokens=8")):
        plan_microbatches([1, 9], max_tokens=8)
    with pytest.raises(DataError, match=re.escape("lengths[1] is 0; a sequence has at least one token")):
        plan_microbatches([1, 0], microbatch_size=1)


# ----------------------------------------------------------------------------------------------------------- the filler


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "inputs", [{}, {"target_tokens": [2]}, {"target_tokens": [2], "weights": [1], "advantages": 1}]
)
def test_a_filler_has_the_keys_and_dtypes_of_a_batch_and_trains_nothing(packed, inputs):
    batch = collate_datums([Datum([1], inputs)], packed=packed)
    for keys in (batch, inputs):
        filler = make_filler(keys, packed=packed)
        assert filler.pop("filler") is True
        assert set(filler) == set(batch)
        for key, value in batch.items():
            assert filler[key] == value if key == "qkv_format" else filler[key].dtype == value.dtype
            assert key == "qkv_format" or filler[key].shape == (1, 1)
        assert filler["input_ids"].tolist() == [[0]]
        if "labels" in batch:
            assert filler["labels"].tolist() == [[CROSS_ENTROPY_IGNORE_IDX]]
        assert not any(filler[key].any() for key in inputs if key != "target_tokens")
    if not packed:
        assert filler["attention_mask"].tolist() == [[1]]  # a real position: attention over nothing would be nan
