"""Direct reward optimisation: no ratio, a quadratic pull towards the old policy."""

from typing import Unpack

from torch import Tensor

from recipes.losses.aggregate import Tokens
from recipes.losses.policy import PolicyLoss, SharedOptions, check_number

__all__ = ["DRO"]


class DRO(PolicyLoss):
    """Term -(A p - beta / 2 (p - o)^2).

    Source: DRO (arXiv:2405.19107), its policy objective, per token, with the advantage in place of reward minus value.

    Args:
        beta: Strength of the pull, from 0.
        **shared: Options of `PolicyLoss`.
    """

    def __init__(self, beta: float = 0.05, **shared: Unpack[SharedOptions]) -> None:
        super().__init__(**shared)
        self.beta = check_number("loss.beta", beta, low=0)

    ratio_formula = ""

    @property
    def formula(self) -> str:
        """The term in plain text."""
        return f"-(A p - {self.beta / 2:g} (p - o)^2)"

    def term(self, p: Tensor, o: Tensor, advantages: Tensor, tokens: Tokens) -> Tensor:
        """Return the term, [N]."""
        return self.beta / 2 * self.log_ratio(p, o, tokens).square() - advantages * p
