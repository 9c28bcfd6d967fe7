"""The order of samples is a function of (seed, step) alone; ranks and layouts only spread a step; resume is exact."""

import doctest
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datum.collate import CROSS_ENTROPY_IGNORE_IDX
from datum.dataset import DatumSet, Piece
from datum.errors import DataError
from datum.ledger import Ledger
from datum.loader import DatumLoader
from datum.order import epoch_order, epoch_size

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=20)
SEEDS = st.integers(0, 2**63)
SOURCES = st.lists(
    st.tuples(st.integers(1, 12), st.sampled_from([0.1, 0.5, 1.0, 1.5, 2.0, 3.25])), min_size=1, max_size=3
)
LAYOUTS = st.sampled_from(
    [
        {},
        {"microbatch_size": 2},
        {"microbatch_size": 3, "pad_seq_len_divisible": 4},
        {"packed": True, "max_tokens": 12},
        {"packed": True, "max_tokens": 30, "packing": "sequential", "pad_seq_len_divisible": 8},
        {"packed": True, "max_tokens": 20, "fixed_rows": True},
    ]
)
RUNS = st.fixed_dictionaries(
    {"seed": SEEDS, "global_batch_size": st.integers(1, 7)},
    optional={"epochs": st.integers(1, 3), "max_steps": st.integers(1, 12)},
)

GOLDEN = [
    [0, 2, 9, 1, 8, 5, 4, 3, 6, 7],
    [2, 5, 9, 7, 3, 0, 6, 8, 4, 1],
]  # epoch_order(10, 0, 0), epoch_order(10, 7, 3)


def dataset(lengths, sources=None):
    """Datum i starts with token i + 1, so that a sample can be recognised in a batch."""
    pieces = [Piece(np.array([i + 1] + [0] * n, np.int32), np.ones(n + 1, np.float32)) for i, n in enumerate(lengths)]
    return DatumSet(pieces, sources=sources)


def samples(batches):
    """Indices of the samples in collated batches."""
    found = []
    for batch in batches:
        first = (
            batch["position_ids"] == 0 if "position_ids" in batch else torch.arange(batch["input_ids"].shape[1]) == 0
        )
        found += [i - 1 for i in batch["input_ids"][first.expand_as(batch["input_ids"])].tolist() if i]
    return found


def all_samples(loader):
    return [loader.sample_ids(step).tolist() for step in range(loader.num_steps)]


# --------------------------------------------------------------------------------------------------------------- order


@given(st.integers(1, 50), SEEDS, st.integers(0, 5))
def test_an_epoch_is_a_permutation(count, seed, epoch):
    order = epoch_order(count, seed, epoch)
    assert sorted(order.tolist()) == list(range(count))
    assert epoch_order(count, seed, epoch).tolist() == order.tolist()
    assert epoch_order([(count, 1.0)], seed, epoch).tolist() == order.tolist()


def test_the_order_is_what_it_was():
    """Golden: a change here would reshuffle every run that is resumed. Philox4x64 raw words, stable argsort."""
    assert epoch_order(10, 0, 0).tolist() == GOLDEN[0]
    assert epoch_order(10, 7, 3).tolist() == GOLDEN[1]
    words = np.random.Philox(key=[7, 3]).random_raw(10)
    assert epoch_order(10, 7, 3).tolist() == sorted(range(10), key=lambda i: words[i])


