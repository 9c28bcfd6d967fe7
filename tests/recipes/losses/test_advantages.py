"""Advantages: worked by hand, abstentions, degenerate groups, and what must not change them."""

import itertools
import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.closed import ConfigError
from recipes.losses.advantages import (
    ADVANTAGES,
    NEEDS_GROUP,
    frac_zero_std,
    group_advantages,
    kl_in_reward,
    length_penalty,
)

ONE_RIGHT = [[1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("name", "std", "wanted"),
    [
        ("group_mean", "sample", [0.75, -0.25, -0.25, -0.25]),
        ("grpo", "sample", [1.5, -0.5, -0.5, -0.5]),
        ("grpo", "population", [1.732051, -0.577350, -0.577350, -0.577350]),
        ("rloo", "sample", [1, -1 / 3, -1 / 3, -1 / 3]),
        ("batch_std", "sample", [1.5, -0.5, -0.5, -0.5]),
        ("reinforce_pp", "population", [1.732051, -0.577350, -0.577350, -0.577350]),
        ("none", "sample", [1, 0, 0, 0]),
    ],
)
def test_one_group_by_hand(name, std, wanted):
    assert group_advantages(ONE_RIGHT, name, eps=0, std=std) == [pytest.approx(wanted, abs=1e-6)]


def test_two_groups_by_hand():
    groups = [[1, 0], [5, 3]]
    assert group_advantages(groups, "group_mean") == [[0.5, -0.5], [1, -1]]
    assert group_advantages(groups, "rloo") == [[1, -1], [2, -2]]
    # centred 0.5, -0.5, 1, -1: squares 2.5
    for std, count in [("sample", 3), ("population", 4)]:
        scale = 1 / math.sqrt(2.5 / count)
        wanted = [pytest.approx([0.5 * scale, -0.5 * scale]), pytest.approx([scale, -scale])]
        assert group_advantages(groups, "batch_std", eps=0, std=std) == wanted
    # mean 2.25, squares 1.5625 + 5.0625 + 7.5625 + 0.5625 = 14.75
    scale = 1 / math.sqrt(14.75 / 3)
    wanted = [pytest.approx([-1.25 * scale, -2.25 * scale]), pytest.approx([2.75 * scale, 0.75 * scale])]
    assert group_advantages(groups, "reinforce_pp", eps=0) == wanted


def test_eps_is_added_to_the_deviation():
    assert group_advantages(ONE_RIGHT, "grpo", eps=0.5)[0][0] == pytest.approx(0.75 / 1.0)
    assert group_advantages(ONE_RIGHT, "batch_std", eps=0.5)[0][0] == pytest.approx(0.75 / 1.0)
    assert group_advantages(ONE_RIGHT, "reinforce_pp", eps=0.5)[0][0] == pytest.approx(0.75 / 1.0)


def test_each_estimator_and_deviation_has_its_own_numbers():
    groups = [[1.0, 0.0, 0.0], [0.5, 0.25, 2.0]]
    results = [group_advantages(groups, name) for name in ADVANTAGES]
    results += [group_advantages(groups, name, std="population") for name in ("grpo", "batch_std", "reinforce_pp")]
    for one, other in itertools.combinations(results, 2):
        assert max(abs(a - b) for a, b in zip(*map(itertools.chain.from_iterable, (one, other)), strict=True)) > 1e-3


# ----------------------------------------------------------------------------------------- abstentions, equal rewards


def test_an_abstained_reward_is_as_if_it_were_not_there():
    for name in ADVANTAGES:
        with_none = group_advantages([[1.0, None, 0.25], [None, 0.0, 2.0]], name)
        without = group_advantages([[1.0, 0.25], [0.0, 2.0]], name)
        assert [[a for a in with_none[0] if a != 0], with_none[1][1:]] == without
        assert with_none[0][1] == with_none[1][0] == 0


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_group_without_a_baseline_is_dropped(name):
    groups = group_advantages([[1.0, None], [None, None], [1.0, 0.0]], name)
    assert [group is None for group in groups] == [name in NEEDS_GROUP, name in NEEDS_GROUP, False]
    if name in NEEDS_GROUP:  # and is out of the batch's statistics
        assert groups[2] == group_advantages([[1.0, 0.0]], name)[0]
    else:
        assert groups[1] == [0.0, 0.0]


@pytest.mark.parametrize("std", ["sample", "population"])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("name", NEEDS_GROUP)
def test_equal_rewards_have_advantages_of_exactly_0(name, eps, std):
    equal = [0.1, 0.1, 0.1]  # whose mean rounds to 0.10000000000000002 with a plain sum
    assert group_advantages([equal, [1.0, 0.0]], name, eps=eps, std=std)[0] == [0.0] * 3
    assert group_advantages([equal, [0.7, None, 0.7]], name, eps=eps, std=std) == [[0.0] * 3] * 2
    assert group_advantages([equal], "reinforce_pp", eps=eps, std=std) == [[0.0] * 3]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_nothing_to_estimate(name):
    assert group_advantages([], name) == []
    assert group_advantages([[None, None]], name) == [None if name in NEEDS_GROUP else [0.0, 0.0]]


# ----------------------------------------------------------------------------------------------------------- invariants

rewards = st.one_of(st.none(), st.sampled_from([0.0, 1.0, -0.5, 0.1, 2.5]))
batches = st.lists(st.lists(rewards, min_size=1, max_size=5), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(batches, st.sampled_from([n for n in ADVANTAGES if n != "none"]), st.sampled_from(["sample", "population"]))
def test_a_constant_added_to_all_rewards_changes_nothing(groups, name, std):
    moved = [[None if r is None else r + 4 for r in group] for group in groups]
    for one, other in zip(group_advantages(groups, name, std=std), group_advantages(moved, name, std=std), strict=True):
        assert one == (other if other is None else pytest.approx(other, abs=1e-9))


@settings(deadline=None, max_examples=60)
@given(batches, st.sampled_from(["grpo", "batch_std", "reinforce_pp"]))
def test_normalised_advantages_have_no_unit(groups, name):
    scaled = [[None if r is None else r * 8 for r in group] for group in groups]
    assert group_advantages(groups, name, eps=0) == group_advantages(scaled, name, eps=0)


@settings(deadline=None, max_examples=60)
@given(batches, st.sampled_from(NEEDS_GROUP), st.randoms())
def test_advantages_belong_to_their_group_and_sum_to_0(groups, name, random):
    advantages = group_advantages(groups, name)
    order = random.sample(range(len(groups)), len(groups))
    moved = group_advantages([groups[i] for i in order], name)
    for place, index in enumerate(order):
        assert moved[place] == (None if advantages[index] is None else pytest.approx(advantages[index], abs=1e-12))
    assert all(abs(sum(group)) < 1e-9 for group in advantages if group is not None)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=6))
