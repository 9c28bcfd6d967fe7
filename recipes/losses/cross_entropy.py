"""Cross-entropy: the negative log-likelihood of the targets."""

from torch import Tensor

from conf.schema import Aggregation
from recipes.losses.aggregate import Tokens, check_aggregation

__all__ = ["CrossEntropy"]


class CrossEntropy:
    """Term -p, with p the log-probability of the target under the model in training.

    Linear in p, so that the gradient is formed in the forward pass (`score_targets` with coefficients). A
    `recipes.losses.loss.Loss`.

    Args:
        aggregation: How the step's terms become one number (docs/losses.md).
        max_tokens: Divisor a sequence of `constant`; None for the other modes.

    Raises:
        ValueError: The two do not go together.

    >>> import torch
    >>> from recipes.losses.aggregate import StepCounts, denominator, select_tokens, token_coefficients, weighted_sum
    >>> tokens, _, _ = select_tokens({"labels": torch.tensor([[7, 8]]), "weights": torch.tensor([[0.5, 1.0]])})
    >>> terms = CrossEntropy()(torch.tensor([-2.0, -4.0]), tokens)
    >>> weighted_sum(token_coefficients(tokens, "token"), terms).item()
    5.0
    >>> round(5.0 / denominator(StepCounts(weight_total=1.5), "token"), 4)
    3.3333
    """

    def __init__(self, aggregation: Aggregation | str = Aggregation.token, max_tokens: int | None = None) -> None:
        self.aggregation = check_aggregation(aggregation, max_tokens)
        self.max_tokens = max_tokens
        self.linear = True
        self.linear_scale = -1.0
        self.required_fields: tuple[str, ...] = ()
        self.needs_entropy = False
        self.temperature = 1.0

    def __call__(self, target_logprobs: Tensor, tokens: Tokens) -> Tensor:
        """Return the terms [N] of [N] target log-probabilities, neither weighted nor summed."""
        return self.linear_scale * target_logprobs
