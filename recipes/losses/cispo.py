"""Clipped importance weight, as a constant, times the policy gradient of every token."""

from typing import Unpack

from torch import Tensor

from recipes.losses.aggregate import Tokens
from recipes.losses.policy import PolicyLoss, SharedOptions
from recipes.losses.ppo import clip_log_bounds

__all__ = ["CISPO"]


class CISPO(PolicyLoss):
    """Term -sg(clip(r, 1 - clip_low, 1 + clip_high)) A p with r = exp(p - o) and sg a stop-gradient.

    Where PPO gives a clipped token no gradient, this one bounds its weight and keeps the gradient.

    Source: MiniMax-M1 (arXiv:2506.13585), equations 4 and 5.

    Args:
        clip_low: From 0 to 1; 1 is no lower bound.
        clip_high: From 0.
        **shared: Options of `PolicyLoss`.
    """

    def __init__(self, clip_low: float = 1.0, clip_high: float = 4.0, **shared: Unpack[SharedOptions]) -> None:
        super().__init__(**shared)
        self.log_low, self.log_high = clip_log_bounds(clip_low, clip_high)
        self.clip_low, self.clip_high = clip_low, clip_high

    @property
    def formula(self) -> str:
        """The term in plain text."""
        return f"-sg(clip(r, {1 - self.clip_low:g}, {1 + self.clip_high:g})) A p"

    def term(self, p: Tensor, o: Tensor, advantages: Tensor, tokens: Tokens) -> Tensor:
        """Return -weight A p, [N]."""
        weight = self.log_ratio(p, o, tokens).detach().clamp(self.log_low, self.log_high).exp()
        return -weight * advantages * p

    def is_clipped(self, p: Tensor, tokens: Tokens) -> Tensor:
        """Return [N] bool: the weight is at a bound, on either side whatever the advantage's sign."""
        log_ratio = self.log_ratio(p, self.old_logprobs(tokens), tokens)
        return ((log_ratio < self.log_low) | (log_ratio > self.log_high)) & (tokens.get("advantages") != 0)
