"""The batch: both layouts against a plain-list reference, the collaters against `collate_datums`, and every refusal."""

import copy
import doctest
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datum import (
    CROSS_ENTROPY_IGNORE_IDX as IGN,
)
from datum import (
    Datum,
    collate_datums,
    default_collater,
    pack_features_for_thd,
    packed_sequence_thd_collater,
)
from datum.collate_reference import collate_datums_reference
from datum.errors import DataError, DataTypeError

IDS = st.integers(0, 2**40)
WEIGHTS = st.sampled_from([0, 1, 0.5, -1.0, 0.1, 1e-30])
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
FORMS = st.sampled_from([lambda x: x, np.array, torch.tensor])
LAYOUTS = [{"packed": False}, {"packed": True}]


@st.composite
def datum_lists(draw, *, max_datums=6):
    """Datums that share their keys: targets, weights, a per-token field, a per-sample field, or not."""
    keys = draw(st.sets(st.sampled_from(["target_tokens", "weights", "logprobs", "steps", "reward"])))
    scalar = draw(st.sampled_from([lambda x: x, lambda x: [x], lambda x: torch.tensor([[x]])]))
    datums = []
    for length in draw(st.lists(st.integers(1, 7), min_size=1, max_size=max_datums)):
        tokens = {"min_size": length, "max_size": length}
        values = {
            "target_tokens": st.lists(IDS, **tokens),
            "weights": st.lists(WEIGHTS, **tokens),
            "logprobs": st.lists(FLOATS, **tokens),
            "steps": st.lists(st.integers(-5, 5) | st.booleans(), **tokens),
            "reward": FLOATS.map(scalar),
        }
        form = draw(FORMS)
        inputs = {key: draw(values[key]) for key in sorted(keys)}
        inputs = {key: value if key == "reward" else form(value) for key, value in inputs.items()}
        datums.append(Datum(form(draw(st.lists(IDS, **tokens))), inputs))
    return datums


def assert_same(got, want):
    assert set(got) == set(want)
    for key, value in want.items():
        if isinstance(value, str):
            assert got[key] == value
            continue
        assert got[key].dtype == value.dtype, key
        assert torch.equal(got[key], value), (key, got[key], value)


def with_side_inputs(datum, ignore_index=IGN):
    """The features of `datum` with its side inputs in the same dict, as outside code may hand them over."""
    side = {key: value for key, value in datum.loss_fn_inputs.items() if key != "target_tokens"}
    return datum.to_features(ignore_index=ignore_index) | side


def as_tensors(features):
    return {key: torch.as_tensor(value) for key, value in features.items()}


# ------------------------------------------------------------------------------------------ both layouts, what is right


@settings(deadline=None, max_examples=150)
@given(datum_lists(), st.booleans(), st.none() | st.integers(1, 9), st.sampled_from([IGN, -1]))
def test_both_layouts_equal_the_plain_list_reference(datums, packed, divisible, ignore_index):
    options = {"packed": packed, "pad_seq_len_divisible": divisible, "ignore_index": ignore_index}
    before = copy.deepcopy([(d.input_ids, d.loss_fn_inputs) for d in datums])
    batch = collate_datums(datums, **options)
    assert_same(batch, collate_datums_reference(datums, **options))
    for value in batch.values():  # the batch shares no memory with the datums: editing it edits nothing else
        if isinstance(value, torch.Tensor):
            value.fill_(1)
    for datum, (ids, inputs) in zip(datums, before):
        assert torch.equal(datum.input_ids, ids)
        assert all(torch.equal(datum.loss_fn_inputs[key], value) for key, value in inputs.items())


@settings(deadline=None)
@given(datum_lists(), st.none() | st.integers(1, 9), st.booleans())
def test_the_collaters_give_what_collate_datums_gives(datums, divisible, tensors):
    for features in ([d.to_features() for d in datums], [with_side_inputs(d) for d in datums]):
        features = [as_tensors(f) for f in features] if tensors else features
        before = copy.deepcopy(features)
        padded = default_collater(features, divisible)
        packed = packed_sequence_thd_collater([pack_features_for_thd(features)])
        for got, whole in (
            (padded, collate_datums(datums, pad_seq_len_divisible=divisible)),
            (packed, collate_datums(datums, packed=True)),
        ):
            assert set(whole) - set(got) <= set(datums[0].loss_fn_inputs)
            assert_same(got, {key: whole[key] for key in got})
        assert repr(features) == repr(before)