def test_estimators_follow_from_each_other(group):
    mean = group_advantages([group], "group_mean")[0]
    n, total = len(group), math.fsum(group)
    assert mean == pytest.approx([r - total / n for r in group], abs=1e-9)
    others = [r - (total - r) / (n - 1) for r in group]
    assert group_advantages([group], "rloo")[0] == pytest.approx(others, abs=1e-9)
    deviation = statistics.stdev(group)
    if deviation > 1e-3:
        assert group_advantages([group], "grpo")[0] == pytest.approx([a / (deviation + 1e-6) for a in mean], abs=1e-9)


# ------------------------------------------------------------------------------------------------------ beside rewards


def test_share_of_groups_with_equal_rewards():
    assert frac_zero_std([[1, 1], [1, 0]]) == 0.5
    assert frac_zero_std([[1, None, 1], [0, None], [None]]) == 1.0  # groups of one reward have no deviation
    assert frac_zero_std([[1], [0]]) is None


def test_kl_in_the_reward_is_k1_of_the_trained_tokens():
    assert kl_in_reward([-1.0, -2.0], [-1.5, -2.25], [1.0, 0.5]) == 0.5 + 0.125
    assert kl_in_reward([-1.0, math.nan], [-1.5, -math.inf], [1.0, 0.0]) == 0.5
    with pytest.raises(ValueError, match="2 old, 1 reference log-probabilities and 2 weights"):
        kl_in_reward([-1.0, -2.0], [-1.5], [1.0, 1.0])


def test_length_penalty_falls_over_the_last_tokens():
    assert [length_penalty(n, 10, 4) for n in (0, 6, 7, 8, 10, 12)] == [0, 0, -0.25, -0.5, -1, -1]
    assert [length_penalty(n, 4, 4) for n in (0, 4)] == [0, -1]
    for tokens in (0, 11):
        with pytest.raises(ConfigError, match=f"penalty_tokens={tokens}: accepted are whole numbers from 1 to"):
            length_penalty(5, 10, tokens)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gae",), "advantage=gae: accepted are group_mean, grpo, rloo, batch_std, reinforce_pp, none"),
        (("grpo", -1.0), "advantage.eps=-1.0: accepted are finite numbers from 0"),
        (("grpo", 0.0, "robust"), "advantage.std=robust: accepted are sample, population"),
    ],
)
def test_options_out_of_range_are_refused(arguments, message):
    with pytest.raises(ConfigError) as error:
        group_advantages(ONE_RIGHT, **dict(zip(("name", "eps", "std"), arguments)))
    assert str(error.value) == message


def test_a_reward_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="group 1: reward 0 is nan; accepted are finite numbers, and None to abstain"):
        group_advantages([[1.0, 0.0], [math.nan, 0.0]], "grpo")