def test_seeds_and_epochs_give_different_orders():
    orders = {tuple(epoch_order(30, seed, epoch).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


@given(SOURCES, SEEDS, st.integers(0, 9))
def test_a_source_of_weight_w_appears_w_times(sources, seed, epoch):
    order = epoch_order(sources, seed, epoch)
    assert len(order) == epoch_size(sources)
    counts, start = Counter(order.tolist()), 0
    for count, weight in sources:
        seen = [counts.pop(i, 0) for i in range(start, start + count)]
        whole, part = int(weight), round((weight % 1) * count)
        assert sum(seen) == whole * count + (max(part, 1) if whole == 0 else part)
        assert all(whole <= n <= whole + 1 for n in seen)
        start += count
    assert not counts


@given(st.integers(1, 20), SEEDS)
def test_shares_of_successive_epochs_cover_a_source_evenly(half, seed):
    seen = Counter(i for epoch in range(6) for i in epoch_order([(2 * half, 0.5)], seed, epoch).tolist())
    assert set(seen.values()) == {3}
    assert len(seen) == 2 * half


# --------------------------------------------------------------------------------------------------------------- steps


@given(LENGTHS, RUNS)
def test_steps_are_cuts_of_the_concatenated_epochs_and_only_the_last_may_be_smaller(lengths, run):
    loader = DatumLoader(dataset(lengths), **run)
    steps = all_samples(loader)
    total = sum(map(len, steps))
    epochs = [epoch_order(len(lengths), run["seed"], epoch) for epoch in range(-(-total // len(lengths)))]
    assert [i for ids in steps for i in ids] == np.concatenate(epochs)[:total].tolist()
    assert all(len(ids) == run["global_batch_size"] for ids in steps[:-1])
    if "max_steps" in run:
        assert [len(ids) for ids in steps] == [run["global_batch_size"]] * run["max_steps"]
    else:
        assert total == run.get("epochs", 1) * len(lengths)
    assert len(loader) == len(steps)


@settings(deadline=None)
@given(LENGTHS, RUNS, LAYOUTS, st.integers(1, 4))
def test_ranks_together_take_exactly_the_samples_of_the_step(lengths, run, layout, world_size):
    data = dataset(lengths)
    single = DatumLoader(data, **run)
    ranks = [DatumLoader(data, **run, **layout, rank=rank, world_size=world_size) for rank in range(world_size)]
    for step in range(min(single.num_steps, 3)):
        batches = [loader.microbatches(step) for loader in ranks]
        assert len({len(own) for own in batches}) == 1
        assert sorted(i for own in batches for i in samples(own)) == sorted(single.sample_ids(step).tolist())
        assert all(loader.sample_ids(step).tolist() == single.sample_ids(step).tolist() for loader in ranks)
        keys = {frozenset(batch.keys() - {"filler"}) for own in batches for batch in own}
        assert len(keys) == 1
        for batch in (batch for own in batches for batch in own):
            assert (batch["labels"] != CROSS_ENTROPY_IGNORE_IDX).any() == bool(samples([batch]))


@settings(deadline=None)
@given(LENGTHS, RUNS, LAYOUTS, st.integers(1, 3))
def test_positions_of_the_ledger_are_those_of_the_batches(lengths, run, layout, world_size):
    data = dataset(lengths)
    loaders = [
        DatumLoader(data, **{**run, "epochs": 1, "max_steps": None}, **layout, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    computed = 0
    for step in range(loaders[0].num_steps):
        positions = sum(batch["input_ids"].numel() for loader in loaders for batch in loader.microbatches(step))
        real = int(data.lengths[loaders[0].sample_ids(step)].sum())
        assert loaders[0].utilisation(step) == pytest.approx(real / positions, abs=1e-12)
        computed += positions
    assert loaders[-1].plan_epoch() == (computed, computed - sum(lengths))


@settings(deadline=None)
@given(SOURCES, SEEDS, LAYOUTS)
def test_the_ledger_of_a_mixture_adds_up(sources, seed, layout):
    count = sum(n for n, _ in sources)
    data = dataset([i % 7 + 1 for i in range(count)], sources)
    tokens = int(data.lengths.sum()) + count
    ledger = Ledger(count, count, Counter(), tokens, tokens - count, count, 0, 0, count)
    DatumLoader(data, seed=seed, global_batch_size=4, **layout).count_positions(ledger)
    assert (
        ledger.computed_positions == int(data.lengths[epoch_order(sources, seed, 0)].sum()) + ledger.padding_positions
    )
    if all(weight == 1 for _, weight in sources):
        assert ledger.resampled_positions == 0


# -------------------------------------------------------------------------------------------------------------- resume


def equal(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(equal, first, second))
    return first == second


@settings(deadline=None)
@given(LENGTHS, RUNS, LAYOUTS, st.integers(0, 12), st.integers(1, 3), st.data())
def test_a_resumed_run_gives_the_batches_of_an_uninterrupted_one(lengths, run, layout, stop, world_size, data):
    rank = data.draw(st.integers(0, world_size - 1))
    place = {"rank": rank, "world_size": world_size}
    uninterrupted = list(DatumLoader(dataset(lengths), **run, **layout, **place))
    first = DatumLoader(dataset(lengths), **run, **data.draw(LAYOUTS))  # one rank, in any layout
    for step, _ in first:
        if step + 1 == stop:
            break
    if stop == 0:
        first = DatumLoader(dataset(lengths), **run)
    resumed = DatumLoader(dataset(lengths), **run, **layout, **place)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert equal(list(resumed), uninterrupted[min(stop, len(uninterrupted)) :])


def test_stop_in_a_later_epoch():
    """Case G1: N = 10, 2 a step, 3 epochs, stop after step 7: steps 8 to 15 are those of the uninterrupted run."""
    run = {"seed": 3, "global_batch_size": 2, "epochs": 3}
    whole = DatumLoader(dataset([1] * 10), **run)
    expected = all_samples(whole)
    assert len(expected) == 15
    stopped = DatumLoader(dataset([1] * 10), **run)
    for step, _ in stopped:
        if step == 6:  # the 7th
            break
    resumed = DatumLoader(dataset([1] * 10), **run)
    resumed.load_state_dict(stopped.state_dict())
    assert [samples(batches) for _, batches in resumed] == [samples(whole.microbatches(step)) for step in range(7, 15)]
    assert sorted(i for ids in expected[5:10] for i in ids) == list(range(10))
    assert expected[:5] != expected[5:10] != expected[10:]


def test_two_ranks_continue_together():
    """Case G2: world 2, resumed at step 10."""
    data = dataset([1 + i % 5 for i in range(30)])
    run = {"seed": 1, "global_batch_size": 4, "max_steps": 20, "world_size": 2}
    for rank in range(2):
        whole = [samples(batches) for _, batches in DatumLoader(data, **run, rank=rank)]
        resumed = DatumLoader(data, **run, rank=rank)
        state = DatumLoader(data, **{**run, "world_size": 1}).state_dict()
        resumed.load_state_dict({**state, "step": 10, "samples": 40})
        assert [samples(batches) for _, batches in resumed] == whole[10:]


def test_a_state_is_taken_behind_the_step_in_hand():
    loader = DatumLoader(dataset([1] * 6), seed=0, global_batch_size=4)
    states = [loader.state_dict()["samples"] for _ in loader]
    assert states == [4, 6]
    assert list(loader) == []


def test_a_longer_run_continues_a_shorter_one_where_their_samples_agree():
    def loader(epochs):
        return DatumLoader(dataset([1] * 10), seed=0, global_batch_size=4, epochs=epochs)

    short = loader(1)
    states = [short.state_dict() for _ in short]
    longer = loader(2)
    longer.load_state_dict(states[1])
    assert longer.step == 2
    text = (
        "the saved data position is the end of a shorter run, whose last step had fewer samples (10 after 3 steps, "
        "this run takes 12); continue from an earlier checkpoint"
    )
    with pytest.raises(DataError, match=re.escape(text)):
        longer.load_state_dict(states[2])
    short.load_state_dict(states[2])
    assert list(short) == []


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("seed", 5, "the saved data position has seed=5, this run has 0: it must stay"),
        ("global_batch_size", 8, "the saved data position has global_batch_size=8, this run has 4: it must stay"),
        ("fingerprint", "abc", "the saved data position has fingerprint=abc, this run has"),
    ],
)
def test_a_state_of_another_run_is_refused(key, value, text):
    loader = DatumLoader(dataset([1] * 6), seed=0, global_batch_size=4)
    with pytest.raises(DataError, match=re.escape(text)):
        loader.load_state_dict({**loader.state_dict(), key: value})


def test_a_datum_above_the_budget_is_refused_before_the_first_step():
    text = "datum 1 has 9 positions, above the budget of a packed microbatch, max_tokens=8; a Datum is never cut"
    with pytest.raises(DataError, match=re.escape(text)):
        DatumLoader(dataset([3, 9]), seed=0, global_batch_size=1, packed=True, max_tokens=8)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"packed": True}, "packed: max_tokens=None and microbatch_size=None; accepted is max_tokens alone"),
        ({"packed": True, "max_tokens": 8, "microbatch_size": 2}, "packed: max_tokens=8 and microbatch_size=2"),
        ({"max_tokens": 8}, "padded: max_tokens=8, fixed_rows=False belong to packed=True"),
        ({"global_batch_size": 0}, "global_batch_size=0, epochs=1, max_steps=None: accepted are whole numbers from 1"),
        ({"rank": 2, "world_size": 2}, "rank=2 of world_size=2: ranks count from 0"),
    ],
)
def test_contradicting_options_are_refused(options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        DatumLoader(dataset([1]), **{"seed": 0, "global_batch_size": 1, **options})


def test_steps_outside_of_the_run_are_refused():
    loader = DatumLoader(dataset([1] * 4), seed=0, global_batch_size=2)
    with pytest.raises(ValueError, match="step 2: the run has the steps 0 to 1"):
        loader.sample_ids(2)


def test_the_examples_of_the_data_page_run():
    page = Path(__file__).parents[2] / "docs" / "data.md"
    result = doctest.testfile(str(page), module_relative=False)
    assert result.attempted > 10
    assert result.failed == 0