@settings(deadline=None)
@given(st.lists(datum_lists(max_datums=3), min_size=1, max_size=3))
def test_several_packs_are_rows_of_one_batch(groups):
    keys = set(groups[0][0].loss_fn_inputs)
    groups = [group for group in groups if set(group[0].loss_fn_inputs) == keys]
    singles = [collate_datums(group, packed=True) for group in groups]
    batch = packed_sequence_thd_collater([pack_features_for_thd([with_side_inputs(d) for d in g]) for g in groups])
    width = max(single["input_ids"].shape[1] for single in singles)
    slots = max(single["seq_lens"].shape[1] for single in singles)
    assert batch["input_ids"].shape == batch["labels"].shape == batch["position_ids"].shape == (len(groups), width)
    assert batch["seq_lens"].shape == batch["seq_lens_padded"].shape == (len(groups), slots)
    assert batch["seq_lens"].dtype == batch["seq_lens_padded"].dtype == torch.int64
    for row, single in enumerate(singles):
        total, documents = single["input_ids"].shape[1], single["seq_lens"].shape[1]
        for key, pad in (("input_ids", 0), ("labels", IGN), ("position_ids", 0)):
            assert batch[key][row, :total].tolist() == single[key][0].tolist()
            assert set(batch[key][row, total:].tolist()) <= {pad}
        assert batch["seq_lens"][row, :documents].tolist() == single["seq_lens"][0].tolist()
        assert set(batch["seq_lens"][row, documents:].tolist()) <= {-1000}
        padded = batch["seq_lens_padded"][row]
        assert padded[padded != -1000].sum() == width  # the pad belongs to the row's last document
        assert padded[: documents - 1].tolist() == single["seq_lens"][0, :-1].tolist()
    if "reward" in keys and width > 1:
        rewards = [d.loss_fn_inputs["reward"].reshape(()) for group in groups for d in group]
        if batch["reward"].dim() == 1:
            assert torch.equal(batch["reward"], torch.stack(rewards).float())


def test_the_worked_example():
    datums = [
        Datum([10, 11, 12], {"target_tokens": [11, 12, 13], "weights": [1, 1, 0], "advantages": 0.5}),
        Datum([20, 21], {"target_tokens": [21, 22], "weights": [1, 1], "advantages": -1}),
    ]
    padded = collate_datums(datums)
    assert {key: value.tolist() for key, value in padded.items()} == {
        "input_ids": [[10, 11, 12], [20, 21, 0]],
        "labels": [[11, 12, IGN], [21, 22, IGN]],
        "attention_mask": [[1, 1, 1], [1, 1, 0]],
        "padding_mask": [[False, False, False], [False, False, True]],
        "weights": [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]],
        "advantages": [0.5, -1.0],
    }
    packed = collate_datums(datums, packed=True)
    assert packed.pop("qkv_format") == "thd"
    assert {key: value.tolist() for key, value in packed.items()} == {
        "input_ids": [[10, 11, 12, 20, 21]],
        "labels": [[11, 12, IGN, 21, 22]],
        "position_ids": [[0, 1, 2, 0, 1]],
        "seq_lens": [[3, 2]],
        "seq_lens_padded": [[3, 2]],
        "weights": [[1.0, 1.0, 0.0, 1.0, 1.0]],
        "advantages": [0.5, -1.0],
    }


def test_dtypes():
    datums = [Datum([1, 2], {"target_tokens": [2, 3], "weights": [True, False], "reward": 3, "gain": np.float64(0.1)})]
    for packed in (False, True):
        batch = collate_datums(datums, packed=packed)
        for key, value in batch.items():
            want = {
                "weights": torch.float32,
                "reward": torch.float32,
                "gain": torch.float32,
                "padding_mask": torch.bool,
            }
            assert isinstance(value, str) or value.dtype == want.get(key, torch.int64), key


