"""Datum: what it accepts, what it stores, what it refuses at construction, and its plain-list features."""

import pickle
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

import datum as datum_package
from datum import CROSS_ENTROPY_IGNORE_IDX, Datum
from datum.errors import DataError, DataTypeError


@pytest.mark.parametrize(
    "ids",
    [
        [3, 1, 2],
        (3, 1, 2),
        range(3, 0, -1),
        np.array([3, 1, 2], dtype=np.int32),
        np.array([2, 1, 3])[::-1],
        torch.tensor([3, 1, 2], dtype=torch.uint8),
        torch.tensor([3, 1, 2]),
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_ids_are_stored_as_an_int64_tensor(ids):
    datum = Datum(ids, {"target_tokens": ids})
    for stored in (datum.input_ids, datum.loss_fn_inputs["target_tokens"]):
        assert stored.dtype == torch.int64
        assert stored.tolist() == list(ids)
    assert len(datum) == datum.seq_len == 3


def test_side_inputs_become_tensors_of_the_values_given():
    datum = Datum(
        [1, 2],
        {
            "weights": [0.5, -1],
            "logprobs": np.array([-0.1, -0.2]),
            "flags": [True, False],
            "advantages": 0.25,
            "reward": np.float32(1.5),
            "rank": torch.tensor(7),
        },
    )
    assert all(isinstance(value, torch.Tensor) for value in datum.loss_fn_inputs.values())
    assert datum.loss_fn_inputs["weights"].tolist() == [0.5, -1.0]
    assert datum.loss_fn_inputs["advantages"].item() == 0.25
    assert datum.loss_fn_inputs["reward"].item() == 1.5


def test_the_callers_mapping_and_arrays_are_left_alone():
    frozen = np.array([1.0, 0.0])
    frozen.setflags(write=False)
    given = {"weights": frozen, "advantages": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns about arrays it may not write to
        datum = Datum([1, 2], given)
    assert given["weights"] is frozen
    assert given["advantages"] == 1
    datum.loss_fn_inputs["extra"] = torch.zeros(2)
    assert "extra" not in given
    assert Datum([1]).loss_fn_inputs is not Datum([1]).loss_fn_inputs


def test_a_gradient_does_not_ride_along():
    logprobs = torch.zeros(2, requires_grad=True)
    assert not Datum([1, 2], {"logprobs": logprobs * 1}).loss_fn_inputs["logprobs"].requires_grad


def test_an_empty_datum_can_be_made_and_counted():
    assert len(Datum([], {"target_tokens": []})) == 0


def test_fields_may_be_replaced_and_datums_travel_between_processes():
    datum = Datum([1, 2], {"weights": [1, 0]})
    datum.input_ids = torch.tensor([4, 5, 6])
    assert len(datum) == 3
    assert pickle.loads(pickle.dumps(datum)).input_ids.tolist() == [4, 5, 6]


@pytest.mark.parametrize(
    ("ids", "error", "text"),
    [
        ([1.0, 2.0], DataTypeError, "input_ids has dtype float32; token ids are integers"),
        (torch.tensor([]), DataTypeError, "input_ids has dtype float32; token ids are integers"),
        (np.array([1.5]), DataTypeError, "input_ids has dtype float64; token ids are integers"),
        ([True, False], DataTypeError, "input_ids has dtype bool; token ids are integers"),
        ([[1, 2], [3, 4]], DataError, "input_ids has shape [2, 2]; it must be 1-D [T]"),
        (torch.zeros(2, 3, dtype=torch.long), DataError, "input_ids has shape [2, 3]; it must be 1-D [T]"),
        (5, DataError, "input_ids has shape []; it must be 1-D [T]"),
        (None, DataTypeError, "input_ids is NoneType; accepted are numbers"),
        ("12", DataTypeError, "input_ids is str; accepted are numbers"),
        ([[1], [2, 3]], DataTypeError, "input_ids is list; accepted are numbers"),
        ([2**70], DataTypeError, "input_ids is list; accepted are numbers"),
    ],
)
def test_wrong_ids_are_refused_at_construction(ids, error, text):
    with pytest.raises(error, match=re.escape(text)):
        Datum(ids)
    with pytest.raises(error, match=re.escape(text.replace("input_ids", "target_tokens"))):
        Datum([1, 2], {"target_tokens": ids})


def test_side_inputs_that_are_no_numbers_are_refused_at_construction():
    with pytest.raises(DataTypeError, match="Datum: advantages is dict; accepted are numbers"):
        Datum([1], {"advantages": {"a": 1}})
    with pytest.raises(DataTypeError, match="Datum: logprobs has dtype complex64; accepted are real numbers"):
        Datum([1], {"logprobs": torch.zeros(1, dtype=torch.complex64)})
    with pytest.raises(DataTypeError, match="loss_fn_inputs is list; accepted is a mapping"):
        Datum([1], [1.0])


def test_refusals_are_value_errors_and_type_refusals_are_both():
    assert issubclass(DataError, ValueError)
    assert issubclass(DataTypeError, TypeError)
    assert issubclass(DataTypeError, DataError)


def test_features_are_plain_lists_with_labels_masked_by_the_weights():
    datum = Datum([10, 11, 12], {"target_tokens": [11, 12, 13], "weights": [1, 0.5, 0], "advantages": 2.0})
    features = datum.to_features()
    assert features == {
        "input_ids": [10, 11, 12],
        "attention_mask": [1, 1, 1],
        "labels": [11, 12, CROSS_ENTROPY_IGNORE_IDX],
    }
    assert {type(value) for field in features.values() for value in field} == {int}
    assert datum.to_features(ignore_index=-1)["labels"] == [11, 12, -1]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [11, 12, 13]


def test_features_without_targets_have_no_labels_and_without_weights_mask_nothing():
    assert Datum([1, 2, 3]).to_features() == {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]}
    assert Datum([1, 2], {"target_tokens": [2, 3]}).to_features()["labels"] == [2, 3]


def test_features_of_a_malformed_datum_are_refused_like_its_batch():
    with pytest.raises(DataError, match="weights has length 3, input_ids has 2"):
        Datum([1, 2], {"target_tokens": [2, 3], "weights": [1, 1, 1]}).to_features()


def test_the_package_imports_no_torch_until_a_name_is_used():
    code = (
        "import sys, datum; assert 'torch' not in sys.modules and 'numpy' not in sys.modules; "
        "from datum import Datum; assert 'torch' in sys.modules; import datum.datum; assert datum.Datum is Datum; "
        "bad = {'transformers', 'accelerate', 'hydra', 'recipes', 'conf', 'jaxtyping'} & set(sys.modules); "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_importable_from_the_package_and_from_datum_datum():
    import datum.datum as module

    for name in datum_package.__all__:
        assert getattr(datum_package, name) is not None
        assert name in dir(datum_package)
    for name in (
        "Datum",
        "collate_datums",
        "default_collater",
        "pack_features_for_thd",
        "packed_sequence_thd_collater",
        "CROSS_ENTROPY_IGNORE_IDX",
    ):
        assert getattr(module, name) is getattr(datum_package, name)
    with pytest.raises(AttributeError, match="module 'datum' has no attribute 'Datums'"):
        _ = datum_package.Datums
