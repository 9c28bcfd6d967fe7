"""What all policy losses share: fields, sampler correction, KL to a reference, checks of options.

For each trained token, with p the log-probability under the model in training, b the sampler's (`logprobs`), o the one
that ratios are taken against (`old_logprobs`, else b), A the advantage:

    term = rho * (the loss's own term of p, o, A) + kl.coef * KL(p, ref)

    rho  correction of the sampler, a constant: exp(o - b), or exp(sum of o - b over the sequence); 1 where it is off
    KL   k1 = p - ref,  k2 = (p - ref)^2 / 2,  k3 = exp(ref - p) - (ref - p) - 1; not multiplied by rho

Untrained positions are not among `tokens`, so every sum over a sequence is one over its trained tokens.
"""

import logging
import math
from abc import ABC, abstractmethod
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from conf.closed import ConfigError
from conf.policy import KLConfig, check_correction
from conf.schema import Aggregation
from recipes.losses.aggregate import Tokens, check_aggregation

__all__ = ["PolicyLoss", "SharedOptions", "check_number", "check_option", "kl_terms"]

log = logging.getLogger(__name__)

_CORRECTIONS = ("none", "truncate", "mask")
_LEVELS = ("token", "sequence")
_ESTIMATORS = ("k1", "k2", "k3")
_PLACES = ("loss", "reward")


class SharedOptions(TypedDict, total=False):
    """Options of every policy loss; see `PolicyLoss`."""

    aggregation: Aggregation | str
    max_tokens: int | None
    temperature: float
    kl: KLConfig
    correction: str
    correction_level: str
    correction_cap: float
    correction_low: float


