"""Importance-weighted policy gradient."""

from typing import Unpack

from torch import Tensor

from recipes.losses.aggregate import Tokens
from recipes.losses.policy import PolicyLoss, SharedOptions

__all__ = ["ImportanceSampling"]


class ImportanceSampling(PolicyLoss):
    """Term -r A with r = exp(p - o): the ratio of each token, without a clip.

    On-policy (r = 1) its gradient is that of REINFORCE, -A grad p. Options: `PolicyLoss`.
    """

    def __init__(self, **shared: Unpack[SharedOptions]) -> None:
        super().__init__(**shared)

    @property
    def formula(self) -> str:
        """The term in plain text."""
        return "-r A"

    def term(self, p: Tensor, o: Tensor, advantages: Tensor, tokens: Tokens) -> Tensor:
        """Return -r A, [N]."""
        return -self.log_ratio(p, o, tokens).exp() * advantages
