"""One optimizer step: microbatches -> forward -> loss sums -> one denominator -> backward -> clip -> update.

Everything that the loss is divided by is counted over the whole step, all microbatches and all ranks, before the first
forward. So neither loss nor gradient depends on how the step's sequences are laid out or split.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from recipes.losses.aggregate import (
    StepCounts,
    Tokens,
    count_batch,
    denominator,
    select_tokens,
    token_coefficients,
    weighted_sum,
)
from recipes.losses.logprobs import TokenScores
from recipes.losses.loss import Loss
from recipes.models.gradients import assert_gradients_reach
from recipes.training.ranks import rank_and_world, sum_over_ranks

Batch = Mapping[str, Tensor]
Observe = Callable[[TokenScores, Tokens], None]


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    Attributes:
        loss: The number that was differentiated; None where the step had no weight.
        grad_norm: Euclidean norm of the whole gradient before clipping; None where there was no backward.
        lr: Learning rate of this step.
        tokens: Real input tokens, all ranks.
        weight_total: Sum of absolute weights, all ranks.
        updated: Whether the optimizer stepped.
    """

    loss: float | None
    grad_norm: float | None
    lr: float
    tokens: int
    weight_total: float
    updated: bool

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient are finite; a step without weight is."""
        return all(math.isfinite(value) for value in (self.loss, self.grad_norm) if value is not None)


def train_step(
    model: nn.Module,
    microbatches: Sequence[Batch],
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    *,
    lr: float | None = None,
    grad_clip: float = 0.0,
    accelerator: Accelerator | None = None,
    check_gradients: bool = False,
    observe: Observe | None = None,
) -> StepResult:
    """Take one optimizer step over this rank's microbatches.

    Args:
        model: A `ScoringModel`, as it is or wrapped by `accelerator.prepare_model`.
        microbatches: Collated batches, as many on every rank; a rank with nothing to train on brings a filler.
        loss: An object of `recipes.losses`.
        optimizer: Updated in place; its gradients are cleared before and after.
        lr: Learning rate of this step; None leaves the optimizer's.
        grad_clip: Largest gradient norm; 0 turns clipping off.
        accelerator: Needed with several ranks; None: one process.
        check_gradients: Refuse a model of which a trainable tensor got no gradient; for the first step.
        observe: Called with the scores (detached) and tokens of every microbatch, for statistics beside the loss.

    Returns:
        The step's numbers. Where loss or gradient is not finite, or the step has no weight, parameters and optimizer
        state are as before (`updated` is False).

    Raises:
        ModelError: `check_gradients` found a tensor without gradient.
        DataError: A batch lacks a field that the loss reads.
    """
    device = next(model.parameters()).device
    counts = count_step(microbatches, device)
    if lr is not None:
        for group in optimizer.param_groups:
            group["lr"] = lr
    lr = optimizer.param_groups[0]["lr"]
    optimizer.zero_grad(set_to_none=True)
    if counts.weight_total == 0:
        return StepResult(None, None, lr, counts.tokens, 0.0, updated=False)

    divisor = denominator(counts, loss.aggregation, loss.max_tokens)
    _, world_size = rank_and_world()
    step_sum = torch.zeros((), dtype=torch.float64)
    for index, batch in enumerate(microbatches):
        is_last = index == len(microbatches) - 1
        with nullcontext() if is_last or accelerator is None else accelerator.no_sync(model):
            loss_sum = microbatch_loss(model, batch, loss, observe)
            (loss_sum * (world_size / divisor)).backward()  # ranks average their gradients: times world_size is the sum
        step_sum += loss_sum.detach().to("cpu", torch.float64)
    step_loss = float(sum_over_ranks(step_sum.to(device))) / divisor

    if check_gradients:
        assert_gradients_reach(model)
    trainable = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    grad_norm = float(torch.nn.utils.clip_grad_norm_(trainable, grad_clip or math.inf))
    result = StepResult(step_loss, grad_norm, lr, counts.tokens, counts.weight_total, updated=True)
    if not result.is_finite:
        optimizer.zero_grad(set_to_none=True)
        return StepResult(step_loss, grad_norm, lr, counts.tokens, counts.weight_total, updated=False)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return result


def count_step(microbatches: Sequence[Batch], device: torch.device) -> StepCounts:
    """Count weights, sequences and tokens of a step over all microbatches and ranks."""
    counts = sum((count_batch(batch) for batch in microbatches), StepCounts())
    return StepCounts.from_tensor(sum_over_ranks(counts.as_tensor(device)))


def microbatch_loss(model: nn.Module, batch: Batch, loss: Loss, observe: Observe | None = None) -> Tensor:
    """Sum of coefficient times loss term over the weighted positions of one microbatch, float64, not yet divided."""
    device = next(model.parameters()).device
    batch = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
    tokens, selected, targets = select_tokens(batch)
    coefficients = token_coefficients(tokens, loss.aggregation)
    if loss.linear:  # the term is linear_scale times the log-probability: its gradient is formed in the forward pass
        scores = model(
            batch, targets, selected, coefficients=coefficients * loss.linear_scale, temperature=loss.temperature
        )
        if observe is not None:
            observe(scores, tokens)
        return scores.weighted_sum
    scores = model(batch, targets, selected, temperature=loss.temperature, entropy=loss.needs_entropy)
    if observe is not None:
        entropy = None if scores.entropy is None else scores.entropy.detach()
        observe(TokenScores(scores.logprobs.detach(), scores.is_argmax, entropy), tokens)
    return weighted_sum(coefficients, loss(scores.logprobs, tokens))
