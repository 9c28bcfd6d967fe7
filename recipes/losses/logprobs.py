"""Log-probabilities of target tokens from hidden states and the output head, without the logits of all rows at once.

The logits of a row are

    logits = softcap(logit_scale * (hidden @ head_weight.T + head_bias)) / temperature
    softcap(z) = cap * tanh(z / cap)

and are formed for a chunk of rows at a time, in one buffer that all chunks share. Two ways to a gradient:

- *recomputed*: `logprobs` (and `entropy`) are differentiable, for losses of any form. Backward forms each chunk's
  logits again: four products of a chunk's rows with the head where full logits take three. With a frozen head it is
  two, as with full logits, since a row's gradient is then known up to a factor in the forward pass.
- *formed in the forward pass*: with `coefficients` c, the scalar `weighted_sum` = sum(c * logprobs) is differentiable.
  Its gradient is known as soon as a chunk's softmax is: three products, two with a frozen head.

`score_targets_reference` in `recipes.losses.logprobs_reference` is the same function with full logits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.losses.chunked import Head, LinearScores, RecomputedScores

__all__ = ["TokenScores", "score_targets"]


@dataclass
class TokenScores:
    """What a model says about N target tokens.

    Attributes:
        logprobs: [N] log-probability of each target; float32 (float64 for float64 inputs).
        is_argmax: [N] bool, whether the target is the most likely token (or one of several such).
        entropy: [N] entropy in nats of each row's distribution, same dtype; None where it was not asked for.
        weighted_sum: Scalar sum(coefficients * logprobs), accumulated in float64 (float32 on mps); None without
            coefficients. It has the gradient, and `logprobs` and `entropy` are then detached.
    """

    logprobs: Tensor
    is_argmax: Tensor
    entropy: Tensor | None = None
    weighted_sum: Tensor | None = None


def score_targets(
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
    chunk_size: int = 256,
) -> TokenScores:
    """Score N targets; see the module's text for the formula and the two ways to a gradient.

    Matrix products run in the dtype of `hidden` and `head_weight`, or in autocast's where it is on, as those of
    `torch.nn.Linear` would; the softmax statistics and all results are float32. The gradient of `head_weight` is added
    up in float32 over the chunks and cast once. Tensors that need no gradient cost none. N = 0 is legal: empty
    logprobs, a weighted sum of 0, zero gradients.

    Args:
        hidden: [N, H] last hidden states, of the selected rows alone.
        head_weight: [V, H].
        targets: [N] int64, ids in [0, V).
        head_bias: [V].
        coefficients: [N] float constants; chooses the gradient that is formed in the forward pass. `backward` through
            `weighted_sum` is then possible once, from any incoming gradient.
        temperature: Logits are divided by it, above 0.
        softcap: Bound `cap` of the soft-capping, above 0; None is off.
        logit_scale: Factor of the logits before soft-capping.
        entropy: Return each row's entropy too.
        chunk_size: Rows whose logits exist at one time.

    Raises:
        ValueError: Shapes, dtypes or options do not fit, or (on the CPU) a target is outside of [0, V).
    """
    _check(hidden, head_weight, targets, head_bias, coefficients)
    for name, value in (("temperature", temperature), ("softcap", softcap), ("chunk_size", chunk_size)):
        if value is not None and not value > 0:
            raise ValueError(f"score_targets: {name}={value}; accepted are numbers above 0")
    device_type = hidden.device.type
    autocast = torch.is_autocast_enabled(device_type) and hidden.dtype != torch.float64
    compute_dtype = torch.get_autocast_dtype(device_type) if autocast else hidden.dtype
    if not autocast and head_weight.dtype != hidden.dtype:
        raise ValueError(
            f"score_targets: hidden is {hidden.dtype}, head_weight is {head_weight.dtype}; "
            "cast one of them, or run under torch.autocast"
        )
    head = Head(compute_dtype, temperature, softcap, logit_scale, chunk_size)
    needed = tuple(
        torch.is_grad_enabled() and tensor is not None and tensor.requires_grad
        for tensor in (hidden, head_weight, head_bias)
    )
    inputs = (hidden, head_weight, head_bias, targets, head, entropy, needed)
    if coefficients is None:
        logprobs, is_argmax, entropies = RecomputedScores.apply(*inputs)
        return TokenScores(logprobs, is_argmax, entropies)
    weighted_sum, logprobs, is_argmax, entropies = LinearScores.apply(*inputs, coefficients)
    return TokenScores(logprobs, is_argmax, entropies, weighted_sum)


def _check(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, head_bias: Tensor | None, coefficients: Tensor | None
) -> None:
    if hidden.ndim != 2 or head_weight.ndim != 2 or hidden.shape[1] != head_weight.shape[1]:
        raise ValueError(
            f"score_targets: hidden {list(hidden.shape)} and head_weight {list(head_weight.shape)}; "
            "accepted are [N, H] and [V, H]"
        )
    rows, vocabulary = hidden.shape[0], head_weight.shape[0]
    if targets.shape != (rows,) or targets.dtype != torch.int64:
        raise ValueError(
            f"score_targets: targets {list(targets.shape)} {targets.dtype}; accepted is int64 of shape [{rows}], "
            "one target for each row of hidden"
        )
    if head_bias is not None and head_bias.shape != (vocabulary,):
        raise ValueError(f"score_targets: head_bias {list(head_bias.shape)}; accepted is [{vocabulary}]")
    if coefficients is not None:
        if coefficients.shape != (rows,) or not coefficients.is_floating_point():
            raise ValueError(
                f"score_targets: coefficients {list(coefficients.shape)} {coefficients.dtype}; accepted is a float "
                f"tensor of shape [{rows}], one coefficient for each target"
            )
        if coefficients.requires_grad:
            raise ValueError("score_targets: coefficients require a gradient; they are constants here: detach them")
    if rows and targets.device.type == "cpu":
        low, high = (int(bound) for bound in torch.aminmax(targets))
        if low < 0 or high >= vocabulary:
            index = int(((targets < 0) | (targets >= vocabulary)).nonzero()[0])
            raise ValueError(
                f"score_targets: targets[{index}] is {int(targets[index])}; accepted are ids from 0 to "
                f"{vocabulary - 1}, the rows of head_weight (rows that are not trained must not be selected)"
            )
