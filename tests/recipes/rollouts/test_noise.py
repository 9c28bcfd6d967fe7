"""Noise is a function of a rollout's name and of positions, and it is uniform."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.rollouts.noise import batch_uniforms, uniforms
from recipes.rollouts.sampler import SampleRequest

REQUEST = SampleRequest((5, 6), prompt=3, sample=2, step=7)


@given(position=st.integers(0, 40), count=st.integers(0, 20), seed=st.integers(-5, 2**70))
def test_a_position_has_one_number(position: int, count: int, seed: int) -> None:
    whole = uniforms(seed, REQUEST, 60)
    assert np.array_equal(
        uniforms(seed, replace(REQUEST, position=position), count), whole[position : position + count]
    )


@given(others=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9)), max_size=5), place=st.integers(0, 5))
def test_a_batch_holds_what_each_gets_alone(others: list[tuple[int, int]], place: int) -> None:
    requests = [SampleRequest((1,), prompt, sample) for prompt, sample in others]
    requests.insert(place, REQUEST)
    batch = batch_uniforms(0, requests, 9)
    assert batch.dtype == np.float64
    assert batch.shape == (len(requests), 9)
    assert np.array_equal(batch[requests.index(REQUEST)], uniforms(0, REQUEST, 9))


def test_prompt_ids_and_limits_do_not_count() -> None:
    assert np.array_equal(uniforms(1, REQUEST, 4), uniforms(1, replace(REQUEST, prompt_ids=(1,), max_new_tokens=2), 4))


@pytest.mark.parametrize(
    "change", [{"prompt": 4}, {"sample": 3}, {"step": 8}, {"stream": "eval"}, {"prompt": 37, "sample": 2, "step": 7}]
)
def test_names_keep_noise_apart(change: dict[str, Any]) -> None:
    assert not np.isin(uniforms(0, replace(REQUEST, **change), 16), uniforms(0, REQUEST, 16)).any()
    assert not np.isin(uniforms(1, REQUEST, 16), uniforms(0, REQUEST, 16)).any()


def test_digits_do_not_run_together() -> None:
    one, other = SampleRequest((1,), prompt=1, sample=12), SampleRequest((1,), prompt=11, sample=2)
    assert not np.array_equal(uniforms(0, one, 4), uniforms(0, other, 4))


def test_numbers_stay_the_same_for_ever() -> None:
    """Golden values of this generator: a run that is resumed with a later version has to go on with the same noise."""
    golden = [0.6527258654305403, 0.12462305680754404, 0.08637620859377604, 0.0704446617881812, 0.6177229297448776]
    assert uniforms(42, REQUEST, 5).tolist() == golden


def test_numbers_are_uniform_and_independent() -> None:
    requests = [SampleRequest((1,), prompt, sample) for prompt in range(250) for sample in range(8)]
    u = batch_uniforms(0, requests, 16)
    assert u.min() >= 0
    assert u.max() < 1
    counts = np.bincount((u.ravel() * 64).astype(int), minlength=64)
    expected = u.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 103.4  # 99.9 % of chi-square with 63 degrees of freedom
    for a, b in ((u[:, :-1], u[:, 1:]), (u[:-1], u[1:])):  # neighbours in position, and in sample
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02  # 3.5 standard deviations
