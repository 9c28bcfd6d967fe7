"""Arguments of a forward: what is passed along, what is left out, and where documents begin."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import Backend, PositionAxes, Scope
from datum import Datum, collate_datums, pack_features_for_thd, packed_sequence_thd_collater
from datum.errors import DataError
from recipes.models.inputs import model_inputs
from tests.recipes.models.families import collate, documents

SDPA = Backend.sdpa


def test_padded() -> None:
    batch = collate([[5, 6, 7], [8]], packed=False, divisible=None)
    inputs = model_inputs(batch, backend=SDPA)
    assert inputs.keys() == {"input_ids", "attention_mask", "use_cache"}
    assert inputs["use_cache"] is False
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_packed_worked_example() -> None:
    batch = collate([[10, 11, 12], [20, 21]], divisible=8)
    inputs = model_inputs(batch, backend=Backend.flash_attention_2)
    assert inputs["attention_mask"] is None
    assert inputs["use_cache"] is False
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == [0, 3, 5, 8]
    assert inputs["cu_seq_lens_q"].dtype == torch.int32
    assert inputs["max_length_q"] == inputs["max_length_k"] == 3


def test_lengths_as_numbers_go_to_flash_attention_alone() -> None:
    # Compiled layers would be compiled again for each new number.
    for backend in set(Backend) - {Backend.flash_attention_2}:
        assert "max_length_q" not in model_inputs(collate([[5, 6]]), backend=backend)


def test_xdoc_joins_documents_and_leaves_padding_out() -> None:
    batch = collate([[10, 11, 12], [20, 21]], divisible=8)
    inputs = model_inputs(batch, backend=SDPA, scope=Scope.xdoc)
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert inputs["cu_seq_lens_q"].tolist() == [0, 5, 8]


def test_mrope_has_four_axes_of_which_the_first_tells_documents_apart() -> None:
    packed = model_inputs(collate([[10, 11, 12], [20, 21]], divisible=8), backend=SDPA, axes=PositionAxes.mrope)
    assert packed["position_ids"].shape == (4, 1, 8)
    assert packed["position_ids"][0].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    for axis in packed["position_ids"][1:]:
        assert axis.tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    padded = model_inputs(collate([[5, 6, 7], [8]], packed=False), backend=SDPA, axes=PositionAxes.mrope)
    assert padded["position_ids"].shape == (4, 2, 4)
    assert padded["position_ids"].unique(dim=0).tolist() == [[[0, 1, 2, 3]] * 2]


def test_rotary_axes_of_the_batch_are_kept() -> None:
    batch = collate([[10, 11], [20]], divisible=None)
    batch["position_ids"] = torch.tensor([[[0, 1, 0]], [[0, 5, 0]], [[0, 9, 0]]])
    positions = model_inputs(batch, backend=SDPA, axes=PositionAxes.mrope)["position_ids"]
    assert positions.tolist() == [[[0, 1, 0]], [[0, 1, 0]], [[0, 5, 0]], [[0, 9, 0]]]


def test_several_rows_of_unequal_fill() -> None:
    packs = [
        pack_features_for_thd([Datum(ids).to_features() for ids in row])
        for row in ([[5, 6, 7], [8]], [[9, 10]], [[1, 2, 3, 4]])
    ]
    inputs = model_inputs(packed_sequence_thd_collater(packs), backend=SDPA)
    assert inputs["cu_seq_lens_q"].tolist() == [0, 3, 4, 6, 8, 12]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 7), st.sampled_from(Scope))
def test_segments_cover_the_row_and_positions_count_on_within_them(
    lengths: list[int], divisible: int, scope: Scope
) -> None:
    batch = collate(documents(lengths), divisible=divisible)
    inputs = model_inputs(batch, backend=SDPA, scope=scope)
    bounds = inputs["cu_seq_lens_q"].tolist()
    assert bounds[0] == 0
    assert bounds[-1] == batch["input_ids"].numel()
    real = [sum(lengths)] if scope == Scope.xdoc else lengths
    positions = inputs["position_ids"][0]
    for start, length in zip(bounds, real):
        assert positions[start : start + length].tolist() == list(range(length))
    assert len(bounds) - 1 == len(real) + (sum(lengths) % divisible != 0)


def test_lengths_that_do_not_fit_the_row_are_refused() -> None:
    batch = collate([[5, 6, 7], [8]], divisible=None)
    with pytest.raises(DataError, match=r"row 0: seq_lens \[3, 9\] .* do not fit into 4 positions"):
        model_inputs(batch | {"seq_lens": torch.tensor([[3, 9]])}, backend=SDPA)
    gap = batch | {"seq_lens": torch.tensor([[2, 1]])}
    assert model_inputs(gap, backend=SDPA)["cu_seq_lens_q"].tolist() == [0, 2, 3, 4]
    with pytest.raises(DataError, match=r"attention=xdoc joins documents, but .* leave padding between them"):
        model_inputs(gap, backend=SDPA, scope=Scope.xdoc)


def test_other_keys_of_a_batch_are_not_passed_on() -> None:
    datum = Datum([5, 6], loss_fn_inputs={"target_tokens": [6, 7], "weights": [1.0, 0.5], "reward": 1.0})
    for packed in (True, False):
        inputs = model_inputs(collate_datums([datum], packed=packed), backend=SDPA)
        assert not inputs.keys() & {"labels", "weights", "reward", "padding_mask", "seq_lens", "qkv_format"}
