"""Evaluation on held-out rows: loss with the reducer of training, and accuracy of generated answers."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from conf.schema import EvalConfig, Layout, Scope, SFTConfig
from datum import collate_datums
from datum.packing import plan_microbatches
from datum.sources import DatumSet
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
from recipes.runtime.build import locate
from recipes.training.answers import Answer, Question, Score, answer_questions
from recipes.training.data import Data, token_budget
from recipes.training.ranks import rank_and_world, sum_over_ranks

log = logging.getLogger(__name__)


class Evaluation:
    """Held-out rows, ready to be evaluated at any step.

    Args:
        language_model: Model and tokenizer.
        heldout: Held-out Datums.
        plan: Indices of each of this rank's batches.
        questions: This rank's prompts with expected answers.
        loss: The training loss.
        config: Batch size, lengths, samples shown.
        has_questions: Whether any rank has questions.
        is_packed: Layout of the batches.
        score: Judges a completion.
    """

    def __init__(
        self,
        language_model: LanguageModel,
        heldout: DatumSet,
        plan: list[list[int]],
        questions: list[Question],
        loss: Loss,
        config: EvalConfig,
        *,
        has_questions: bool,
        is_packed: bool,
        score: Score,
    ):
        self.language_model = language_model
        self.heldout = heldout
        self.plan = plan
        self.questions = questions
        self.loss = loss
        self.config = config
        self.has_questions = has_questions
        self.is_packed = is_packed
        self.score = score

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether to evaluate after `step` of `num_steps`; the last step always is."""
        return step % self.config.every_steps == 0 or step == num_steps

    def metrics(self) -> list[str]:
        """Names of what `run` measures."""
        return ["eval/loss", "eval/token_accuracy", *(["eval/accuracy"] if self.has_questions else [])]

    def run(self, step: int) -> dict[str, float]:
        """Evaluate the model as it is and log the result; every rank must call it, and all get the same numbers."""
        batches = (collate_datums([self.heldout[i] for i in indices], packed=self.is_packed) for indices in self.plan)
        row = evaluate_loss(self.language_model.scoring, batches, self.loss)
        answers = answer_questions(
            self.language_model.model,
            self.language_model.tokenizer,
            self.questions,
            score=self.score,
            batch_size=self.config.batch_size,
            max_new_tokens=self.config.max_new_tokens,
        )
        sums = torch.tensor([sum(answer.score for answer in answers), len(answers)], dtype=torch.float64)
        right, asked = sum_over_ranks(sums.to(self.language_model.model.device)).tolist()
        if asked:
            row["eval/accuracy"] = right / asked
        self._show(step, row, answers)
        return row

    def _show(self, step: int, row: Mapping[str, float], answers: list[Answer]) -> None:
        numbers = ", ".join(f"{key.removeprefix('eval/')} {value:.4f}" for key, value in row.items())
        log.info("eval after step %d: %s", step, numbers or "no held-out token has weight")
        for answer in answers[: self.config.show_samples]:
            verdict = f"expected {_one_line(answer.expected)}" if answer.score < 1 else "right"
            end = "" if answer.is_finished else " (not ended)"
            log.info("  %s => %s%s   [%s]", _one_line(answer.prompt), _one_line(answer.text), end, verdict)


def build_evaluation(config: SFTConfig, data: Data, language_model: LanguageModel, loss: Loss) -> Evaluation | None:
    """The evaluation that the options ask for; None where `eval.every_steps` is 0 or there are no held-out rows."""
    if config.eval.every_steps == 0:
        return None
    if data.heldout is None:
        log.warning("nothing is evaluated: there are no held-out rows; give data.eval_path or data.eval_fraction")
        return None
    rank, world_size = rank_and_world()
    is_packed = config.collate.layout == Layout.packed
    plan = plan_microbatches(
        data.heldout.lengths.tolist(),
        world_size=world_size,
        microbatch_size=None if is_packed else config.eval.batch_size,
        max_tokens=token_budget(config),
        packing=config.collate.packing.value,
        fixed_rows=config.attention.scope == Scope.xdoc,
    )
    return Evaluation(
        language_model,
        data.heldout,
        [indices for indices in plan[rank] if indices],
        data.questions[rank::world_size],
        loss,
        config.eval,
        has_questions=bool(data.questions),
        is_packed=is_packed,
        score=locate(config.eval.score, config.allow_targets, key="eval.score"),
    )


@torch.no_grad()
def evaluate_loss(model: nn.Module, batches: Iterable[Mapping[str, Any]], loss: Loss) -> dict[str, float]:
    """Loss and token accuracy over held-out batches; the same for any batch size, layout and number of ranks.

    Args:
        model: The scoring model, unwrapped: an evaluation exchanges no gradient.
        batches: This rank's collated batches.
        loss: The training loss.

    Returns:
        `eval/loss` and `eval/token_accuracy` (weighted share of the targets that are the most likely token); empty
        where no held-out token has weight.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    counts = StepCounts()
    sums = torch.zeros(2, dtype=torch.float64)  # loss terms; weights of the targets that are most likely
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
