"""The objective of a run in plain text, with a worked example: what is printed before the first step."""

import torch

from conf.schema import Aggregation
from recipes.losses.advantages import NEEDS_GROUP, group_advantages
from recipes.losses.aggregate import StepCounts, Tokens, denominator, token_coefficients, weighted_sum
from recipes.losses.loss import Loss
from recipes.losses.policy import PolicyLoss

__all__ = ["objective_text", "on_policy_note", "worked_example"]

_STEP_LOSS = {
    Aggregation.token: "sum of w l over the step's trained tokens / sum of |w| over them",
    Aggregation.sequence: "mean over the step's sequences of (sum of w l / sum of |w| of the sequence)",
    Aggregation.constant: "sum of w l over the step's trained tokens / {divisor}",
    Aggregation.sum: "sum of w l over the step's trained tokens",
}
_ADVANTAGE = {
    "group_mean": "R - mean of its group",
    "grpo": "(R - mean of its group) / ({std} std of its group + {eps:g})",
    "rloo": "R - mean of the others in its group",
    "batch_std": "(R - mean of its group) / ({std} std of such differences in the rollout batch + {eps:g})",
    "reinforce_pp": "(R - mean of the rollout batch) / ({std} std of the rollout batch + {eps:g})",
    "none": "R",
}
_KL = {"k1": "p - ref", "k2": "(p - ref)^2 / 2", "k3": "exp(ref - p) - (ref - p) - 1"}

_EXAMPLE_REWARDS = ((1.0, 0.0, 0.0), (1.0, 1.0, 1.0))
_EXAMPLE_LENGTHS = (1, 3, 2, 2, 2, 2)


def objective_text(
    loss: Loss, advantage_name: str, *, group_size: int, samples: int, eps: float = 1e-6, std: str = "sample"
) -> str:
    """Return the objective with its denominators, a few lines.

    Args:
        loss: The run's loss, with its options.
        advantage_name: Name of the advantage estimator.
        group_size: Completions a prompt.
        samples: Completions an optimizer step, over all ranks.
        eps: Added to a standard deviation.
        std: `sample` or `population`.
    """
    divisor = f"(the step's sequences, {samples} where no group is dropped, x {loss.max_tokens})"
    lines = [
        f"loss = {_STEP_LOSS[loss.aggregation].format(divisor=divisor)}  (aggregation={loss.aggregation.value})",
        f"up to {samples} completions a step, {group_size} a prompt; counts run over all microbatches and ranks",
    ]
    if isinstance(loss, PolicyLoss):
        rho = "" if loss.correction == "none" else "rho * "
        kl = f" + {loss.kl_coef:g} ({_KL[loss.kl_estimator]})" if loss.kl_in_loss else ""
        lines.append(f"l = {rho}[{loss.formula}]{kl}")
        lines += [f"r = {loss.ratio_formula}"] if loss.ratio_formula else []
        lines += _correction_text(loss)
    else:
        lines.append(f"l = {type(loss).__name__}")
    lines.append(f"A = {_ADVANTAGE[advantage_name].format(std=std, eps=eps)}  (advantage={advantage_name})")
    if isinstance(loss, PolicyLoss) and loss.kl_coef > 0 and not loss.kl_in_loss:
        lines.append(f"R = reward - {loss.kl_coef:g} * sum of w (o - ref) over the completion")
    else:
        lines.append("R = reward of the completion")
    lines += [
        "p, b: log-probability of the token under the model in training, and under the sampler",
        "o: under the trainer before the batch's first update, where that is computed, else b; sg(): as a constant",
    ]
    return "\n".join(lines)


def worked_example(loss: Loss, advantage_name: str, eps: float = 1e-6, std: str = "sample") -> str:
    """Return two groups of rewards, their advantages, and the loss and gradient at ratio 1, computed by the loss."""
    groups = group_advantages(_EXAMPLE_REWARDS, advantage_name, eps=eps, std=std)
    advantages = [value for group in groups if group is not None for value in group]
    sequence = torch.arange(len(_EXAMPLE_LENGTHS)).repeat_interleave(torch.tensor(_EXAMPLE_LENGTHS))
    p = torch.full((len(sequence),), -1.0, dtype=torch.float64, requires_grad=True)
    fields = {name: p.detach() for name in ("logprobs", "old_logprobs", "ref_logprobs")}
    fields["advantages"] = torch.tensor(advantages, dtype=torch.float64)[sequence]
    weights = torch.ones(len(sequence))
    tokens = Tokens(weights, sequence, len(_EXAMPLE_LENGTHS), torch.zeros_like(sequence), fields)
    counts = StepCounts(len(sequence), len(_EXAMPLE_LENGTHS), len(_EXAMPLE_LENGTHS), len(sequence))
    value = weighted_sum(token_coefficients(tokens, loss.aggregation), loss(p, tokens))
    value = value / denominator(counts, loss.aggregation, loss.max_tokens)
    (gradient,) = torch.autograd.grad(value, p)
    by_p = [_number(float(gradient[sequence == index][0])) for index in range(len(_EXAMPLE_LENGTHS))]
    lines = [
        "example: two prompts, three completions each, of 1, 3, 2 and 2, 2, 2 tokens, all p = o = b = ref = -1",
        f"  rewards      {_groups([_number(reward) for group in _EXAMPLE_REWARDS for reward in group])}",
        f"  advantages   {_groups([_number(advantage) for advantage in advantages])}",
        f"  loss         {_number(float(value.detach()))}",
        f"  d loss / d p {_groups(by_p)}  (at each token of the completion)",
    ]
    if advantage_name in NEEDS_GROUP:
        lines.append("  the second group's rewards are equal: its advantages are exactly 0")
    return "\n".join(lines)


def on_policy_note() -> str:
    """Return why a loss of 0 is no sign that nothing is learnt."""
    return (
        "note: a loss near 0 is no sign that nothing is learnt. At the first update of a rollout batch every ratio is "
        "1, no ratio is clipped, and advantages with a baseline add up to about 0; the gradient, that of -A p, is not "
        "0: watch train/grad_norm and reward/mean, not train/loss"
    )


def _correction_text(loss: PolicyLoss) -> list[str]:
    if loss.correction == "none":
        return []
    rho = "exp(o - b)" if loss.correction_level == "token" else "exp(sum of o - b over the sequence)"
    if loss.correction == "truncate":
        return [f"rho = min({rho}, {loss.correction_cap:g}), a constant"]
    return [f"rho = {rho} inside of [{loss.correction_low:g}, {loss.correction_cap:g}], else 0; a constant"]


def _number(value: float) -> str:
    return f"{value:.4f}".rstrip("0").rstrip(".") if abs(value) >= 5e-5 else "0"


def _groups(values: list[str]) -> str:
    size = len(_EXAMPLE_REWARDS[0])
    return "  ".join(f"[{', '.join(values[start : start + size])}]" for start in range(0, len(values), size))