def test_padding_comes_from_lengths_not_from_token_values():
    # case B2: pad id = eos id = 2; token 0 is a token like any other
    datums = [Datum([5, 6], {"target_tokens": [6, 2]}), Datum([1, 0, 4, 2], {"target_tokens": [0, 4, 2, 2]})]
    batch = collate_datums(datums)
    assert batch["labels"][0].tolist() == [6, 2, IGN, IGN]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch["padding_mask"].tolist() == [[False, False, True, True], [False] * 4]


@pytest.mark.parametrize(("length", "multiple", "width"), [(1234, 8, 1240), (1240, 8, 1240), (3, 1, 3), (3, 7, 7)])
@pytest.mark.parametrize("packed", [False, True])
def test_padding_to_a_multiple_pads_every_field_alike(length, multiple, width, packed):
    # case C6
    ids = list(range(1, length + 1))
    datums = [Datum(ids, {"target_tokens": ids, "weights": [1.0] * length, "logprobs": [-1.0] * length})]
    batch = collate_datums(datums, packed=packed, pad_seq_len_divisible=multiple)
    per_token = [v for k, v in batch.items() if isinstance(v, torch.Tensor) and not k.startswith("seq_lens")]
    assert {tuple(value.shape) for value in per_token} == {(1, width)}
    assert batch["labels"][0, length:].tolist() == [IGN] * (width - length)
    assert batch["weights"].sum() == length


def test_the_pad_of_a_packed_row_is_counted_in_the_last_padded_length():
    batch = collate_datums([Datum([1, 2, 3]), Datum([4, 5])], packed=True, pad_seq_len_divisible=8)
    assert batch["seq_lens"].tolist() == [[3, 2]]
    assert batch["seq_lens_padded"].tolist() == [[3, 5]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 0, 0, 0]]


def test_weights_keep_their_fractions_and_signs_and_mask_only_at_zero():
    # case A8: a weight that became an integer would mask 0.5 and lose the sign; 1e-50 is 0 as a float32
    inputs = {"target_tokens": [6, 7, 8, 9], "weights": np.array([0.5, -1.0, 1e-50, 0.0])}
    datums = [Datum([5, 6, 7, 8], inputs)]
    for batch in (collate_datums(datums), collate_datums(datums, packed=True)):
        assert batch["weights"].tolist() == [[0.5, -1.0, 0.0, 0.0]]
        assert batch["labels"].tolist() == [[6, 7, IGN, IGN]]
    assert datums[0].to_features()["labels"] == [6, 7, IGN, IGN]
    lists = [{"input_ids": [5, 6], "labels": [6, 7], "weights": [0.5, 0]}]
    for batch in (default_collater(lists), packed_sequence_thd_collater([pack_features_for_thd(lists)])):
        assert batch["weights"].tolist() == [[0.5, 0.0]]
        assert batch["labels"].tolist() == [[6, IGN]]


def test_without_targets_padded_has_no_labels_and_packed_has_ignored_ones():
    datums = [Datum([1, 2]), Datum([3])]
    assert "labels" not in collate_datums(datums)
    assert collate_datums(datums, packed=True, ignore_index=-7)["labels"].tolist() == [[-7, -7, -7]]


@pytest.mark.parametrize("scalar", [0.5, [0.5], torch.tensor([[0.5]])])
def test_shape_is_decided_per_key_for_the_whole_batch(scalar):
    one_token = [Datum([1], {"advantages": scalar}), Datum([2], {"advantages": scalar})]
    assert collate_datums(one_token)["advantages"].tolist() == [[0.5], [0.5]]
    assert collate_datums(one_token, packed=True)["advantages"].tolist() == [[0.5, 0.5]]
    mixed = [Datum([1], {"advantages": scalar}), Datum([2, 3], {"advantages": scalar})]
    for layout in LAYOUTS:
        assert collate_datums(mixed, **layout)["advantages"].tolist() == [0.5, 0.5]
    per_token = [Datum([1], {"advantages": scalar}), Datum([2, 3], {"advantages": [1.0, 2.0]})]
    assert collate_datums(per_token)["advantages"].tolist() == [[0.5, 0.0], [1.0, 2.0]]


