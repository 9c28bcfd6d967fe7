"""Expected gradients, by enumerating every sample, against the gradient of the expected reward.

The policy writes two words out of three: 9 outcomes, 12 parameters (logits of the first word, and of the second one
after each first). An estimator's expectation is the loss over all samples, or all groups of samples, with their
probabilities as weights and nothing to divide by.
"""

import itertools

import pytest
import torch

from conf.policy import KLConfig, KLEstimator
from recipes.losses.advantages import group_advantages, kl_in_reward
from recipes.losses.aggregate import Tokens, token_coefficients, weighted_sum
from recipes.losses.cispo import CISPO
from recipes.losses.dro import DRO
from recipes.losses.gspo import GSPO
from recipes.losses.importance_sampling import ImportanceSampling
from recipes.losses.policy import kl_terms
from recipes.losses.ppo import PPO

WORDS = 3
OUTCOMES = [*itertools.product(range(WORDS), repeat=2)]
REWARDS = [1.0, 0.0, 0.5, -1.0, 2.0, 0.25, 0.0, 0.75, 1.5]
IS_RIGHT = [float(reward > 0.6) for reward in REWARDS]


def parameters(seed):
    return torch.randn(1 + WORDS, WORDS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


THETA, SAMPLER, REFERENCE = parameters(0).requires_grad_(), parameters(1), parameters(2)


def logprobs(theta):
    """[9, 2] log-probabilities of both words of each outcome."""
    log_p = torch.log_softmax(theta, -1)
    return torch.stack([torch.stack([log_p[0, first], log_p[1 + first, second]]) for first, second in OUTCOMES])


def true_gradient(rewards, theta=THETA):
    expected = (logprobs(theta).sum(1).exp() * torch.tensor(rewards, dtype=torch.float64)).sum()
    return torch.autograd.grad(expected, theta)[0]


def expected_step(loss, groups, probabilities, advantages, sampler=None):
    """Minus the expected gradient of the loss over [M, G] groups of outcomes, a mean over the G samples."""
    chosen = torch.tensor(groups)  # [M, G]
    p = logprobs(THETA)
    b = p.detach() if sampler is None else logprobs(sampler)
    weights = (probabilities / chosen.shape[1])[:, None, None].expand(*chosen.shape, 2)
    sequence = torch.arange(chosen.numel()).repeat_interleave(2)
    fields = {
        "logprobs": b[chosen].flatten(),
        "old_logprobs": p.detach()[chosen].flatten(),
        "advantages": torch.tensor(advantages, dtype=torch.float64).flatten()[sequence],
    }
    tokens = Tokens(weights.flatten(), sequence, chosen.numel(), torch.zeros_like(sequence), fields)
    value = weighted_sum(token_coefficients(tokens, loss.aggregation), loss(p[chosen].flatten(), tokens))
    return -torch.autograd.grad(value, THETA)[0]


def single_samples(loss, sampler=None, rewards=REWARDS):
    source = THETA if sampler is None else sampler
    probabilities = logprobs(source).sum(1).exp().detach()
    return expected_step(loss, [[i] for i in range(len(OUTCOMES))], probabilities, [[r] for r in rewards], sampler)


def groups_of(size, loss, estimator, rewards=REWARDS, **options):
    groups = [*itertools.product(range(len(OUTCOMES)), repeat=size)]
    probabilities = logprobs(THETA).sum(1).exp().detach()[torch.tensor(groups)].prod(1)
    advantages = [
        group_advantages([[rewards[outcome] for outcome in group]], estimator, **options)[0] for group in groups
    ]
    return expected_step(loss, groups, probabilities, advantages)


def assert_equal(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


def is_equal(got, wanted):
    return bool((got - wanted).norm() <= 1e-6 * wanted.norm())


# At ratio 1 each of them has the gradient -A grad p; GSPO's sequence ratio moves as the mean of its tokens, twice here.
LOSSES = [
    ImportanceSampling(aggregation="sum"),
    PPO(aggregation="sum"),
    PPO(aggregation="sum", dual_clip=3.0),
    CISPO(aggregation="sum"),
    GSPO(aggregation="sum"),
    GSPO(aggregation="sum", variant="token"),
    DRO(aggregation="sum"),
]


def named(loss):
    return type(loss).__name__


@pytest.mark.parametrize("loss", LOSSES, ids=named)
def test_on_policy_every_loss_has_the_policy_gradient(loss):
    assert_equal(single_samples(loss), true_gradient(REWARDS))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("loss", LOSSES[:4], ids=named)
def test_leave_one_out_is_unbiased(loss, size):
    assert_equal(groups_of(size, loss, "rloo"), true_gradient(REWARDS))


@pytest.mark.parametrize("size", [2, 3])
def test_the_groups_own_mean_shrinks_the_gradient(size):
    # a sample's reward is part of its baseline: (G - 1) / G
    assert_equal(groups_of(size, LOSSES[0], "group_mean"), (size - 1) / size * true_gradient(REWARDS))


@pytest.mark.parametrize(("size", "deviation"), [(2, 0.5**0.5), (3, 3**-0.5)])
def test_dividing_by_the_groups_deviation_scales_binary_rewards(size, deviation):
    # [1, 0] or [1, 0, 0] and [1, 1, 0]: every group that is not degenerate has the same sample deviation
    got = groups_of(size, LOSSES[0], "grpo", IS_RIGHT, eps=0)
    assert_equal(got, (size - 1) / size / deviation * true_gradient(IS_RIGHT))


def test_dividing_by_the_groups_deviation_changes_the_direction_for_other_rewards():
    got, wanted = groups_of(2, LOSSES[0], "grpo", eps=0), true_gradient(REWARDS)
    cosine = float((got * wanted).sum() / (got.norm() * wanted.norm()))
    assert 0.5 < cosine < 0.999


# -------------------------------------------------------------------------------------------------------- off-policy


@pytest.mark.parametrize("loss", [ImportanceSampling, PPO, CISPO], ids=lambda kind: kind.__name__)
def test_the_sequences_correction_makes_another_samplers_tokens_exact(loss):
    exact = loss(aggregation="sum", correction="truncate", correction_level="sequence", correction_cap=1e9)
    assert_equal(single_samples(exact, SAMPLER), true_gradient(REWARDS))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"correction": "truncate", "correction_cap": 1e9},  # a token's own ratio leaves out the other's
        {"correction": "truncate", "correction_level": "sequence", "correction_cap": 1.0},
        {"correction": "mask", "correction_level": "sequence", "correction_cap": 1.0},
    ],
)
def test_other_corrections_trade_bias_for_variance(options):
    assert not is_equal(
        single_samples(ImportanceSampling(aggregation="sum", **options), SAMPLER), true_gradient(REWARDS)
    )


