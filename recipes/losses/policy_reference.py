"""The policy losses in their plain form: float64, one token at a time, from the formulas. Tests compare the two."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ReferenceOptions", "ReferenceSequence", "step_loss_reference"]


@dataclass
class ReferenceSequence:
    """One sequence: float64 [T], of trained and untrained positions alike; `p` carries the gradient."""

    p: Tensor
    weights: list[float]
    logprobs: list[float]
    advantages: list[float]
    old_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None


@dataclass
class ReferenceOptions:
    """Options as in the configuration, of all losses together."""

    name: str
    aggregation: str = "token"
    max_tokens: int | None = None
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    variant: str = "sequence"
    beta: float = 0.05
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_place: str = "loss"
    correction: str = "none"
    correction_level: str = "token"
    correction_cap: float = 2.0
    correction_low: float = 0.0


def step_loss_reference(sequences: Sequence[ReferenceSequence], options: ReferenceOptions) -> Tensor:
    """Return the loss of a step over `sequences`, a float64 scalar with gradient."""
    sums: list[Tensor] = []
    sizes: list[float] = []
    for sequence in sequences:
        trained = [t for t, weight in enumerate(sequence.weights) if weight != 0]
        total = 0.0 * sequence.p[trained].sum()
        for t in trained:
            term = _correction(sequence, trained, t, options) * _term(sequence, trained, t, options)
            if options.kl_place == "loss" and options.kl_coef > 0 and sequence.ref_logprobs is not None:
                term = term + options.kl_coef * _kl(sequence.p[t], sequence.ref_logprobs[t], options.kl_estimator)
            total = total + sequence.weights[t] * term
        sums.append(total)
        sizes.append(sum(abs(weight) for weight in sequence.weights))
    whole = sum(sums, torch.zeros((), dtype=torch.float64))
    if options.aggregation == "sum" or not any(sizes):
        return whole
    if options.aggregation == "token":
        return whole / sum(sizes)
    if options.aggregation == "constant":
        assert options.max_tokens is not None
        return whole / (len(sequences) * options.max_tokens)
    means = [total / size for total, size in zip(sums, sizes) if size > 0]
    return sum(means, torch.zeros((), dtype=torch.float64)) / len(means)


def _old(sequence: ReferenceSequence) -> list[float]:
    return sequence.logprobs if sequence.old_logprobs is None else sequence.old_logprobs


def _term(sequence: ReferenceSequence, trained: list[int], t: int, options: ReferenceOptions) -> Tensor:
    p, o, advantage = sequence.p[t], _old(sequence)[t], sequence.advantages[t]
    ratio = torch.exp(p - o)
    if options.name == "importance_sampling":
        return -ratio * advantage
    if options.name == "cispo":
        return -_clip(ratio, options).detach() * advantage * p
    if options.name == "dro":
        return -(advantage * p - options.beta / 2 * (p - o) ** 2)
    if options.name == "gspo":
        mean = sum((sequence.p[i] - _old(sequence)[i] for i in trained), torch.zeros_like(p)) / len(trained)
        ratio = torch.exp(mean)
        if options.variant == "token":
            ratio = ratio.detach() * torch.exp(p - p.detach())
    surrogate = torch.minimum(ratio * advantage, _clip(ratio, options) * advantage)
    if options.dual_clip is not None and advantage < 0:
        surrogate = torch.maximum(surrogate, torch.full_like(surrogate, options.dual_clip * advantage))
    return -surrogate


def _clip(ratio: Tensor, options: ReferenceOptions) -> Tensor:
    return ratio.clamp(1 - options.clip_low, 1 + options.clip_high)


def _correction(sequence: ReferenceSequence, trained: list[int], t: int, options: ReferenceOptions) -> float:
    if options.correction == "none":
        return 1.0
    over = [t] if options.correction_level == "token" else trained
    difference = sum(_old(sequence)[i] - sequence.logprobs[i] for i in over)
    rho = float(torch.tensor(difference, dtype=torch.float64).exp())
    if options.correction == "truncate":
        return min(rho, options.correction_cap)
    return rho if options.correction_low <= rho <= options.correction_cap else 0.0


def _kl(p: Tensor, ref: float, estimator: str) -> Tensor:
    if estimator == "k1":
        return p - ref
    if estimator == "k2":
        return (p - ref) ** 2 / 2
    return torch.exp(ref - p) - (ref - p) - 1