def test_replaced_fields_of_any_accepted_form_are_collated():
    datum = Datum([1, 2], {"target_tokens": [2, 3], "weights": [1, 1]})
    datum.input_ids = np.array([7, 8], dtype=np.int32)
    datum.loss_fn_inputs["target_tokens"] = [8, 9]
    datum.loss_fn_inputs["weights"] = torch.tensor([0.0, 0.5], dtype=torch.bfloat16, requires_grad=True)
    batch = collate_datums([datum])
    assert batch["input_ids"].tolist() == [[7, 8]]
    assert batch["labels"].tolist() == [[IGN, 9]]
    assert batch["weights"].tolist() == [[0.0, 0.5]]
    assert not batch["weights"].requires_grad
    assert isinstance(datum.loss_fn_inputs["weights"], torch.Tensor)


@pytest.mark.parametrize("length", [2, 40_000])
def test_a_replaced_field_with_a_gradient_leaves_it_behind(length):
    datums = [Datum(torch.arange(length), {"logprobs": torch.zeros(length)}) for _ in range(2)]
    datums[1].loss_fn_inputs["logprobs"] = torch.full((length,), -1.0, requires_grad=True)
    got = collate_datums(datums, packed=True)["logprobs"]
    assert not got.requires_grad
    assert got.tolist() == [[0.0] * length + [-1.0] * length]
    assert datums[1].loss_fn_inputs["logprobs"].requires_grad


def test_many_long_datums_are_joined_in_order():
    # longer than the pieces in which tensors are joined
    lengths = [40_000, 3, 30_000, 2_000, 1, 33_000]
    ids = torch.arange(sum(lengths)).split(lengths)
    datums = [Datum(i, {"target_tokens": i + 1, "weights": torch.ones(len(i))}) for i in ids]
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            batch = collate_datums(datums, packed=True)
            assert torch.equal(batch["input_ids"][0], torch.arange(sum(lengths)))
            assert torch.equal(batch["labels"][0], torch.arange(sum(lengths)) + 1)
    finally:
        torch.set_num_threads(threads)


# ------------------------------------------------------------------------------------------------------------- refusals

GOOD = {"target_tokens": [2, 3], "weights": [1.0, 1.0], "advantages": [0.5, 0.5]}
BAD_FIELDS = [
    ("weights", [1.0], DataError, "weights has length 1, input_ids has 2, while datum 0 gives one entry per token"),
    ("weights", [1.0, 1.0, 1.0], DataError, "weights has length 3, input_ids has 2; a per-token field needs one entry"),
    (
        "target_tokens",
        [2, 3, 4],
        DataError,
        "target_tokens has length 3, input_ids has 2; target_tokens needs one entry",
    ),
    (
        "advantages",
        [1.0, 2.0, 3.0],
        DataError,
        "advantages has length 3, input_ids has 2; a per-token field needs one entry per token, "
        "a per-sample value must be a scalar",
    ),
    (
        "advantages",
        [],
        DataError,
        "advantages has length 0, input_ids has 2; a per-token field needs one entry per token",
    ),
    ("advantages", 0.5, DataError, "advantages has length 1, input_ids has 2, while datum 0 gives one entry per token"),
    ("advantages", [[1.0, 2.0]], DataError, "advantages has shape [1, 2]; a per-token field is 1-D with one entry"),
    ("advantages", [[1.0], [2.0]], DataError, "advantages has shape [2, 1]; a per-token field is 1-D with one entry"),
    ("weights", [1.0, float("nan")], DataError, "weights[1] is nan in float32; every entry must be a finite number"),
    ("advantages", [float("-inf"), 0.0], DataError, "advantages[0] is -inf in float32; every entry must be a finite"),
    ("weights", np.array([1.0, 1e300]), DataError, "weights[1] is inf in float32; every entry must be a finite number"),
    (
        "target_tokens",
        [2, -100],
        DataError,
        "target_tokens[1] is -100; a token id is 0 or larger (mask a target by weight",
    ),
    ("target_tokens", [2.0, 3.0], DataTypeError, "target_tokens has dtype float32; token ids are integers"),
    ("target_tokens", [[2, 3]], DataError, "target_tokens has shape [1, 2]; it must be 1-D [T]"),
    ("input_ids", [1, -1], DataError, "input_ids[1] is -1; a token id is 0 or larger"),
    ("input_ids", [1.0, 2.0], DataTypeError, "input_ids has dtype float32; token ids are integers"),
    ("input_ids", torch.tensor([True, False]), DataTypeError, "input_ids has dtype bool; token ids are integers"),
    ("input_ids", [[1, 2]], DataError, "input_ids has shape [1, 2]; it must be 1-D [T]"),
    ("input_ids", [], DataError, "input_ids is empty; a sequence needs at least one token"),
    ("weights", None, DataTypeError, "weights is NoneType; accepted are numbers"),
    ("weights", ["a", "b"], DataTypeError, "weights is list; accepted are numbers"),
    (
        "advantages",
        torch.zeros(2, dtype=torch.complex64),
        DataTypeError,
        "advantages has dtype complex64; accepted are real",
    ),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("key", "value", "error", "text"), BAD_FIELDS)
