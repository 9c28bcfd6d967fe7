"""What a policy step says about itself: ratios, clipping, the gap to sampler and reference, entropy."""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from recipes.losses.aggregate import Tokens
from recipes.losses.logprobs import TokenScores
from recipes.losses.policy import PolicyLoss, kl_terms
from recipes.training.ranks import rank_and_world, sum_over_ranks

__all__ = ["ON_POLICY_TOLERANCE", "PolicyStatistics"]

ON_POLICY_TOLERANCE = 1e-4
"""Largest |p - o| of a step that counts as on-policy."""

_SUMS = (
    "tokens",
    "ratio",  # exp(p - o)
    "clipped",
    "importance",  # exp(p - b)
    "importance_squared",
    "mismatch",  # exp(d) - d - 1
    "masked",
    "entropy",
    "has_entropy",  # tokens
    "kl",
    "has_reference",  # microbatches
)
_MAXIMA = ("gap", "mismatch")


class PolicyStatistics:
    """Observer of the microbatches of one step; `metrics` gives means over the trained tokens of all ranks.

    Sums are float64 (float32 on mps) and stay on the device until `metrics`. Every token counts once, whatever its
    weight. With p, o, b as in `recipes.losses.policy`, and d = o - b where the batch has `old_logprobs`, else p - b:

        ratio/mean              mean of exp(p - o)
        ratio/clip_frac         share of tokens whose term the loss's clip changes
        ratio/on_policy         whether |p - o| <= 1e-4 at every token
        ratio/ess               (sum of exp(p - b))^2 / (n sum of exp(p - b)^2), in (0, 1]
        mismatch/kl             mean of exp(d) - d - 1, an estimate of KL(sampler || trainer)
        mismatch/max_abs        largest |d|
        correction/masked_frac  share of tokens with rho = 0
        entropy/mean            nats
        kl/ref                  mean of k3 of p against the reference; absent without `ref_logprobs`

    Args:
        loss: The step's loss; tells what is clipped and masked.
        device: Where a rank that observed nothing takes part in sums over ranks.
    """

    def __init__(self, loss: PolicyLoss, device: torch.device | str = "cpu") -> None:
        self.loss = loss
        self._device = torch.device(device)
        self._sums: Tensor | None = None
        self._maxima: Tensor | None = None

    def __call__(self, scores: TokenScores, tokens: Tokens) -> None:
        """Take in one microbatch; neither argument is changed or kept."""
        with torch.no_grad():
            sums, maxima = self._of_microbatch(scores, tokens)
        self._sums = sums if self._sums is None else self._sums + sums
        self._maxima = maxima if self._maxima is None else torch.maximum(self._maxima, maxima)

    def metrics(self) -> dict[str, float | None]:
        """Return the step's numbers; every rank must call it.

        None stands for a mean over no token and for a value that is not finite. `ratio/on_policy` is a bool.
        """
        sums, maxima = self._over_ranks()
        tokens = sums["tokens"]

        def mean(name: str, count: float = tokens) -> float | None:
            return _finite(sums[name] / count) if count else None

        metrics = {
            "ratio/mean": mean("ratio"),
            "ratio/clip_frac": mean("clipped"),
            "ratio/on_policy": maxima["gap"] <= ON_POLICY_TOLERANCE if tokens else None,
            "ratio/ess": _effective_share(sums["importance"], sums["importance_squared"], tokens),
            "mismatch/kl": mean("mismatch"),
            "mismatch/max_abs": _finite(maxima["mismatch"]) if tokens else None,
            "correction/masked_frac": mean("masked"),
            "entropy/mean": mean("entropy", sums["has_entropy"]),
        }
        if sums["has_reference"]:
            metrics["kl/ref"] = mean("kl")
        return metrics

    def _of_microbatch(self, scores: TokenScores, tokens: Tokens) -> tuple[Tensor, Tensor]:
        wide = torch.float32 if scores.logprobs.device.type == "mps" else torch.float64
        p, sampler = scores.logprobs.detach(), tokens.get("logprobs").to(wide)
        gap = p.to(wide) - self.loss.old_logprobs(tokens).to(wide)
        behind = p.to(wide) - sampler
        mismatch = tokens.fields["old_logprobs"].to(wide) - sampler if "old_logprobs" in tokens.fields else behind
        rho = self.loss.correction_weights(tokens)
        none = torch.zeros_like(gap)
        reference = tokens.fields.get("ref_logprobs")
        per_token = {
            "tokens": torch.ones_like(gap),
            "ratio": gap.exp(),
            "clipped": self.loss.is_clipped(p, tokens),
            "importance": behind.exp(),
            "importance_squared": (2 * behind).exp(),
            "mismatch": mismatch.expm1() - mismatch,
            "masked": none if rho is None else rho == 0,
            "entropy": none if scores.entropy is None else scores.entropy.detach(),
            "has_entropy": torch.full_like(gap, scores.entropy is not None),
            "kl": none if reference is None else kl_terms("k3", p.to(wide), reference.to(wide)),
        }
        sums = {name: values.to(wide).sum() for name, values in per_token.items()}
        sums["has_reference"] = torch.tensor(float(reference is not None), dtype=wide, device=p.device)
        maxima = [values.abs().max() if len(tokens) else values.sum() for values in (gap, mismatch)]
        return torch.stack([sums[name] for name in _SUMS]), torch.stack(maxima)

    def _over_ranks(self) -> tuple[dict[str, float], dict[str, float]]:
        wide = torch.float32 if self._device.type == "mps" else torch.float64
        sums = torch.zeros(len(_SUMS), dtype=wide, device=self._device) if self._sums is None else self._sums
        maxima = torch.zeros(len(_MAXIMA), dtype=wide, device=self._device) if self._maxima is None else self._maxima
        sums = sum_over_ranks(sums)
        if rank_and_world()[1] > 1:
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        return dict(zip(_SUMS, sums.tolist())), dict(zip(_MAXIMA, maxima.tolist()))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _effective_share(total: float, squares: float, count: float) -> float | None:
    if not count or not squares or not math.isfinite(total) or not math.isfinite(squares):
        return None
    return min(total / squares * total / count, 1.0)  # rounding alone takes it above 1
