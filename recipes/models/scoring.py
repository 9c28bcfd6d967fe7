"""`ScoringModel`: a language model that answers with the log-probabilities of targets instead of logits.

It is what Accelerate wraps. The head is applied inside of its forward, so that parallel wrappers see the head's
gradient like any other, and only to the positions that carry weight.
"""

from collections.abc import Mapping
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from conf.schema import Backend, PositionAxes, Scope
from recipes.losses.logprobs import TokenScores, score_targets
from recipes.models.head import Head, read_head
from recipes.models.inputs import model_inputs

__all__ = ["ScoringModel", "base_of", "score_logits"]


def base_of(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The Transformers model within a PEFT model, adapters in place; any other model is its own base."""
    return model.get_base_model() if isinstance(model, PeftModel) else model  # type: ignore[return-value]


class ScoringModel(nn.Module):
    """Log-probabilities of targets under a causal language model.

    The head is read once, at construction, and checked against the model's own logits. Where it cannot be read, full
    logits are formed instead.

    Args:
        hf: The model, with its attention backend set, perhaps with adapters.
        backend: That backend.
        scope: Who sees whom in a packed row.
        axes: Rotary axes the model takes.

    Attributes:
        hf: The model, for generation and export.
        head: How logits come from hidden states; None where the model's own full logits are used.
        full_logits_reason: Why `head` is None, else None.
    """

    def __init__(
        self,
        hf: PreTrainedModel | PeftModel,
        *,
        backend: Backend,
        scope: Scope = Scope.per_document,
        axes: PositionAxes = PositionAxes.rope,
    ):
        super().__init__()
        self.hf = hf
        self.backend, self.scope, self.axes = backend, scope, axes
        found = read_head(base_of(hf))
        self.head: Head | None = None if isinstance(found, str) else found
        self.full_logits_reason: str | None = found if isinstance(found, str) else None

    def forward(
        self,
        batch: Mapping[str, Any],
        targets: Tensor,
        selected: Tensor,
        *,
        coefficients: Tensor | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> TokenScores:
        """Score the selected positions of one microbatch.

        Args:
            batch: A collated batch on the model's device, or what `model_inputs` made of one.
            targets: [B, S] int64; read where selected.
            selected: [B, S] bool; N positions are selected. With none, results are empty or 0 and gradients are 0.
            coefficients: [N] float constants, for losses that are linear in the log-probabilities.
            temperature: Logits are divided by it.
            entropy: Return entropies too.

        Returns:
            Scores of the N positions in row-major order, float32. The gradient stands in `weighted_sum` where
            coefficients are given, else in `logprobs` and `entropy`.
        """
        inputs = batch
        if "use_cache" not in batch:
            inputs = model_inputs(batch, backend=self.backend, scope=self.scope, axes=self.axes)
        options: dict[str, Any] = {"coefficients": coefficients, "temperature": temperature, "entropy": entropy}
        positions = selected.flatten().nonzero().squeeze(1)
        wanted = targets.flatten().index_select(0, positions)
        if self.head is None:
            logits = self.hf(**inputs).logits
            return score_logits(logits.flatten(0, 1).index_select(0, positions), wanted, **options)
        base = base_of(self.hf)
        hidden = base.base_model(**inputs).last_hidden_state
        linear = base.get_output_embeddings()
        return score_targets(
            hidden.flatten(0, 1).index_select(0, positions),
            linear.weight,
            wanted,
            head_bias=linear.bias,
            softcap=self.head.softcap,
            logit_scale=self.head.scale,
            **options,
        )


def score_logits(
    logits: Tensor,
    targets: Tensor,
    *,
    coefficients: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
) -> TokenScores:
    """`score_targets` for a model whose head cannot be read: from the logits it gives.

    Args:
        logits: [N, V].
        targets: [N] int64.
        coefficients: [N]; as for `score_targets`.
        temperature: Logits are divided by it.
        entropy: Return entropies too.
    """
    log_p = torch.log_softmax(logits.float() / temperature, dim=-1)
    logprobs = log_p.gather(1, targets[:, None]).squeeze(1)
    is_argmax = logprobs.detach() == log_p.detach().amax(-1)
    entropies = -(log_p.exp() * log_p).sum(-1) if entropy else None
    if coefficients is None:
        return TokenScores(logprobs, is_argmax, entropies)
    wide = torch.float32 if logits.device.type == "mps" else torch.float64
    weighted_sum = (coefficients.to(wide) * logprobs.to(wide)).sum()
    return TokenScores(logprobs.detach(), is_argmax, None if entropies is None else entropies.detach(), weighted_sum)