def test_a_field_replaced_by_a_bad_one_is_refused_with_its_datum_and_key(key, value, error, text, layout):
    datums = [Datum([1, 2], GOOD | ({"logprobs": [0.0, 0.0]} if key == "logprobs" else {})) for _ in range(4)]
    if key == "input_ids":
        datums[2].input_ids = value
    else:
        datums[2].loss_fn_inputs[key] = value
    with pytest.raises(error, match="^" + re.escape("datum 2: " + text)):
        collate_datums(datums, **layout)


@pytest.mark.parametrize(("key", "value", "error", "text"), BAD_FIELDS)
@pytest.mark.parametrize("collater", [default_collater, pack_features_for_thd])
def test_a_bad_feature_is_refused_with_its_number_and_key(key, value, error, text, collater):
    key, text = (part.replace("target_tokens", "labels") for part in (key, text))
    features = [{"input_ids": [1, 2], "labels": [2, 3], "weights": [1.0, 1], "advantages": [0.5, 1]} for _ in range(4)]
    if key == "logprobs":
        features = [f | {"logprobs": [0.0, 0.0]} for f in features]
    features[2][key] = value
    if key == "labels" and value == [2, -100]:  # the ignore index is a label; no other negative number is
        assert collater(features)
        features[2][key], text = (
            [2, -5],
            "labels[1] is -5; a label is a token id (0 or larger) or the ignore index -100",
        )
    text = text.replace("while datum 0", "while feature 0")
    with pytest.raises(error, match="^" + re.escape("feature 2: " + text)):
        collater(features)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_datum_of_a_batch_carries_the_same_keys(layout):
    datums = [Datum([1, 2], GOOD), Datum([1, 2], {key: GOOD[key] for key in ("target_tokens", "advantages")})]
    text = "datum 1: loss_fn_inputs lacks ['weights'] of datum 0; every Datum of a batch must carry the same loss_fn_in"
    with pytest.raises(DataError, match=re.escape(text)):
        collate_datums(datums, **layout)
    with pytest.raises(DataError, match=re.escape("datum 1: loss_fn_inputs adds ['weights'] to datum 0's")):
        collate_datums(datums[::-1], **layout)


@pytest.mark.parametrize("key", ["input_ids", "labels", "attention_mask", "position_ids", "seq_lens", "qkv_format"])
def test_side_inputs_cannot_take_the_name_of_a_batch_key(key):
    with pytest.raises(DataError, match=f"datum 0: loss_fn_inputs has the key {key!r}, which the batch itself uses"):
        collate_datums([Datum([1, 2], {key: [1, 2]})])


def test_what_is_no_datum_is_refused():
    with pytest.raises(DataTypeError, match="datum 1 is dict; collate_datums takes Datums"):
        collate_datums([Datum([1]), {"input_ids": [1]}])
    datum = Datum([1])
    datum.loss_fn_inputs = [1.0]
    with pytest.raises(DataTypeError, match="datum 0: loss_fn_inputs is list; accepted is a mapping"):
        collate_datums([datum])


def test_an_empty_batch_is_refused():
    for collate in (collate_datums, default_collater, pack_features_for_thd, packed_sequence_thd_collater):
        with pytest.raises(DataError, match=f"{collate.__name__} needs at least one"):
            collate([])


