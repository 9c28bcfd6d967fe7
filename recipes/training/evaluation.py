"""Evaluation on held-out rows: loss with the reducer of training, and accuracy of generated answers."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from datum.encode import DatumSet
from datum.packing import plan_microbatches
from torch import Tensor, nn

from conf.schema import CollateConfig, EvalConfig, Layout, Scope
from datum import collate_datums
from recipes.losses.aggregate import (
    StepCounts,
    count_batch,
    denominator,
    select_tokens,
    token_coefficients,
    weighted_sum,
)
from recipes.losses.loss import Loss
from recipes.models.build import LanguageModel
from recipes.training.answers import Answer, Question, Score, answer_questions
from recipes.training.ranks import rank_and_world, sum_over_ranks

log = logging.getLogger(__name__)


class Evaluation:
    """Held-out rows, ready to be evaluated at any step.

    Args:
        language_model: Model and tokenizer, unwrapped.
        heldout: Held-out Datums.
        questions: Held-out prompts with expected answers; may be empty.
        loss: The training loss.
        config: Batch size, lengths, samples shown.
        collate: Layout of training.
        score: Judges a completion.
    """

    def __init__(
        self,
        language_model: LanguageModel,
        heldout: DatumSet,
        questions: list[Question],
        loss: Loss,
        config: EvalConfig,
        collate: CollateConfig,
        max_tokens: int | None,
        scope: Scope,
        score: Score,
    ):
        self.language_model = language_model
        self.loss = loss
        self.config = config
        self.score = score
        self.heldout = heldout
        self.is_packed = collate.layout == Layout.packed
        rank, world_size = rank_and_world()
        self.questions = questions[rank::world_size]
        plan = plan_microbatches(
            heldout.lengths.tolist(),
            world_size=world_size,
            microbatch_size=None if self.is_packed else config.batch_size,
            max_tokens=max_tokens if self.is_packed else None,
            packing=collate.packing.value,
            fixed_rows=scope == Scope.xdoc,
        )
        self.plan = [indices for indices in plan[rank] if indices]
        self.answers: list[Answer] = []  # of the last run, this rank's share

    def run(self) -> dict[str, float]:
        """Evaluate the model as it is; every rank must call it, and all get the same numbers."""
        batches = (collate_datums([self.heldout[i] for i in plan], packed=self.is_packed) for plan in self.plan)
        row = evaluate_loss(self.language_model.scoring, batches, self.loss)
        if self.questions:
            self.answers = answer_questions(
                self.language_model.model,
                self.language_model.tokenizer,
                self.questions,
                score=self.score,
                batch_size=self.config.batch_size,
                max_new_tokens=self.config.max_new_tokens,
            )
        sums = torch.tensor([sum(a.score for a in self.answers), len(self.answers)], dtype=torch.float64)
        right, asked = sum_over_ranks(sums.to(next(self.language_model.model.parameters()).device)).tolist()
        return row | {"eval/accuracy": right / asked} if asked else row

    def show(self, row: Mapping[str, Any]) -> None:
        """Log the numbers of a run and a few of its completions."""
        shown = {"eval/loss": "loss", "eval/token_accuracy": "token accuracy", "eval/accuracy": "answer accuracy"}
        log.info(
            "eval at step %d: %s",
            row["step"],
            ", ".join(f"{name} {row[key]:.4f}" for key, name in shown.items() if key in row),
        )
        for answer in self.answers[: self.config.show_samples]:
            mark, end = ("+" if answer.score == 1 else "-"), ("" if answer.is_finished else " (not ended)")
            log.info("  %s %s -> %s%s", mark, _one_line(answer.prompt), _one_line(answer.text), end)


@torch.no_grad()
def evaluate_loss(model: nn.Module, batches: Iterable[Mapping[str, Any]], loss: Loss) -> dict[str, float]:
    """Loss and token accuracy over held-out batches; the same for any batch size, layout and number of ranks.

    Args:
        model: The scoring model, unwrapped: an evaluation exchanges no gradient.
        batches: This rank's collated batches.
        loss: The training loss.

    Returns:
        `eval/loss` and `eval/token_accuracy` (weighted share of the targets that are the most likely token); empty where
        no held-out token has weight.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    counts = StepCounts()
    sums = torch.zeros(2, dtype=torch.float64)  # loss terms, weights of the targets that are most likely
    for batch in batches:
        counts += count_batch(batch)
        batch = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
        tokens, selected, targets = select_tokens(batch)
        scores = model(batch, targets, selected, temperature=loss.temperature)
        sums[0] += weighted_sum(token_coefficients(tokens, loss.aggregation), loss(scores.logprobs, tokens)).cpu()
        sums[1] += weighted_sum(tokens.weights.abs(), scores.is_argmax.float()).cpu()
    model.train(was_training)
    counts = StepCounts.from_tensor(sum_over_ranks(counts.as_tensor(device)))
    loss_sum, likely = sum_over_ranks(sums.to(device)).tolist()
    if counts.weight_total == 0:
        return {}
    return {
        "eval/loss": loss_sum / denominator(counts, loss.aggregation, loss.max_tokens),
        "eval/token_accuracy": likely / counts.weight_total,
    }


def _one_line(text: str, width: int = 100) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else f"…{line[-width:]}"
