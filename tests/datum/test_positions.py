"""Positions restart at every document; text has the same coordinate on every rotary axis."""

import types
import typing

import jaxtyping
import pytest
import torch
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st

from datum import positions

MROPE_AXES = 3


def shape_checked(function):
    """A copy of `function` whose shape annotations are checked; the package itself needs no jaxtyping."""
    names = {**function.__globals__, **{name: getattr(jaxtyping, name) for name in ("Int", "Int64")}}
    copy = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copy.__annotations__ = typing.get_type_hints(function, globalns=names)
    return jaxtyping.jaxtyped(typechecker=beartype)(copy)


document_positions = shape_checked(positions.document_positions)
rotary_axes = shape_checked(positions.rotary_axes)


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=8))
def test_positions_count_from_zero_in_every_document(lengths):
    got = document_positions(torch.tensor(lengths, dtype=torch.int64))
    assert got.dtype == torch.int64
    assert got.tolist() == [i for length in lengths for i in range(length)]


def test_lengths_that_are_no_lengths_are_refused():
    with pytest.raises(ValueError, match=r"lengths has shape \[1, 2\]; accepted is a 1-D integer tensor \[D\]"):
        positions.document_positions(torch.tensor([[3, 2]]))
    with pytest.raises(ValueError, match="lengths has dtype float32"):
        positions.document_positions(torch.tensor([3.0]))
    with pytest.raises(ValueError, match=r"lengths\[1\] is -1000; a length is 0 or larger"):
        positions.document_positions(torch.tensor([3, -1000]))


def test_text_has_one_rope_axis_or_three_equal_mrope_axes():
    ids = torch.tensor([[0, 1, 2, 0, 1]])
    assert rotary_axes(ids, "rope") is ids
    three = rotary_axes(ids, "mrope")
    assert three.shape == (MROPE_AXES, 1, 5)
    assert all(torch.equal(axis, ids) for axis in three)
    three[0, 0, 0] = 9
    assert ids[0, 0] == 0  # nothing is shared with the batch
    assert three[1, 0, 0] == 0  # nor between the axes


def test_unknown_axes_and_shapes_are_refused():
    with pytest.raises(ValueError, match="axes is 'yarn'; accepted are 'rope' and 'mrope'"):
        positions.rotary_axes(torch.zeros(1, 2, dtype=torch.long), "yarn")
    with pytest.raises(ValueError, match=r"position_ids has shape \[2\]; accepted is \[B, S\]"):
        positions.rotary_axes(torch.zeros(2, dtype=torch.long), "mrope")
