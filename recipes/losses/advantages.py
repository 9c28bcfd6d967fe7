"""From the rewards of groups of completions to advantages; plain float64, no tensors.

A group holds the completions of one prompt. A reward of None is an abstention: it is out of every mean and deviation.
With r the rewards, mean_g and std_g over a group, mean_b and std_b over the rollout batch (of all ranks):

    group_mean    r - mean_g
    grpo          (r - mean_g) / (std_g + eps)
    rloo          r - mean of the others in the group
    batch_std     (r - mean_g) / (std over the batch of r - mean_g, + eps)
    reinforce_pp  (r - mean_b) / (std_b + eps)
    none          r

Sources: docs/losses.md.
"""

import math
from collections.abc import Sequence

from conf.closed import ConfigError
from conf.policy import ADVANTAGES, NEEDS_GROUP

__all__ = ["ADVANTAGES", "NEEDS_GROUP", "frac_zero_std", "group_advantages", "kl_in_reward", "length_penalty"]

Group = Sequence[float | None]


def group_advantages(
    rewards: Sequence[Group], name: str, *, eps: float = 1e-6, std: str = "sample"
) -> list[list[float] | None]:
    """Return the advantage of each reward.

    A group whose rewards are all equal has advantages of exactly 0 under a group baseline, as has a batch whose rewards
    are all equal under `reinforce_pp`, however the mean rounds.

    Args:
        rewards: Of the whole rollout batch, group by group; None abstains.
        name: Estimator, one of `ADVANTAGES`.
        eps: Added to a standard deviation before dividing, from 0.
        std: `sample` divides squares by n - 1, `population` by n.

    Returns:
        Group by group: the advantages, 0.0 where the reward abstains; or None where fewer than two rewards are left to
        an estimator of `NEEDS_GROUP`.

    Raises:
        ConfigError: No such estimator or deviation, or `eps` is below 0.
        ValueError: A reward is not finite.

    >>> group_advantages([[1, 0, 0, 0]], "grpo", eps=0)
    [[1.5, -0.5, -0.5, -0.5]]
    >>> group_advantages([[1, None, 0], [None, 2, None]], "group_mean")
    [[0.5, 0.0, -0.5], None]
    """
    _check(rewards, name, eps, std)
    if name == "none":
        return [[0.0 if reward is None else float(reward) for reward in group] for group in rewards]
    if name == "reinforce_pp":
        baseline, scale = _mean(_given(rewards)), 1 / _spread(_given(rewards), eps, std)
        is_flat = _is_flat(_given(rewards))
        return [_scaled(group, 0.0 if is_flat else scale, baseline) for group in rewards]
    centred = [_centred(group) for group in rewards]
    if name == "batch_std":
        kept = [group for group in centred if group is not None]
        scale = 1 / _spread(_given(kept), eps, std)
        return [None if group is None else _scaled(group, scale) for group in centred]
    return [None if group is None else _scaled(group, _group_scale(group, name, eps, std)) for group in centred]


def frac_zero_std(rewards: Sequence[Group]) -> float | None:
    """Return the share of groups whose rewards are all equal, among those with two rewards or more; None without any.

    >>> frac_zero_std([[1, 1], [1, 0], [1, None]])
    0.5
    """
    groups = [given for given in (_given([group]) for group in rewards) if len(given) > 1]
    return sum(map(_is_flat, groups)) / len(groups) if groups else None


def kl_in_reward(old: Sequence[float], ref: Sequence[float], weights: Sequence[float]) -> float:
    """Return sum of w (o - ref) over a sequence: k1, to be taken from its reward, times `loss.kl.coef`.

    Args:
        old: Log-probabilities under the policy that is about to be trained.
        ref: The same under the reference.
        weights: Loss weights; where one is 0 the two others are not read.

    Raises:
        ValueError: The three differ in length.
    """
    if not len(old) == len(ref) == len(weights):
        raise ValueError(
            f"kl_in_reward: {len(old)} old, {len(ref)} reference log-probabilities and {len(weights)} weights; "
            "accepted is one of each a token"
        )
    return math.fsum(w * (o - r) for o, r, w in zip(old, ref, weights) if w != 0)


def length_penalty(length: int, max_new_tokens: int, penalty_tokens: int) -> float:
    """Return what a completion's length adds to its reward: 0, falling to -1 over the last `penalty_tokens`.

    Source: DAPO (arXiv:2503.14476), equation 13.

    Raises:
        ConfigError: `penalty_tokens` is not from 1 to `max_new_tokens`.

    >>> [length_penalty(length, 16, 4) for length in (12, 13, 15, 16)]
    [0.0, -0.25, -0.75, -1.0]
    """
    if not 1 <= penalty_tokens <= max_new_tokens:
        raise ConfigError(
            f"rollout.penalty_tokens={penalty_tokens}: accepted are whole numbers from 1 to rollout.max_new_tokens="
            f"{max_new_tokens}"
        )
    return max(min((max_new_tokens - penalty_tokens - length) / penalty_tokens, 0.0), -1.0)


def _centred(group: Group) -> list[float | None] | None:
    """The group less its mean; None where fewer than two rewards are left."""
    given = _given([group])
    if len(given) < 2:
        return None
    baseline = given[0] if _is_flat(given) else _mean(given)
    return [None if reward is None else reward - baseline for reward in group]


def _group_scale(centred: Group, name: str, eps: float, std: str) -> float:
    given = _given([centred])
    if name == "rloo":  # r - (n mean - r) / (n - 1) = n / (n - 1) * (r - mean)
        return len(given) / (len(given) - 1)
    return 1 / _spread(given, eps, std) if name == "grpo" else 1.0


def _scaled(group: Group, scale: float, baseline: float = 0.0) -> list[float]:
    return [0.0 if reward is None else (reward - baseline) * scale + 0.0 for reward in group]


def _spread(values: Sequence[float], eps: float, std: str) -> float:
    """Standard deviation plus eps; 1 where all values are equal, since they are then at their mean."""
    if _is_flat(values):
        return 1.0
    mean = _mean(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return math.sqrt(squares / (len(values) - (std == "sample"))) + eps


def _given(groups: Sequence[Group]) -> list[float]:
    return [float(reward) for group in groups for reward in group if reward is not None]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _is_flat(values: Sequence[float]) -> bool:
    return all(value == values[0] for value in values)


def _check(rewards: Sequence[Group], name: str, eps: float, std: str) -> None:
    if name not in ADVANTAGES:
        raise ConfigError(f"advantage={name}: accepted are {', '.join(ADVANTAGES)}")
    if std not in ("sample", "population"):
        raise ConfigError(f"advantage.std={std}: accepted are sample, population")
    if not 0 <= eps < math.inf:
        raise ConfigError(f"advantage.eps={eps}: accepted are finite numbers from 0")
    for index, group in enumerate(rewards):
        for place, reward in enumerate(group):
            if reward is not None and not math.isfinite(reward):
                raise ValueError(
                    f"group {index}: reward {place} is {reward}; accepted are finite numbers, and None to abstain"
                )