# ---------------------------------------------------------------------------------------------------------------- KL


def expected_over_first_word(estimator):
    """Expected value and gradient of an estimator over one word, with the exact KL beside it."""
    theta = THETA.detach()[0].clone().requires_grad_()
    p, ref = torch.log_softmax(theta, -1), torch.log_softmax(REFERENCE[0], -1)
    forward, backward = (p.exp() * (p - ref)).sum(), (ref.exp() * (ref - p)).sum()
    mean = (p.detach().exp() * kl_terms(estimator, p, ref)).sum()
    return (
        mean,
        *(torch.autograd.grad(value, theta, retain_graph=True)[0] for value in (mean, forward, backward)),
        forward,
    )


def test_kl_estimators_in_expectation():
    for estimator in ("k1", "k2", "k3"):
        mean, gradient, of_kl, of_reverse_kl, kl = expected_over_first_word(estimator)
        assert is_equal(mean, kl) == (estimator != "k2")  # k2's value is biased,
        wanted = {"k1": 0 * of_kl, "k2": of_kl, "k3": of_reverse_kl}[estimator]
        assert_equal(gradient, wanted)  # but its gradient is that of KL(policy || reference)


def test_k1_in_the_reward_has_the_gradient_of_the_kl():
    p, ref = logprobs(THETA), logprobs(REFERENCE)
    rewards = [
        reward - 0.3 * kl_in_reward(old, other, [1.0, 1.0])
        for reward, old, other in zip(REWARDS, p.tolist(), ref.tolist(), strict=True)
    ]
    probability = p.sum(1).exp()
    objective = (probability * (torch.tensor(REWARDS) - 0.3 * (p - ref).sum(1))).sum()
    assert_equal(single_samples(LOSSES[0], rewards=rewards), torch.autograd.grad(objective, THETA)[0])


def test_the_coefficient_reaches_the_gradient():
    fields = {"ref_logprobs": logprobs(REFERENCE).flatten(), "advantages": torch.zeros(18, dtype=torch.float64)}
    p = logprobs(THETA).flatten()
    fields["logprobs"] = p.detach()
    sequence = torch.arange(9).repeat_interleave(2)
    weights = p.detach().view(9, 2).sum(1).exp()[sequence]
    tokens = Tokens(weights, sequence, 9, torch.zeros_like(sequence), fields)
    loss = PPO(aggregation="sum", kl=KLConfig(0.1, KLEstimator.k2))
    value = weighted_sum(token_coefficients(tokens, loss.aggregation), loss(p, tokens))
    got = torch.autograd.grad(value, THETA)[0]
    # the first word's KL in full; the second one's for a first word that is given
    log_p, log_ref = torch.log_softmax(THETA, -1), torch.log_softmax(REFERENCE, -1)
    by_row = (log_p.exp() * (log_p - log_ref)).sum(1)
    reach = torch.cat([torch.ones(1), log_p[0].detach().exp()])
    assert_equal(got, torch.autograd.grad(0.1 * (reach * by_row).sum(), THETA)[0])
