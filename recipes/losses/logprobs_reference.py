"""`score_targets` in its plain form: the logits of all rows, and autograd. Tests compare the two."""

import torch
from torch import Tensor

from recipes.losses.logprobs import TokenScores

__all__ = ["score_targets_reference"]


def score_targets_reference(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    *,
    head_bias: Tensor | None = None,
    coefficients: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    entropy: bool = False,
) -> TokenScores:
    """Arguments, results and meaning of `score_targets`; everything in it is differentiable."""
    logits = torch.nn.functional.linear(hidden, head_weight, head_bias)
    logits = logit_scale * logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    logprobs = log_p.gather(1, targets[:, None]).squeeze(1)
    return TokenScores(
        logprobs,
        logprobs == log_p.amax(-1),
        -(log_p.exp() * log_p).sum(-1) if entropy else None,
        None if coefficients is None else (coefficients.double() * logprobs.double()).sum(),
    )