class PolicyLoss(ABC):
    """Base of the policy losses; a subclass gives `term`. A `recipes.losses.loss.Loss`.

    The entropy of each row is asked for to be logged; no loss reads it.

    Args:
        aggregation: How the step's terms become one number (docs/losses.md).
        max_tokens: Divisor a sequence of `constant`; None for the other modes.
        temperature: The one the tokens were sampled at; p is taken at it.
        kl: Coefficient, estimator and place of the KL to a reference; None is none. In the reward it is no part of the
            loss (`recipes.losses.advantages.kl_in_reward`).
        correction: `truncate` is min(rho, cap); `mask` is rho inside of [low, cap] and 0 elsewhere; `none`.
        correction_level: Whether rho is of the token or of its sequence.
        correction_cap: Largest rho.
        correction_low: Smallest rho that `mask` keeps.

    Raises:
        ConfigError: An option is out of range.
        ValueError: `aggregation` and `max_tokens` do not go together.
    """

    linear = False
    linear_scale = 0.0
    needs_entropy = True
    ratio_formula = "exp(p - o)"  # what r stands for in `formula`; empty: it does not occur

    def __init__(self, **options: Unpack[SharedOptions]) -> None:
        unknown = options.keys() - SharedOptions.__annotations__.keys()
        if unknown:
            raise ConfigError(
                f"loss: {type(self).__name__} has no option {', '.join(sorted(unknown))}; choose it by its own "
                "loss=<name>"
            )
        kl = options.get("kl") or KLConfig()
        self.max_tokens = options.get("max_tokens")
        self.aggregation = check_aggregation(options.get("aggregation", "token"), self.max_tokens)
        self.temperature = check_number("rollout.temperature", options.get("temperature", 1.0), above=0)
        self.kl_coef = check_number("loss.kl.coef", kl.coef, low=0)
        self.kl_estimator = check_option("loss.kl.estimator", kl.estimator, _ESTIMATORS)
        self.kl_place = check_option("loss.kl.place", kl.place, _PLACES)
        self.correction = check_option("loss.correction", options.get("correction", "none"), _CORRECTIONS)
        self.correction_level = check_option("loss.correction_level", options.get("correction_level", "token"), _LEVELS)
        self.correction_cap = check_number("loss.correction_cap", options.get("correction_cap", 2.0), above=0)
        self.correction_low = check_number("loss.correction_low", options.get("correction_low", 0.0), low=0)
        check_correction(self.correction, low=self.correction_low, cap=self.correction_cap)
        self.required_fields: tuple[str, ...] = ("logprobs", "advantages")
        if self.kl_in_loss:
            self.required_fields += ("ref_logprobs",)
        if self.correction != "none":
            self.required_fields += ("old_logprobs",)
        if self.kl_in_loss and self.kl_estimator == "k1":
            log.warning(
                "loss.kl.estimator=k1 in the loss: its gradient has mean zero, so it adds noise and holds nothing near "
                "the reference; use k2 or k3, or loss.kl.place=reward"
            )

    @property
    def formula(self) -> str:
        """The term in plain text, with the options' values, for a reader of the run's log."""
        return type(self).__name__

    @property
    def kl_in_loss(self) -> bool:
        """Whether the term has a KL part."""
        return self.kl_coef > 0 and self.kl_place == "loss"

    def __call__(self, target_logprobs: Tensor, tokens: Tokens) -> Tensor:
        """Return the terms [N] of [N] target log-probabilities, neither weighted nor summed.

        Raises:
            DataError: The batch lacks one of `required_fields`.
        """
        terms = self.term(target_logprobs, self.old_logprobs(tokens), tokens.get("advantages"), tokens)
        rho = self.correction_weights(tokens)
        if rho is not None:
            terms = rho * terms
        if self.kl_in_loss:
            terms = terms + self.kl_coef * kl_terms(self.kl_estimator, target_logprobs, tokens.get("ref_logprobs"))
        return terms

    @abstractmethod
    def term(self, p: Tensor, o: Tensor, advantages: Tensor, tokens: Tokens) -> Tensor:
        """Return the loss's own term [N], before correction and KL."""

    def old_logprobs(self, tokens: Tokens) -> Tensor:
        """Return o [N], the log-probabilities that ratios are taken against."""
        return tokens.fields.get("old_logprobs", tokens.get("logprobs"))

    def log_ratio(self, p: Tensor, o: Tensor, tokens: Tokens) -> Tensor:
        """Return the logarithm [N] of the ratio that the loss reads; that of the token, unless overridden."""
        return p - o

    def is_clipped(self, p: Tensor, tokens: Tokens) -> Tensor:
        """Return [N] bool: the clip changes the token's term. False everywhere in a loss without a clip."""
        return torch.zeros_like(p, dtype=torch.bool)

    def correction_weights(self, tokens: Tokens) -> Tensor | None:
        """Return rho [N], 0 where it is masked; None where the correction is off."""
        if self.correction == "none":
            return None
        log_rho = tokens.get("old_logprobs") - tokens.get("logprobs")
        if self.correction_level == "sequence":
            log_rho = tokens.sum_by_sequence(log_rho)[tokens.sequence]
        rho = log_rho.detach().exp()
        if self.correction == "truncate":
            return rho.clamp(max=self.correction_cap)
        return rho.where((rho >= self.correction_low) & (rho <= self.correction_cap), 0.0)


def kl_terms(estimator: str, p: Tensor, ref: Tensor) -> Tensor:
    """Return an estimate [N] of KL(policy || reference) from sampled tokens; differentiable in p.

    Source: J. Schulman, Approximating KL Divergence (2020), whose r is exp(ref - p).

    >>> p, ref = torch.tensor([-1.0]), torch.tensor([-1.5])
    >>> [round(kl_terms(name, p, ref).item(), 6) for name in ("k1", "k2", "k3")]
    [0.5, 0.125, 0.106531]
    """
    difference = p - ref
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return torch.expm1(-difference) + difference


def check_number(
    key: str, value: float, *, low: float = -math.inf, high: float = math.inf, above: float | None = None
) -> float:
    """Return a finite number from `low` to `high`, or above `above`.

    Raises:
        ConfigError: It is not one.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if is_number and low <= value <= high and (above is None or value > above):
        return float(value)
    bounds = f"above {above:g}" if above is not None else f"from {low:g}" + (f" to {high:g}" if high < math.inf else "")
    raise ConfigError(f"{key}={value}: accepted are finite numbers {bounds}")


def check_option(key: str, value: Any, options: tuple[str, ...]) -> str:
    """Return the name of a choice, given by name or as an Enum whose value is the name.

    Raises:
        ConfigError: There is no such choice.
    """
    name = getattr(value, "value", value)
    if name not in options:
        raise ConfigError(f"{key}={name}: accepted are {', '.join(options)}")
    return str(name)
