"""Cross-entropy: the negative log-likelihood of the targets."""

from typing import ClassVar

from torch import Tensor

from conf.schema import Aggregation
from recipes.losses.aggregate import Tokens

__all__ = ["CrossEntropy"]


class CrossEntropy:
    """Term -p, with p the log-probability of the target under the model in training.

    Linear in p, so that the gradient is formed in the forward pass (`score_targets` with coefficients).

    Args:
        aggregation: How the step's terms become one number (docs/losses.md).
        max_tokens: Divisor a sequence of `constant`.
    """

    linear: ClassVar[bool] = True
    linear_scale: ClassVar[float] = -1.0
    required_fields: ClassVar[tuple[str, ...]] = ()
    needs_entropy: ClassVar[bool] = False
    temperature: ClassVar[float] = 1.0

    def __init__(self, aggregation: Aggregation | str = Aggregation.token, max_tokens: int | None = None) -> None:
        self.aggregation = Aggregation(aggregation)
        self.max_tokens = max_tokens

    def __call__(self, target_logprobs: Tensor, tokens: Tokens) -> Tensor:
        """Return the terms [N] of [N] target log-probabilities, neither weighted nor summed."""
        return self.linear_scale * target_logprobs
