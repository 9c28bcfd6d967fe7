"""Accuracy of generated answers: greedy completions of held-out prompts, scored against the expected answer."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from datum.errors import DataError

Score = Callable[[str, Mapping[str, Any]], float]


@dataclass(frozen=True)
class Question:
    """One prompt with its expected answer.

    Attributes:
        prompt_ids: Token ids up to and including the generation prompt.
        answer: Expected completion.
        row: The data row it comes from, for scorers that need more than the answer.
    """

    prompt_ids: Sequence[int]
    answer: str
    row: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """A generated completion.

    Attributes:
        prompt: Decoded prompt.
        text: Completion without special tokens.
        is_finished: The model ended it within `max_new_tokens`.
        score: 0 to 1; an unfinished completion scores 0.
        expected: Expected completion.
    """

    prompt: str
    text: str
    is_finished: bool
    score: float
    expected: str


def exact_match(completion: str, row: Mapping[str, Any]) -> float:
    """1.0 where the completion is the row's `answer`, surrounding white space apart; else 0.0."""
    return float(completion.strip() == str(row["answer"]).strip())


def reasoning_gym(completion: str, row: Mapping[str, Any]) -> float:
    """Score by the reasoning-gym task that made the row, named in its `task`; `metadata` is the entry's, as JSON.

    Raises:
        DataError: The row lacks one of them, or the package is not installed.
    """
    try:
        from reasoning_gym.factory import get_score_answer_fn
    except ImportError as error:
        raise DataError("eval.score=recipes.training.answers.reasoning_gym needs: pip install reasoning-gym") from error
    if missing := [key for key in ("task", "metadata") if key not in row]:
        raise DataError(
            f"a row to be scored by reasoning-gym needs {missing[0]!r}; scripts/make_smollm2_data.py writes it"
        )
    entry = {"answer": row["answer"], "metadata": json.loads(row["metadata"])}
    return float(get_score_answer_fn(row["task"])(completion, entry))


@torch.no_grad()
def answer_questions(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    *,
    score: Score = exact_match,
    batch_size: int = 32,
    max_new_tokens: int = 32,
) -> list[Answer]:
    """Complete each prompt greedily and score it; answers come in the order of the questions.

    Prompts are batched by length and padded on the left with an explicit mask, so no token value is taken for padding.

    Raises:
        ValueError: A score is not between 0 and 1, or a prompt leaves no room in the model's context.
    """
    was_training = model.training
    model.eval()
    stops = stop_ids(model, tokenizer)
    answers: dict[int, Answer] = {}
    by_length = sorted(range(len(questions)), key=lambda i: (len(questions[i].prompt_ids), i))
    for start in range(0, len(by_length), batch_size):
        chosen = by_length[start : start + batch_size]
        completions = _generate(model, [questions[i].prompt_ids for i in chosen], stops, max_new_tokens)
        for i, ids in zip(chosen, completions, strict=True):
            is_finished = bool(ids) and ids[-1] in stops
            text = str(tokenizer.decode(ids, skip_special_tokens=True))
            value = score(text, questions[i].row) if is_finished else 0.0
            if not 0 <= value <= 1:
                raise ValueError(f"the score of {text!r} is {value}: accepted are numbers from 0 to 1")
            prompt = str(tokenizer.decode(list(questions[i].prompt_ids)))
            answers[i] = Answer(prompt, text, is_finished, float(value), questions[i].answer)
    model.train(was_training)
    return [answers[i] for i in range(len(questions))]


def stop_ids(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every id that ends a completion: those of the generation config and the tokenizer's end-of-sequence token."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = configured if isinstance(configured, list) else [configured]
    return {int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None}


def _generate(
    model: PreTrainedModel | PeftModel, prompts: Sequence[Sequence[int]], stops: set[int], max_new_tokens: int
) -> list[list[int]]:
    """Greedy continuations, each cut after its first stop id."""
    width = max(len(prompt) for prompt in prompts)
    fill = min(stops) if stops else 0
    input_ids = torch.full((len(prompts), width), fill, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        attention_mask[row, width - len(prompt) :] = 1
    config = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(stops) or None,
        pad_token_id=fill,
    )
    output = model.generate(  # type: ignore[operator]
        input_ids=input_ids.to(model.device), attention_mask=attention_mask.to(model.device), generation_config=config
    )
    completions = []
    for ids in output[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids))
        completions.append(ids[:end])
    return completions
