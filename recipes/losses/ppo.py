"""Clipped surrogate of proximal policy optimisation; GRPO and DAPO are settings of it."""

import math
from typing import Unpack

import torch
from torch import Tensor

from recipes.losses.aggregate import Tokens
from recipes.losses.policy import PolicyLoss, SharedOptions, check_number

__all__ = ["PPO", "clip_log_bounds"]


class PPO(PolicyLoss):
    """Term -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(p - o).

    With dual clip c, for A < 0: -max(min(r A, clip(r) A), c A).

    Sources: PPO (arXiv:1707.06347), equation 7; different bounds on the two sides: DAPO (arXiv:2503.14476); dual clip:
    Ye et al. (arXiv:1912.09729).

    Args:
        clip_low: From 0 to 1.
        clip_high: From 0.
        dual_clip: Largest ratio where the advantage is negative, above 1; None is off.
        **shared: Options of `PolicyLoss`.
    """

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        **shared: Unpack[SharedOptions],
    ) -> None:
        super().__init__(**shared)
        self.log_low, self.log_high = clip_log_bounds(clip_low, clip_high)
        self.clip_low, self.clip_high, self.dual_clip = clip_low, clip_high, dual_clip
        self.log_dual = math.inf
        if dual_clip is not None:
            self.log_dual = math.log(check_number("loss.dual_clip", dual_clip, above=1))

    @property
    def formula(self) -> str:
        """The term in plain text."""
        clip = f"min(r A, clip(r, {1 - self.clip_low:g}, {1 + self.clip_high:g}) A)"
        return f"-{clip}" if self.dual_clip is None else f"-{clip}, but for A < 0 at most {self.dual_clip:g} |A|"

    def term(self, p: Tensor, o: Tensor, advantages: Tensor, tokens: Tokens) -> Tensor:
        """Return the negative clipped surrogate, [N].

        Whichever of the two arguments is smaller, the minimum is A times r held on one side: below 1 + clip_high for
        A > 0, above 1 - clip_low for A < 0. Holding the logarithm keeps exp and its gradient finite.
        """
        return -self.log_ratio(p, o, tokens).clamp(*self._bounds(advantages)).exp() * advantages

    def is_clipped(self, p: Tensor, tokens: Tokens) -> Tensor:
        """Return [N] bool: the ratio is outside on the side that matters for its advantage."""
        advantages = tokens.get("advantages")
        log_ratio = self.log_ratio(p, self.old_logprobs(tokens), tokens)
        low, high = self._bounds(advantages)
        return ((log_ratio < low) | (log_ratio > high)) & (advantages != 0)

    def _bounds(self, advantages: Tensor) -> tuple[Tensor, Tensor]:
        is_bad = advantages < 0
        low = torch.full_like(advantages, -math.inf).masked_fill(is_bad, self.log_low)
        high = torch.full_like(advantages, self.log_high).masked_fill(is_bad, self.log_dual)
        return low, high


def clip_log_bounds(clip_low: float, clip_high: float) -> tuple[float, float]:
    """Return log(1 - clip_low) and log(1 + clip_high).

    Raises:
        ConfigError: clip_low is not from 0 to 1, or clip_high not from 0.
    """
    low = check_number("loss.clip_low", clip_low, low=0, high=1)
    high = check_number("loss.clip_high", clip_high, low=0)
    return math.log1p(-low) if low < 1 else -math.inf, math.log1p(high)
