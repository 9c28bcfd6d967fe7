"""Cross-entropy is torch's, and the same number by either way to its gradient."""

import pytest
import torch

from recipes.losses.aggregate import (
    StepCounts,
    count_batch,
    denominator,
    select_tokens,
    token_coefficients,
    weighted_sum,
)
from recipes.losses.cross_entropy import CrossEntropy
from recipes.losses.logprobs import score_targets


@pytest.fixture
def batch():
    torch.manual_seed(0)
    labels = torch.randint(0, 9, (3, 5))
    weights = torch.tensor([[1.0, 0, 0.5, 1, 0], [0, 0, 0, 0, 0], [-1, 2, 1, 1, 1]])
    return {"input_ids": labels, "labels": labels.masked_fill(weights == 0, -100), "weights": weights}


def test_its_terms_are_those_of_torch(batch):
    logits = torch.randn(3, 5, 9)
    tokens, selected, targets = select_tokens(batch)
    terms = CrossEntropy()(torch.log_softmax(logits, -1)[selected].gather(1, targets[selected][:, None])[:, 0], tokens)
    unmasked = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    torch.testing.assert_close(terms, unmasked[selected])


def test_its_token_mean_is_that_of_torch(batch):
    batch.pop("weights")
    logits = torch.randn(3, 5, 9)
    tokens, selected, targets = select_tokens(batch)
    p = torch.log_softmax(logits, -1)[selected].gather(1, targets[selected][:, None])[:, 0]
    loss = CrossEntropy()
    total = weighted_sum(token_coefficients(tokens, loss.aggregation), loss(p, tokens))
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    assert float(total) / denominator(count_batch(batch), loss.aggregation) == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.parametrize("mode", ["token", "sequence", "constant", "sum"])
def test_both_ways_to_the_gradient_agree(batch, mode):
    # training forms the gradient in the forward pass, evaluation takes the terms: one number
    loss = CrossEntropy(mode, 4 if mode == "constant" else None)
    hidden, head = torch.randn(3, 5, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    tokens, selected, targets = select_tokens(batch)
    coefficients = token_coefficients(tokens, mode)
    formed = score_targets(
        hidden[selected], head, targets[selected], coefficients=coefficients * loss.linear_scale
    ).weighted_sum
    scores = score_targets(hidden[selected], head, targets[selected])
    recomputed = weighted_sum(coefficients, loss(scores.logprobs, tokens))
    torch.testing.assert_close(formed, recomputed, rtol=1e-7, atol=1e-7)
    for got, wanted in zip(
        torch.autograd.grad(formed, (hidden, head)), torch.autograd.grad(recomputed, (hidden, head)), strict=True
    ):
        torch.testing.assert_close(got, wanted)


def test_it_asks_nothing_of_the_data_but_targets():
    assert CrossEntropy().required_fields == ()
    assert not CrossEntropy().needs_entropy
    assert CrossEntropy("sequence").aggregation == CrossEntropy().aggregation.sequence
    assert denominator(StepCounts(), CrossEntropy().aggregation) == 1
