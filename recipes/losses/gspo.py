"""The clipped surrogate with one ratio for a whole sequence."""

from typing import Unpack

import torch
from torch import Tensor

from conf.schema import Aggregation
from recipes.losses.aggregate import Tokens
from recipes.losses.policy import SharedOptions, check_option
from recipes.losses.ppo import PPO

__all__ = ["GSPO"]

_VARIANTS = ("sequence", "token")


class GSPO(PPO):
    """PPO's term with s = exp(mean of p - o over the sequence's trained tokens) in place of r.

    The `token` variant has the same value, s, and the gradient of its own token alone: sg(s) exp(p - sg(p)).

    Source: GSPO (arXiv:2507.18071), equations 5 to 7; the token variant: equations 13 and 14.

    Args:
        clip_low: From 0 to 1. The ratio is a mean over a sequence, so that bounds are far narrower than PPO's.
        clip_high: From 0.
        variant: `sequence` or `token`.
        aggregation: See `PolicyLoss`; the paper's mean is `sequence`.
        **shared: Other options of `PolicyLoss`.
    """

    def __init__(
        self,
        clip_low: float = 3e-4,
        clip_high: float = 4e-4,
        variant: str = "sequence",
        **shared: Unpack[SharedOptions],
    ) -> None:
        shared.setdefault("aggregation", Aggregation.sequence)
        super().__init__(clip_low, clip_high, None, **shared)
        self.variant = check_option("loss.variant", variant, _VARIANTS)

    @property
    def ratio_formula(self) -> str:  # type: ignore[override]
        """What r stands for in `formula`."""
        s = "exp(mean of p - o over the sequence)"
        return s if self.variant == "sequence" else f"sg({s}) exp(p - sg(p))"

    def log_ratio(self, p: Tensor, o: Tensor, tokens: Tokens) -> Tensor:
        """Return log s, [N], the same at all tokens of a sequence."""
        lengths = tokens.sum_by_sequence(torch.ones_like(p)).clamp(min=1)  # a sequence without a trained token: 0 / 1
        log_s = (tokens.sum_by_sequence(p - o) / lengths)[tokens.sequence]
        return log_s if self.variant == "sequence" else log_s.detach() + (p - p.detach())