@pytest.mark.parametrize("value", [0, -8, 2.0, True, "8"])
def test_a_multiple_that_is_no_positive_integer_is_refused(value):
    text = re.escape(f"pad_seq_len_divisible is {value!r}; accepted is a positive integer, or None for no rounding up")
    with pytest.raises(ValueError, match=text):
        collate_datums([Datum([1])], pad_seq_len_divisible=value)
    with pytest.raises(ValueError, match=text):
        default_collater([{"input_ids": [1]}], value)


@pytest.mark.parametrize("value", [0, 5, -1.0, None])
def test_an_ignore_index_that_could_be_a_token_is_refused(value):
    text = re.escape(f"ignore_index is {value!r}; accepted is a negative integer")
    for call in (
        lambda: collate_datums([Datum([1])], ignore_index=value),
        lambda: Datum([1]).to_features(ignore_index=value),
        lambda: pack_features_for_thd([{"input_ids": [1]}], value),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def test_feature_dicts_hold_whole_unpadded_sequences():
    for collater in (default_collater, pack_features_for_thd):
        with pytest.raises(
            DataError,
            match=r"feature 1: attention_mask\[1\] is 0; a feature is unpadded, one attention_mask entry of 1",
        ):
            collater([{"input_ids": [1], "attention_mask": [1]}, {"input_ids": [1, 2], "attention_mask": [1, 0]}])
        with pytest.raises(DataError, match="feature 0: attention_mask has length 1, input_ids has 2"):
            collater([{"input_ids": [1, 2], "attention_mask": [1]}])
        with pytest.raises(DataError, match="feature 0 has no input_ids"):
            collater([{"labels": [1]}])
        with pytest.raises(DataError, match="feature 0 has the key 'position_ids'"):
            collater([{"input_ids": [1], "position_ids": [0]}])
        with pytest.raises(DataError, match=r"feature 1 lacks \['weights'\] of feature 0"):
            collater([{"input_ids": [1], "weights": [1]}, {"input_ids": [1]}])
        with pytest.raises(DataTypeError, match="feature 0 is list; accepted is a mapping"):
            collater([[1, 2]])


def test_labels_may_be_missing_from_some_features_of_a_pack_only():
    features = [{"input_ids": [1, 2]}, {"input_ids": [3], "labels": [4]}]
    assert pack_features_for_thd(features, ignore_index=-3)["labels"] == [-3, -3, 4]
    with pytest.raises(DataError, match=r"feature 1 adds \['labels'\] to feature 0's"):
        default_collater(features)


def test_a_pack_has_the_form_of_its_features():
    features = [{"input_ids": [1, 2], "labels": [2, 3], "reward": 1}, {"input_ids": [3], "labels": [4], "reward": 2}]
    lists = {
        "input_ids": [1, 2, 3],
        "labels": [2, 3, 4],
        "position_ids": [0, 1, 0],
        "seq_lens": [2, 1],
        "seq_lens_padded": [2, 1],
        "reward": [1.0, 2.0],
    }
    assert pack_features_for_thd(features) == lists
    tensors = pack_features_for_thd([as_tensors(f) for f in features])
    assert {key: value.tolist() for key, value in tensors.items()} == lists
    assert {value.dtype for key, value in tensors.items() if key != "reward"} == {torch.int64}


def test_a_feature_without_lengths_is_a_pack_of_one_document():
    batch = packed_sequence_thd_collater([{"input_ids": [1, 2], "labels": [2, 3], "attention_mask": [1, 1]}])
    assert_same(batch, collate_datums([Datum([1, 2], {"target_tokens": [2, 3]})], packed=True))


def test_a_pack_with_gaps_between_documents_is_kept_as_it_is():
    pack = {
        "input_ids": [1, 2, 3, 99, 4, 5],
        "labels": [2, 3, IGN, IGN, 5, IGN],
        "position_ids": [0, 1, 2, 0, 0, 1],
        "seq_lens": [3, 2],
        "seq_lens_padded": [4, 2],
    }
    batch = packed_sequence_thd_collater([pack])
    assert {key: batch[key][0].tolist() for key in pack} == pack
    masked = packed_sequence_thd_collater([pack | {"weights": [1, 0, 0, 0, 1, 0]}])
    assert masked["labels"].tolist() == [[2, IGN, IGN, IGN, 5, IGN]]  # as a weight of 0 does everywhere


BAD_PACKS = [
    ({"seq_lens_padded": [2, 2]}, "seq_lens_padded sums to 4, input_ids has 3; the padded lengths cover the whole row"),
    (
        {"seq_lens": [3, 1]},
        "seq_lens[0] is 3, seq_lens_padded[0] is 2; a document is 1 to its padded length tokens long",
    ),
    ({"seq_lens": [2, 0]}, "seq_lens[1] is 0, seq_lens_padded[1] is 1; a document is 1 to its padded length tokens"),
    ({"seq_lens": [2]}, "seq_lens has length 1, seq_lens_padded has 2"),
    ({"position_ids": [0, 1]}, "position_ids has length 2, input_ids has 3"),
    ({"position_ids": [0, 1, -1]}, "position_ids[2] is -1; it must be 0 or larger"),
    (
        {"position_ids": [0.0, 1.0, 0.0]},
        "position_ids has dtype float32; token ids are integers, and so are labels, positions and",
    ),
    ({"labels": [2]}, "labels has length 1, input_ids has 3"),
    ({"logprobs": [1.0]}, "logprobs has length 1; accepted are 3 entries, one per token, or 2, one per document"),
    ({"qkv_format": "thd"}, "has the key 'qkv_format', which the batch itself uses"),
    ({"seq_lens_padded": None}, "has no seq_lens_padded"),
    (
        {"attention_mask": [1, 1, 0]},
        "attention_mask[2] is 0; a pack is unpadded, one attention_mask entry of 1 per token",
    ),
]


@pytest.mark.parametrize(("change", "text"), BAD_PACKS)
def test_a_malformed_pack_is_refused_with_its_number_and_key(change, text):
    good = pack_features_for_thd([{"input_ids": [1, 2], "labels": [2, 3]}, {"input_ids": [3], "labels": [4]}])
    bad = {key: value for key, value in (good | change).items() if value is not None}
    packs = [good | {key: [0.0, 0.0, 0.0] for key in change if key == "logprobs"}, bad]
    if "qkv_format" in change or "attention_mask" in change:
        packs = packs[1:]
    number = len(packs) - 1
    with pytest.raises(DataError, match="^" + re.escape(f"pack {number}") + ":? " + re.escape(text)):
        packed_sequence_thd_collater(packs)


def test_packs_of_unequal_length_need_the_default_ignore_index():
    packs = [pack_features_for_thd([{"input_ids": ids}], ignore_index=-1) for ids in ([1, 2], [3])]
    assert packed_sequence_thd_collater(packs[:1])["labels"].tolist() == [[-1, -1]]
    masked = pack_features_for_thd([{"input_ids": [1, 2], "labels": [2, 3], "weights": [0, 1]}], ignore_index=-1)
    assert packed_sequence_thd_collater([masked])["labels"].tolist() == [[-1, 3]]
    with pytest.raises(
        DataError, match=r"pack 0: labels\[0\] is -1; packs of unequal length are filled up with label -100"
    ):
        packed_sequence_thd_collater(packs)


def test_the_examples_of_the_batch_page_run():
    page = Path(__file__).parents[2] / "docs" / "batch.md"
    result = doctest.testfile(str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 10
    assert result.failed == 0


@pytest.mark.parametrize("packed", [False, True])
def test_one_weight_for_a_sequence_is_per_sample_and_masks_all_its_targets(packed: bool) -> None:
    datums = [
        Datum([1, 2, 3], {"target_tokens": [2, 3, 4], "weights": 0.0}),
        Datum([5, 6], {"target_tokens": [6, 7], "weights": 0.5}),
    ]
    batch = collate_datums(datums, packed=packed)
    assert batch["weights"].tolist() == [0.0, 0.5]
    assert batch["labels"][batch["labels"] != -100].tolist() == [6, 7]
    assert_same(batch, collate_datums_reference(datums, packed=packed))
