"""Held-out loss by the reducer of training, and accuracy of generated answers."""

from collections.abc import Sequence
from importlib.resources import files

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from datum import Datum, collate_datums
from recipes.losses.cross_entropy import CrossEntropy
from recipes.losses.logprobs import TokenScores
from recipes.training.answers import Question, answer_questions, exact_match, stop_ids
from recipes.training.evaluation import evaluate_loss


class Spoken(nn.Module):
    """A model whose negative log-likelihood of a target is the input id; right where that is below 2."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, batch: dict, targets: Tensor, selected: Tensor, **_: object) -> TokenScores:
        nll = batch["input_ids"][selected].float()
        return TokenScores(-nll, nll < 2)


def rows(nlls: Sequence[Sequence[int]], weights: Sequence[Sequence[float]] | None = None) -> list[Datum]:
    weights = weights or [[1.0] * len(row) for row in nlls]
    return [Datum(row, {"target_tokens": [0] * len(row), "weights": w}) for row, w in zip(nlls, weights, strict=True)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_eval_loss_is_a_token_mean_for_any_batch_size(size: int, packed: bool) -> None:
    datums = rows([[4], [1, 1, 1]])
    batches = [collate_datums(datums[i : i + size], packed=packed) for i in range(0, 2, size)]
    assert evaluate_loss(Spoken(), batches, CrossEntropy()) == {"eval/loss": 1.75, "eval/token_accuracy": 0.75}


def test_fractional_weights_count_as_in_training() -> None:
    batch = collate_datums(rows([[2, 4]], [[0.5, 1.0]]))
    assert evaluate_loss(Spoken(), [batch], CrossEntropy())["eval/loss"] == pytest.approx(5 / 1.5)


def test_aggregation_is_that_of_training() -> None:
    batch = collate_datums(rows([[4], [1, 1, 1]]))
    assert evaluate_loss(Spoken(), [batch], CrossEntropy("sequence"))["eval/loss"] == pytest.approx(2.5)
    assert evaluate_loss(Spoken(), [batch], CrossEntropy("constant", 4))["eval/loss"] == 7 / 8


def test_nothing_with_weight_gives_no_number() -> None:
    assert evaluate_loss(Spoken(), [collate_datums(rows([[4]], [[0.0]]))], CrossEntropy()) == {}


def test_evaluation_leaves_the_mode_of_the_model() -> None:
    model = Spoken().train()
    evaluate_loss(model, [collate_datums(rows([[4]]))], CrossEntropy())
    assert model.training


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(str(files("recipes") / "demo" / "tokenizer"))


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config).eval()


def ask(tokenizer, *texts: str) -> list[Question]:
    return [Question(tokenizer(text)["input_ids"], "7", {"answer": "7"}) for text in texts]


def test_answers_do_not_depend_on_the_batch_and_keep_their_order(model, tokenizer) -> None:
    questions = ask(tokenizer, "What is 1?", "a", "What is the sum of 3 and 4, please?", "b c")
    alone = [answer_questions(model, tokenizer, [question], max_new_tokens=5)[0] for question in questions]
    assert answer_questions(model, tokenizer, questions, batch_size=3, max_new_tokens=5) == alone


def test_an_unfinished_answer_scores_nothing(model, tokenizer) -> None:
    (answer,) = answer_questions(model, tokenizer, ask(tokenizer, "x"), score=lambda text, row: 1.0, max_new_tokens=2)
    assert not answer.is_finished
    assert answer.score == 0.0


def test_scores_outside_of_zero_to_one_are_refused(model, tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.generation_config, "eos_token_id", list(range(len(tokenizer))))  # every token is an end
    with pytest.raises(ValueError, match="accepted are numbers from 0 to 1"):
        answer_questions(model, tokenizer, ask(tokenizer, "x"), score=lambda text, row: 3.0)
    (answer,) = answer_questions(model, tokenizer, ask(tokenizer, "x"), score=lambda text, row: 0.5)
    assert answer.score == 0.5


def test_stop_ids_are_a_set(model, tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.generation_config, "eos_token_id", [32000, 32007])
    assert stop_ids(model, tokenizer) == {32000, 32007, tokenizer.eos_token_id}


def test_exact_match_ignores_surrounding_white_space() -> None:
    assert exact_match(" 42\n", {"answer": 42}) == 1.0
    assert exact_match("4 2", {"answer": "42"}) == 0.0
