"""What a training step asks of a loss."""

from typing import Protocol

from torch import Tensor

from conf.schema import Aggregation
from recipes.losses.aggregate import Tokens

__all__ = ["Loss"]


class Loss(Protocol):
    """A term for each trained token; the step weights, sums and divides them (`recipes.losses.aggregate`).

    Attributes:
        linear: The term is `linear_scale` times the target's log-probability, so that its gradient may be formed in the
            forward pass.
        linear_scale: See `linear`; not read where that is False.
        required_fields: Side inputs that every Datum must carry.
        needs_entropy: The loss reads the entropy of each row's distribution.
        temperature: Temperature of the log-probabilities.
        aggregation: How the terms become one number.
        max_tokens: Divisor a sequence of aggregation=constant.
    """

    linear: bool
    linear_scale: float
    required_fields: tuple[str, ...]
    needs_entropy: bool
    temperature: float
    aggregation: Aggregation
    max_tokens: int | None

    def __call__(self, target_logprobs: Tensor, tokens: Tokens) -> Tensor:
        """Terms [N] of N target log-probabilities, neither weighted nor summed."""
        ...
